"""Guidance with the prior from an AR server of SRT, which honours seeds on a CPU host too."""

import pytest

from harness.server import FP32_FLAGS, Server, ar_command, pngs


@pytest.fixture(scope="module")
def server_with_ar(glm):
    with Server(glm, command=ar_command(glm)) as ar:
        flags = ("--guidance-buckets", "8", "--srt-encoder-url", ar.url)
        with Server(glm, *flags, *FP32_FLAGS) as started:
            yield started


def test_same_seed_same_picture(server_with_ar):
    request = dict(guidance_curve="front:3:1@0.5", seed=11)
    first = server_with_ar.generate(**request)
    assert first["guidance"]["forwards"] == {"cond": 6, "uncond": 3}
    assert pngs(server_with_ar.generate(**request)) == pngs(first)
    assert pngs(server_with_ar.generate(**request | {"seed": 12})) != pngs(first)


def test_several_images_are_the_single_ones(server_with_ar):
    pair = server_with_ar.generate(guidance_curve="front:3:1@0.5", seed=11, n=2)
    assert pair["guidance"]["forwards"] == {"cond": 6, "uncond": 3}
    assert len(set(pngs(pair))) == 2
