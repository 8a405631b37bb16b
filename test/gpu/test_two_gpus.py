"""Bucket graphs over two GPUs: off by themselves, refused by name, and pictures come."""

import pytest
import torch

from harness.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

LAYOUTS = {
    "tp 2": {"tp_size": 2},
    "sp 2": {"sp_degree": 2, "ulysses_degree": 2},
    "CFG parallel": {"enable_cfg_parallel": True},
}
OPTIONS = dict(
    guidance_buckets=8,
    num_gpus=2,
    bucket_graph_resolutions=["256x256"],
    attention_backend="torch_sdpa",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_runs_eagerly_and_says_why(glm, layout):
    with Engine(glm, **OPTIONS, **LAYOUTS[layout]) as engine:
        result = engine.generate(
            width=256, height=256, num_inference_steps=4, guidance_curve="constant:2"
        )
        assert result.images.shape[-3:] == (256, 256, 3)
        assert "Bucket graphs are off: they do not combine with 2 ranks" in engine.log.read_text()


def test_full_is_refused(glm):
    with pytest.raises(RuntimeError, match="does not combine with 2 ranks"):
        Engine(glm, bucket_graphs="full", **OPTIONS, **LAYOUTS["tp 2"])
