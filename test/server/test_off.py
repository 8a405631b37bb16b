"""Without this project's flags a server is upstream's, byte for byte."""

import base64

import pytest

from harness.server import FP32_FLAGS, HTTPFailure, Server, pngs

REQUESTS = [
    dict(),
    dict(guidance_scale=4.0, prompt='a sign that says "open"'),
    dict(guidance_scale=1.0, n=2),
    dict(size="96x64", num_inference_steps=3, negative_prompt="blurry"),
]


@pytest.fixture(scope="module")
def off(glm):
    with Server(glm, *FP32_FLAGS) as started:
        yield started


@pytest.fixture(scope="module")
def upstream(glm):
    with Server(glm, *FP32_FLAGS, upstream=True) as started:
        yield started


@pytest.mark.parametrize("request_fields", REQUESTS, ids=str)
def test_same_bytes_as_upstream(off, upstream, request_fields):
    got, wanted = (server.generate(**request_fields) for server in (off, upstream))
    assert pngs(got) == pngs(wanted)
    assert [base64.b64decode(image["b64_json"])[:4] for image in got["data"]] == [
        b"\x89PNG"
    ] * len(got["data"])
    assert list(got) == list(wanted)  # the response has the same keys in the same order


@pytest.mark.parametrize(
    "field",
    [{"guidance_curve": "constant"}, {"guidance_buckets": 4}, {"guidance_bucket_mode": "x"}],
)
def test_guidance_fields_are_not_ignored(off, field):
    with pytest.raises(HTTPFailure, match="--guidance-buckets") as failure:
        off.generate(**field)
    assert failure.value.status == 400
    assert next(iter(field)) in failure.value.body


def test_cfg_gate_step_still_works(off, upstream):
    """What a guidance server refuses is untouched on any other."""
    fields = dict(cfg_gate_step=0.5, guidance_scale=3.0)
    assert pngs(off.generate(**fields)) == pngs(upstream.generate(**fields))
