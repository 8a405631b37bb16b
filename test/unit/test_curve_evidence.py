"""The arithmetic of the evidence: what is matched is matched, intervals are what they say."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARK = Path(__file__).parents[2] / "benchmark"


@pytest.fixture(autouse=True)
def benchmark_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    yield
    for name in ("curve_grid", "curve_metrics", "curve_table"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("scale", "steps"), [(2.5, 20), (1.5, 30)])
def test_settings_are_matched(scale, steps):
    from curve_grid import settings

    seen = list(settings(scale, steps))
    for setting in seen:
        schedule = setting.schedule()
        forwards = sum(schedule.forwards.values())
        mean = sum(schedule.scales) / setting.steps
        if setting.group == "matched mean":
            assert mean == pytest.approx(scale, rel=1e-3)
        if setting.group.startswith("interval"):
            guided = [s for s in schedule.scales if s != 1]
            assert forwards == steps + len(guided) < 2 * steps or setting.label == "0-1"
        if setting.group == "fewer steps":
            assert forwards == 2 * setting.steps < 2 * steps
    groups = {setting.group for setting in seen}
    for group in (g for g in groups if g.startswith("buckets")):
        means = {
            round(sum(s.schedule().scales) / steps, 6)
            for s in seen
            if s.group == group and s.mode == "constant"
        }
        assert len(means) == 1, "bucketing keeps the total guidance"
    assert len({setting.key for setting in seen}) >= len(seen) - 3


def test_frechet_distance():
    from curve_metrics import FrechetDistance

    random = np.random.default_rng(1)
    reference = random.normal(size=(4000, 8))
    distance = FrechetDistance(reference)
    assert distance(reference) == pytest.approx(0, abs=1e-9)
    # of Gaussians that differ in mean and in scale along each axis
    moved = reference * 2 + 3
    sigma = reference.std(0, ddof=1)
    wanted = ((reference.mean(0) + 3) ** 2).sum() + (sigma**2).sum()
    assert distance(moved) == pytest.approx(wanted, rel=0.02)
    low, high = distance.interval(moved[:500])
    assert low < distance(moved[:500]) < high


def test_intervals_of_shares_and_means():
    from curve_metrics import mean_interval, share_interval

    assert share_interval(90, 100) == pytest.approx((0.8256, 0.9448), abs=1e-3)
    assert share_interval(0, 50)[0] == pytest.approx(0, abs=1e-9)
    values = np.random.default_rng(2).normal(5, 1, size=400)
    low, high = mean_interval(values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(4 / 20, rel=0.3)


def test_feature_space_is_fixed_and_tells_pictures_apart():
    from curve_metrics import FeatureSpace, chroma, clipped

    random = torch.Generator().manual_seed(3)
    pictures = torch.rand(80, 3, 48, 48, generator=random)
    spaces = [FeatureSpace([pictures], torch.device("cpu")) for _ in range(2)]
    assert np.array_equal(spaces[0].reference, spaces[1].reference)
    assert spaces[0].reference.std(0, ddof=1) == pytest.approx(1, rel=1e-6)
    assert np.abs(spaces[0](pictures * 0.5) - spaces[0].reference).mean() > 0.5
    gray = torch.full((1, 3, 8, 8), 0.5)
    red = torch.tensor([1.2, 0, 0]).view(1, 3, 1, 1).expand(1, 3, 8, 8)
    assert chroma(gray).item() == 0
    assert chroma(red.clamp(0, 1)).item() == 1
    assert clipped(red).item() == pytest.approx(1 / 3)


def test_a_setting_is_at_one_process_at_a_time(tmp_path):
    from curve_table import locked

    with locked(tmp_path / "setting.lock") as first, locked(tmp_path / "setting.lock") as second:
        assert first and not second
    with locked(tmp_path / "setting.lock") as again:
        assert again
