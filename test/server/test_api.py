"""The OpenAI image API of a guidance server."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

from harness.server import HTTPFailure, pixels, pngs

CASES = json.loads((Path(__file__).parent.parent / "cases/guidance_curves.json").read_text())
FRONT_BUCKETS = [
    {"bucket": bucket, "steps": [step, step], "scale": scale}
    for step, (bucket, scale) in enumerate(
        [(0, 2.0), (1, 2.0), (2, 2.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    )
]


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def source_image(height: int = 64, width: int = 64) -> io.BytesIO:
    image = Image.fromarray(np.indices((height, width, 3)).sum(0).astype(np.uint8) * 2)
    data = io.BytesIO()
    image.save(data, "PNG")
    data.name = "source.png"
    return data


def edit(client, image=None, **fields):
    return client.images.edit(
        model="any",
        image=image or source_image(),
        prompt="make it blue",
        size="64x64",
        response_format="b64_json",
        extra_body={"num_inference_steps": 6, "seed": 7, "output_format": "png", **fields},
    )


def test_response_says_what_was_run(server):
    guidance = server.generate(guidance_curve="front:2:1@0.5")["guidance"]
    assert guidance == {
        "curve": "front:2:1@0.5",
        "buckets": FRONT_BUCKETS,
        "forwards": {"cond": 6, "uncond": 3},
    }


def test_a_request_without_guidance_fields_is_plain_cfg(server):
    guidance = server.generate(guidance_scale=2.5)["guidance"]
    assert guidance["curve"] == "constant"
    assert {run["scale"] for run in guidance["buckets"]} == {2.5}
    assert guidance["forwards"] == {"cond": 6, "uncond": 6}


def test_every_image_of_a_request_alike(server):
    response = server.generate(guidance_curve="front:2:1@0.5", n=2)
    assert len(response["data"]) == 2
    assert response["guidance"]["forwards"] == {"cond": 6, "uncond": 3}


def test_openai_client(client):
    response = client.images.generate(
        model="any",
        prompt="a cat",
        size="64x64",
        response_format="b64_json",
        extra_body={
            "num_inference_steps": 6,
            "guidance_curve": [3, 3, 1, 1, 1, 1],
            "guidance_buckets": 3,
            "guidance_bucket_mode": "linear",
        },
    )
    assert response.guidance["curve"] == [3, 3, 1, 1, 1, 1]
    assert response.guidance["forwards"] == {"cond": 6, "uncond": 2}
    assert len(response.guidance["buckets"]) == 3


@pytest.mark.parametrize("curve", ["interval:3@0.3-0.7", [1, 1, 3, 3, 3, 1], "[1, 1, 3, 3, 3, 1]"])
def test_openai_client_edits(client, curve):
    """A multipart form carries text; the client sends a list as repeated ``name[]`` fields."""
    guidance = edit(client, guidance_curve=curve, guidance_buckets=6).guidance
    assert guidance["forwards"] == {"cond": 6, "uncond": 3}
    assert [run["scale"] for run in guidance["buckets"]] == [1, 1, 3, 3, 3, 1]


def test_edits_without_guidance_fields(client):
    guidance = edit(client).guidance
    assert guidance["curve"] == "constant"
    assert guidance["forwards"] == {"cond": 6, "uncond": 6}


def test_source_image_survives_skipped_uncond_steps(client):
    """The cond rows read the source's cache after steps with, without and again with uncond."""

    def image(curve):
        (data,) = edit(client, guidance_curve=curve).data
        return pixels(base64.b64decode(data.b64_json))

    skipped = image([2, 1, 1, 2, 1, 2])
    # at 1.0000001 the uncond branch runs and changes nothing that a pixel shows
    resumed = image([2, 1.0000001, 1.0000001, 2, 1.0000001, 2])
    assert np.abs(skipped - resumed).max() <= 1
    assert np.abs(skipped - image([2, 0, 1, 2, 1, 2])).max() > 10


def test_edits_of_several_images(client):
    """Sources of different size, and two pictures of them."""
    sources = [source_image(), source_image(96, 64)]
    response = edit(client, sources, guidance_curve="front:3:1@0.5", n=2)
    assert response.guidance["forwards"] == {"cond": 6, "uncond": 3}
    first, second = (pixels(base64.b64decode(data.b64_json)) for data in response.data)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("case", CASES["bad"], ids=lambda case: case["why"])
def test_bad_fields_answer_400(server, client, case):
    fields = {name: case[name] for name in case if name.startswith("guidance_")}
    if "curve" in case:
        fields["guidance_curve"] = case["curve"]
    steps = case.get("num_inference_steps", 6)
    with pytest.raises(HTTPFailure) as failure:
        server.generate(num_inference_steps=steps, **fields)
    assert failure.value.status == 400
    assert case["field"] in failure.value.body
    if fields.get("guidance_curve") in ([], ""):
        return  # the client sends neither in a form
    with pytest.raises(BadRequestError, match=case["field"]):
        edit(client, num_inference_steps=steps, **fields)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"cfg_gate_step": 0.5}, "cfg_gate_step"),
        ({"enable_teacache": True}, "enable_teacache"),
        ({"enable_cache_dit": True}, "enable_cache_dit"),
        ({"progressive_mode": "dct"}, "progressive_mode"),
        ({"negative_prompt": "blurry", "guidance_curve": "constant"}, "negative_prompt"),
        ({"negative_prompt": "blurry", "guidance_buckets": 4}, "negative_prompt"),
        ({"num_inference_steps": 1_000_000}, "num_inference_steps"),
        ({"n": 2, "seed": [1]}, "seed"),
        ({"n": 2, "seed": 2**64 - 1}, "seed"),
    ],
    ids=str,
)
def test_what_does_not_combine_answers_400(server, fields, name):
    with pytest.raises(HTTPFailure) as failure:
        server.generate(**fields)
    assert failure.value.status == 400
    assert name in failure.value.body


def test_negative_prompts_that_glm_image_may_ignore(server):
    """Empty beside guidance fields, and any text beside none, as upstream."""
    with_empty = server.generate(negative_prompt="", guidance_curve="constant", guidance_scale=2)
    with_text = server.generate(negative_prompt="blurry", guidance_scale=2)
    assert np.array_equal(pixels(pngs(with_empty)[0]), pixels(pngs(with_text)[0]))


def test_fields_in_extra_params(server):
    """Where upstream reads a model's own fields, these are read too."""
    response = server.generate(extra_params={"guidance_curve": "front:2:1@0.5"})
    assert response["guidance"]["curve"] == "front:2:1@0.5"


def test_log_and_metrics(server):
    def counts():
        text = server.get("/metrics")
        return {
            branch: float(value)
            for branch, value in re.findall(
                r'diffusion_guidance_forwards_total{branch="(\w+)".*} (\S+)', text
            )
        }

    server.generate()
    before = counts()
    response = server.generate(guidance_curve="front:2:1@0.5", n=2)
    after = counts()
    assert after["cond"] - before["cond"] == 12
    assert after["uncond"] - before["uncond"] == 6
    lines = [line for line in server.log.read_text().splitlines() if response["id"] in line]
    assert any(
        "curve=front:2:1@0.5" in line and "forwards=6 cond + 3 uncond an image" in line
        for line in lines
    )
