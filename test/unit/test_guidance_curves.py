"""Curves, buckets and validation, against test/cases and by hand."""

import json
import subprocess
import sys
import time
from functools import reduce
from pathlib import Path

import pytest

from sglang.multimodal_gen.configs import guidance_curves
from sglang.multimodal_gen.configs.guidance import (
    REQUEST_FIELDS,
    GuidanceConfig,
    GuidanceOptions,
    resolve_options,
)
from sglang.multimodal_gen.configs.guidance_curves import (
    MAX_STEPS,
    GuidanceError,
    branches_of,
    check_buckets,
    parse_curve,
)

CASES = json.loads((Path(__file__).parent.parent / "cases/guidance_curves.json").read_text())
SERVER = GuidanceConfig(buckets=8)


def options(curve="constant", *, buckets=8, mode="constant", scale=1.5) -> GuidanceOptions:
    spec = parse_curve(curve).spec
    return GuidanceOptions(curve=spec, buckets=buckets, bucket_mode=mode, scale=scale)


def resolve(fields, config=SERVER, *, scale=4.0, scale_is_named=False, plain_cfg_scale=None):
    return resolve_options(
        fields,
        config,
        scale=scale,
        scale_is_named=scale_is_named,
        plain_cfg_scale=scale if plain_cfg_scale is None else plain_cfg_scale,
    )


@pytest.mark.parametrize("case", CASES["good"], ids=lambda case: case["why"])
def test_good_case(case):
    schedule = options(
        case["curve"],
        buckets=case["guidance_buckets"],
        mode=case.get("guidance_bucket_mode", "constant"),
        scale=case["guidance_scale"],
    ).schedule(case["num_inference_steps"])
    assert list(schedule.bucket_ids) == case["bucket_ids"]
    assert schedule.scales == pytest.approx(case["scales"], abs=1e-9)
    assert schedule.forwards == case["forwards"]


@pytest.mark.parametrize("case", CASES["bad"], ids=lambda case: case["why"])
def test_bad_case(case):
    fields = {"guidance_curve": case.get("curve")} | {
        name: case[name] for name in REQUEST_FIELDS if name in case
    }
    with pytest.raises(GuidanceError) as error:
        resolve(fields).schedule(case.get("num_inference_steps", 30))
    assert error.value.field == case["field"]
    assert case["field"] in str(error.value)


NESTED = reduce(lambda inner, _: [inner], range(5000), [])  # deeper than Python prints


@pytest.mark.parametrize("value", [NESTED, 10**5000], ids=["nested", "digits"])
def test_what_cannot_be_printed_is_refused_by_name(value):
    for spec in (value, [value], {"a": value}):
        with pytest.raises(GuidanceError, match="guidance_curve: got"):
            parse_curve(spec)
    with pytest.raises(GuidanceError, match="guidance_buckets: got an? "):
        check_buckets(value)


@pytest.mark.parametrize(
    "curve",
    [
        [1.5] * 1_000_000,
        "constant:" + "1" * 9_900 + "x",
        "interval:1@" + "-" * 9_900 + ":",
        "points:" + "0=" + "1" * 9_900 + "x",
    ],
    ids=lambda curve: repr(curve)[:40],
)
def test_a_long_text_or_list_is_refused_at_once(curve):
    """All other requests wait while one is parsed."""
    start = time.process_time()
    with pytest.raises(GuidanceError):
        parse_curve(curve)
    assert time.process_time() - start < 0.3


def test_the_longest_schedule_is_made_in_time():
    points = "points:" + ",".join(f"{at / 1000}={2 + at % 7 / 7:.3f}" for at in range(700))
    for curve in (points, "cosine:7:1.1", "peak", [1.5 + at / 1e5 for at in range(MAX_STEPS)]):
        start = time.process_time()
        assert len(options(curve, buckets=1).schedule(MAX_STEPS).scales) == MAX_STEPS
        assert time.process_time() - start < 2


def test_bad_case_messages():
    with pytest.raises(GuidanceError, match="list of 31 numbers, wanted 30"):
        resolve({"guidance_curve": [2.0] * 31}).schedule(30)
    with pytest.raises(GuidanceError, match="constant.*linear.*cosine.*front.*peak.*interval.*po"):
        resolve({"guidance_curve": "liner:2:1"})


@pytest.mark.parametrize(
    "curve",
    [
        *("constant:inf", "constant:1e999", "constant:101", "constant:", "constant:1:2", ":"),
        *("[" * 3000 + "]" * 3000, "[" + "9" * 5000 + "]", "points:" + "0=1," * 5000 + "1=1"),
        *("constant:1_0", "constant:\uff12", "constant:0x1"),
        *("front:2:1", "front:2:1@", "peak:1:2@-0.1", "interval:2@0.5-0.5", "interval:2@0.5"),
        *("points", "points:", "points:0.5", "points:0=1,", "points:0=x", "points:2=1"),
        *("[1, 2", "[]", "[true]", '["1"]', "[[1]]", [True], ["1"], [float("nan")], [None]),
        *(5, True, {}, {"a": 1}, " "),
    ],
    ids=lambda curve: repr(curve)[:40],
)
def test_not_a_curve(curve):
    with pytest.raises(GuidanceError):
        parse_curve(curve)


@pytest.mark.parametrize(
    ("curve", "scales"),
    [
        ("linear", [2.66, 2.33, 2.0, 1.67]),
        ("front", [3.0, 3.0, 1.34, 1.34]),
        ("peak", [1.34, 2.66, 2.22, 1.78]),
        ("interval", [1, 2, 2, 1]),
        ("cosine", [2.66, 2.0 + 0.66 * 2**-0.5, 2.0, 2.0 - 0.66 * 2**-0.5]),
        ("peak:1:3@0", [3, 2.5, 2, 1.5]),
        ("peak:1:3@1", [1, 1.5, 2, 2.5]),
        ("interval:3@2.5e-1-7.5e-1", [1, 3, 3, 1]),
        ("points:0.5=2", [2, 2, 2, 2]),
        ("points:0=1,0.25=2,0.25=3,0.25=4,0.75=0", [1, 4, 2, 0]),
        ("[1, 2, 3, 4]", [1, 2, 3, 4]),
        (" constant:2 ", [2, 2, 2, 2]),
    ],
)
def test_shape(curve, scales):
    """Four steps at a request scale of 2; shapes without numbers follow it."""
    assert options(curve, scale=2.0).schedule(4).scales == pytest.approx(scales)


def test_every_fraction_of_every_step_count_is_exact():
    """`front:2:1@k/N` guides exactly k steps, whatever floats make of k/N."""
    for num_steps in range(1, 101):
        for guided in range(num_steps + 1):
            curve = f"front:2:1@{guided / num_steps!r}"
            # a rounded-up decimal lies behind its step, a rounded-down one before it
            forwards = options(curve, buckets=64).schedule(num_steps).forwards
            assert forwards["uncond"] - guided in (0, 1), (curve, num_steps)
    for percent in range(101):
        forwards = options(f"front:2:1@{percent / 100}").schedule(100).forwards
        assert forwards == {"cond": 100, "uncond": percent}


def test_buckets_keep_the_total_guidance():
    for num_steps in (1, 7, 30, 50):
        curve = options("cosine:7:1.5", buckets=64).schedule(num_steps).scales
        bucketed = options("cosine:7:1.5", buckets=4).schedule(num_steps).scales
        assert sum(bucketed) == pytest.approx(sum(curve))


def test_constant_is_the_same_float_with_any_bucket_count():
    for scale in (1.1, 1.5, 4.0, 7.3, 0.1 + 0.2):
        for buckets in range(1, 65):
            assert set(options(scale=scale, buckets=buckets).schedule(37).scales) == {scale}


def test_bucket_runs():
    schedule = options("interval:1.5@0-0.45", mode="linear").schedule(30)
    runs = [run.to_dict() for run in schedule.bucket_runs()]
    assert runs[3] == {"bucket": 3, "steps": [12, 13], "scale": 1.5}
    assert runs[4] == {"bucket": 3, "steps": [14, 14], "scale": 1.0}
    steps = [step for run in runs for step in range(run["steps"][0], run["steps"][1] + 1)]
    assert steps == list(range(30))
    moving = options("linear:2:1.2", buckets=2, mode="linear").schedule(4)
    assert [run.to_dict()["scale"] for run in moving.bucket_runs()] == [[2.0, 1.8], [1.6, 1.4]]


@pytest.mark.parametrize(
    ("curve", "warmup_steps", "scales"),
    [
        ("constant:3", 1, [3]),
        ("front:3:1@0.5", 2, [3, 1]),
        ([1, 3, 2, 1], 2, [3, 3]),
        ([1, 3], 2, [1, 3]),
        ([1, 1, 1], 2, [1, 1]),
        ("interval:3@0.1-0.6", 1, [3]),  # at one step it would not be guided
        ("interval:3@0.1-0.6", 4, [1, 3, 3, 1]),
        ("linear:1:0.5", 1, [0.975]),
        ("constant:1", 1, [1]),
        ("constant:0", 1, [0]),
    ],
)
def test_warm_up_runs_the_branches_of_the_request(curve, warmup_steps, scales):
    warmup = options(curve, buckets=64).for_warmup(warmup_steps, 20)
    assert warmup.schedule(warmup_steps).scales == pytest.approx(scales)


def test_branches():
    assert branches_of(1.0) == ("cond",)
    assert branches_of(0.0) == ("uncond",)
    assert branches_of(1.0000001) == ("uncond", "cond")


class TestDefaults:
    """The server's curve is for requests that name none."""

    FRONT = GuidanceConfig(buckets=8, curve="front:2:1@0.4", bucket_mode="linear")

    def test_request_without_fields(self):
        got = resolve({}, self.FRONT)
        assert (got.curve, got.buckets, got.bucket_mode) == ("front:2:1@0.4", 8, "linear")

    def test_a_named_scale_beats_a_curve_with_numbers(self):
        got = resolve({}, self.FRONT, scale=5.0, scale_is_named=True)
        assert (got.curve, got.scale) == ("constant", 5.0)

    def test_a_named_scale_is_what_a_curve_without_numbers_follows(self):
        got = resolve({}, GuidanceConfig(buckets=8, curve="front"), scale=5.0, scale_is_named=True)
        assert (got.curve, got.scale) == ("front", 5.0)

    def test_a_named_curve_beats_both(self):
        got = resolve({"guidance_curve": "constant:3"}, self.FRONT, scale_is_named=True)
        assert got.curve == "constant:3"

    def test_plain_cfg_where_nothing_is_named(self):
        got = resolve({}, scale=0.5, plain_cfg_scale=1.0)
        assert set(got.schedule(4).scales) == {1.0}

    def test_a_named_constant_takes_the_scale_at_its_word(self):
        got = resolve({"guidance_curve": "constant"}, scale=0.5, plain_cfg_scale=1.0)
        assert set(got.schedule(4).scales) == {0.5}

    def test_null_is_not_named(self):
        assert resolve(dict.fromkeys(REQUEST_FIELDS)) == resolve({})

    @pytest.mark.parametrize("field", REQUEST_FIELDS)
    def test_off(self, field):
        with pytest.raises(GuidanceError, match="--guidance-buckets") as error:
            resolve({field: 3}, GuidanceConfig())
        assert error.value.field == field


@pytest.mark.parametrize(
    "settings",
    [{"buckets": -1}, {"buckets": 65}, {"curve": "x"}, {"bucket_mode": "x"}, {"rows": "x"}],
    ids=str,
)
def test_bad_server_settings(settings):
    with pytest.raises(GuidanceError, match="--guidance-"):
        GuidanceConfig(**settings)


def test_long_values_are_cut_in_messages():
    with pytest.raises(GuidanceError) as error:
        parse_curve("x" * 10_000)
    assert len(str(error.value)) < 500


def test_needs_no_torch():
    code = f"import sys; exec(open({guidance_curves.__file__!r}).read()); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
