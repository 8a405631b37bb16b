"""Two and four ranks give one rank's picture, and act on a plan together or not at all."""

import numpy as np
import pytest

from harness.engine import FP32, Engine, Failed
from harness.processes import probe_environment
from harness.server import source_image

QUOTED = 'a sign that says "open"'
SPOILED_SCALE = 6.5
LAYOUTS = {
    "tp2": dict(num_gpus=2, tp_size=2),
    "sp2": dict(num_gpus=2, sp_degree=2, ulysses_degree=2),
    "cfg2": dict(num_gpus=2, enable_cfg_parallel=True),
    "tp4": dict(num_gpus=4, tp_size=4),
    "cfg2 sp2": dict(num_gpus=4, enable_cfg_parallel=True, sp_degree=2, ulysses_degree=2),
}
REQUESTS = {
    "constant": dict(guidance_curve="constant", guidance_scale=2.0),
    "front": dict(guidance_curve="front:3:1@0.5", prompt=QUOTED),
    "every kind of step": dict(guidance_curve=[2, 0, 1, 4, 0.5, 1], prompt=QUOTED),
    "rescale": dict(guidance_curve="constant:4", guidance_rescale=0.7),
    "normalization": dict(guidance_curve="constant:4", cfg_normalization=0.8),
    "two images": dict(guidance_curve="front:3:1@0.5", num_outputs_per_prompt=2),
}


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def ranks(request, glm):
    environment = probe_environment(
        PROBE_SPOIL_RANK="1", PROBE_SPOIL_SCALE=str(SPOILED_SCALE)
    )
    with Engine(
        glm, env=environment, guidance_buckets=8, **LAYOUTS[request.param], **FP32
    ) as engine:
        yield engine


@pytest.mark.parametrize("name", REQUESTS)
def test_same_picture_as_on_one_rank(ranks, glm_packed, name):
    got = ranks.generate(**REQUESTS[name])
    wanted = glm_packed.generate(**REQUESTS[name])
    assert np.abs(got.images.astype(int) - wanted.images).max() <= 1
    assert got.guidance == wanted.guidance


def test_image_to_image(ranks, glm_packed, tmp_path):
    """Under sequence parallelism, upstream counts a source image once a rank."""
    path = tmp_path / "source.png"
    path.write_bytes(source_image())
    request = dict(guidance_curve="front:3:1@0.5", image_path=[str(path)])
    wanted = glm_packed.generate(**request).images.astype(int)
    assert np.abs(ranks.generate(**request).images - wanted).max() <= 1


@pytest.mark.parametrize("rows", ["packed", "split"])
def test_qwen_image_under_sequence_parallel(checkpoints, rows):
    """Upstream shards its text where it is not masked, and repeats it where it is."""
    options = dict(guidance_rows=rows, text_encoder_precisions=("fp32",), **FP32)
    checkpoint = checkpoints["qwen-image"]
    requests = [
        dict(guidance_curve="front:3:1@0.5", negative_prompt="blurry, with other words"),
        dict(guidance_curve="constant:3", negative_prompt="a cat", guidance_rescale=0.7),
    ]
    with Engine(checkpoint, guidance_buckets=8, **options) as one:
        wanted = [one.generate(**request) for request in requests]
    with Engine(checkpoint, guidance_buckets=8, **LAYOUTS["sp2"], **options) as two:
        for request, single in zip(requests, wanted):
            got = two.generate(**request)
            assert np.abs(got.images.astype(int) - single.images).max() <= 1
            assert got.guidance == single.guidance


def test_a_plan_altered_on_one_rank_is_refused_by_all(ranks, glm_packed):
    request = dict(guidance_curve=f"constant:{SPOILED_SCALE}")
    with pytest.raises(Failed, match="bucket plan of ranks .* differs from that of rank 0"):
        ranks.generate(**request)
    # it goes on serving
    for name in ("constant", "front"):
        wanted = glm_packed.generate(**REQUESTS[name]).images.astype(int)
        assert np.abs(ranks.generate(**REQUESTS[name]).images - wanted).max() <= 1
