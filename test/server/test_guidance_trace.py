"""A guidance trace shows what each step did, changes nothing, and gives a swapped half away."""

import json

import numpy as np
import pytest
from PIL import Image

from harness.batching import together
from harness.processes import probe_environment
from harness.server import FP32_FLAGS, HTTPFailure, Server, pixels, pngs

CURVE = [1.5, 3, 1, 0, 2, 1.5]
WRONG = (200, 30, 30)  # the colour of a step that is not what its branches combine to


@pytest.fixture(scope="module")
def traced(glm, tmp_path_factory):
    """Continuous batching, packed rows, traces into a folder that is not there yet."""
    folder = tmp_path_factory.mktemp("traces") / "new"
    flags = ("--guidance-buckets", "8", "--guidance-rows", "packed", "--guidance-trace")
    environment = probe_environment(PROBE_SWAP="1")
    with Server(glm, *flags, str(folder), *FP32_FLAGS, env=environment) as started:
        yield started


def ask(server, **body):
    """The answer of a traced request, the data's steps, and the sheet as pixels."""
    answer = server.generate(**{"guidance_curve": CURVE, "guidance_trace": True, **body})
    return answer, *read(answer)


def read(answer):
    paths = answer["guidance"]["trace"]
    with open(paths["data"]) as file:
        steps = json.load(file)["steps"]
    return steps, np.asarray(Image.open(paths["sheet"]).convert("RGB"))


def red_pixels(sheet) -> int:
    return int((sheet == WRONG).all(axis=2).sum())


def test_nothing_changes(traced):
    plain = traced.generate(guidance_curve=CURVE)
    shown, steps, sheet = ask(traced)
    assert pngs(shown) == pngs(plain)
    assert "trace" not in plain["guidance"]
    assert shown["guidance"]["forwards"] == {"cond": 5, "uncond": 5}
    assert shown["guidance"]["forwards"] == plain["guidance"]["forwards"]


def test_every_step_is_told(traced):
    _, steps, sheet = ask(traced)
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
    _, steps, sheet = ask(traced, prompt="a cat with swapped halves")
    guided = [step for step in steps if step["scale"] not in (0, 1)]
    for step in guided:  # cond + s (uncond - cond)
        assert step["shown_scale"] == pytest.approx(1 - step["scale"], abs=1e-3)
        assert step["error"] == pytest.approx(2 * step["scale"] - 1, abs=1e-3)
    assert red_pixels(sheet) > 100 * len(guided)


def test_a_traced_request_shares_forwards(traced):
    """Its own prediction comes from the shared forward; neither picture changes."""
    curve = dict(guidance_curve="linear:3:1.5", num_inference_steps=24)
    bodies = [
        {**curve, "guidance_trace": True},
        {**curve, "prompt": "a dog", "seed": 3},
        {**curve, "prompt": "a crow", "seed": 4, "guidance_trace": True},
    ]
    alone = [traced.generate(**{**body, "guidance_trace": False}) for body in bodies]
    got = together(traced, bodies)
    for answer, wanted in zip(got, alone):
        (mine,), (theirs,) = pngs(answer), pngs(wanted)
        assert np.abs(pixels(mine) - pixels(theirs)).max() <= 1  # another batch shape
    for answer in (got[0], got[2]):
        steps, _ = read(answer)
        assert all(step["error"] < 1e-3 for step in steps)


def test_a_long_request_stays_small(traced):
    _, steps, sheet = ask(traced, guidance_curve="linear:3:1", num_inference_steps=40)
    assert len(steps) == 40
    assert sheet.shape[0] < 600 and sheet.shape[1] < 2000


def test_a_request_without_guidance_shows_its_other_branch(traced):
    _, steps, _ = ask(traced, guidance_curve="constant:1")
    assert all(step["norm_uncond"] > 0 and step["shown_scale"] == 1 for step in steps)


def test_refused_where_the_server_has_no_folder(server):
    with pytest.raises(HTTPFailure, match="guidance_trace: got True.*--guidance-trace DIR") as no:
        server.generate(guidance_trace=True)
    assert no.value.status == 400
    server.generate(guidance_trace=False)
