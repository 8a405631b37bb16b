"""A guidance trace shows what each step did, changes nothing, and gives a swapped half away."""

import json

import numpy as np
import pytest
from PIL import Image

from harness.engine import FP32, Engine, Refused
from harness.processes import probe_environment

CURVE = [1.5, 3, 1, 0, 2, 1.5]
WRONG = (200, 30, 30)  # the colour of a step that is not what its branches combine to


@pytest.fixture(scope="module")
def traced(glm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces") / "new"
    environment = probe_environment(PROBE_SWAP="1")
    with Engine(
        glm,
        env=environment,
        guidance_buckets=8,
        guidance_rows="packed",
        guidance_trace=str(folder),
        **FP32,
    ) as engine:
        yield engine


def read(result):
    """The data's steps, and the sheet as pixels."""
    paths = result.guidance["trace"]
    with open(paths["data"]) as file:
        data = json.load(file)
    return data["steps"], np.asarray(Image.open(paths["sheet"]).convert("RGB"))


def red_pixels(sheet) -> int:
    return int((sheet == WRONG).all(axis=2).sum())


def test_nothing_changes(traced):
    plain = traced.generate(guidance_curve=CURVE)
    shown = traced.generate(guidance_curve=CURVE, guidance_trace=True)
    assert np.array_equal(plain.latents, shown.latents)
    assert np.array_equal(plain.images, shown.images)
    assert "trace" not in plain.guidance
    assert shown.guidance["forwards"] == plain.guidance["forwards"] == {"cond": 5, "uncond": 5}


def test_every_step_is_told(traced):
    steps, sheet = read(traced.generate(guidance_curve=CURVE, guidance_trace=True))
    assert [step["scale"] for step in steps] == CURVE
    assert [step["shown_scale"] for step in steps] == pytest.approx(CURVE, abs=1e-3)
    assert [step["step"] for step in steps] == list(range(6))
    for step in steps:
        assert step["error"] < 1e-3
        assert min(step["norm_cond"], step["norm_uncond"], step["norm_guided"]) > 0
    assert steps[2]["norm_guided"] == steps[2]["norm_cond"]
    assert steps[3]["norm_guided"] == steps[3]["norm_uncond"]
    assert red_pixels(sheet) == 0


def test_swapped_halves_show(traced):
    result = traced.generate(
        prompt="a cat with swapped halves", guidance_curve=CURVE, guidance_trace=True
    )
    steps, sheet = read(result)
    guided = [step for step in steps if step["scale"] not in (0, 1)]
    for step in guided:  # cond + s (uncond - cond)
        assert step["shown_scale"] == pytest.approx(1 - step["scale"], abs=1e-3)
        assert step["error"] == pytest.approx(2 * step["scale"] - 1, abs=1e-3)
    assert red_pixels(sheet) > 100 * len(guided)


def test_a_long_request_stays_small(traced):
    result = traced.generate(
        guidance_curve="linear:3:1", num_inference_steps=40, guidance_trace=True
    )
    steps, sheet = read(result)
    assert len(steps) == 40
    assert sheet.shape[0] < 600 and sheet.shape[1] < 2000


def test_a_request_without_guidance_shows_its_other_branch(traced):
    steps, _ = read(traced.generate(guidance_curve="constant:1", guidance_trace=True))
    assert all(step["norm_uncond"] > 0 and step["shown_scale"] == 1 for step in steps)


def test_refused_where_the_server_has_no_folder(glm_split):
    with pytest.raises(Refused, match="guidance_trace: got True.*--guidance-trace DIR"):
        glm_split.generate(guidance_trace=True)
