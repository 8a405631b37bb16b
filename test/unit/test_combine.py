"""Combine and post-processes in fp32, against the formulas and upstream's own."""

from types import SimpleNamespace

import pytest
import torch

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import QwenImagePipelineConfig
from sglang.multimodal_gen.runtime.distributed.cfg_policy import CFGPolicy
from sglang.multimodal_gen.runtime.guidance.combine import combine

PLAIN = PipelineConfig.postprocess_cfg_noise
QWEN = QwenImagePipelineConfig.postprocess_cfg_noise


def request(**fields):
    values = dict(
        guidance_scale=3.0,
        true_cfg_scale=None,
        guidance_rescale=0.0,
        cfg_normalization=0.0,
        do_classifier_free_guidance=True,
        did_sp_shard_latents=False,
    )
    return SimpleNamespace(**values | fields)


def config(post_process):
    return SimpleNamespace(
        postprocess_cfg_noise=lambda *args: post_process(SimpleNamespace(), *args)
    )


@pytest.fixture
def predictions():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 2, 6, 8, generator=generator)


@pytest.mark.parametrize("post_process", [PLAIN, QWEN], ids=["plain", "qwen-image"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"guidance_rescale": 0.7}, {"cfg_normalization": 0.8}, {"true_cfg_scale": 3.0}],
    ids=str,
)
def test_equals_upstream_in_fp32(predictions, fields, post_process):
    cond, uncond = predictions
    batch = request(**fields)
    wanted = CFGPolicy().combine([cond, uncond], batch, 3.0, config(post_process))
    assert torch.equal(combine(cond, uncond, 3.0, batch, config(post_process)), wanted)


def test_bf16_predictions_are_combined_in_fp32(predictions):
    cond, uncond = predictions.bfloat16()
    got = combine(cond, uncond, 7.3, request(), config(PLAIN))
    assert got.dtype == torch.float32
    assert torch.equal(got, uncond.float() + 7.3 * (cond.float() - uncond.float()))


def test_post_process_sees_the_steps_scale(predictions):
    """Qwen-Image matches norms only above a scale of 1: the step's, not the request's."""
    cond, uncond = predictions
    got = combine(cond, uncond, 5.0, request(guidance_scale=0.5), config(QWEN))
    assert torch.allclose(got.norm(dim=-1), cond.norm(dim=-1), rtol=1e-5)
    below = combine(cond, uncond, 0.5, request(true_cfg_scale=4.0), config(QWEN))
    assert torch.equal(below, uncond + 0.5 * (cond - uncond))


def test_each_image_has_its_own_statistics(predictions):
    cond, uncond = predictions
    batch = request(guidance_rescale=0.7, cfg_normalization=0.8)
    both = combine(cond, uncond, 3.0, batch, config(PLAIN))
    for image in range(2):
        rows = slice(image, image + 1)
        alone = combine(cond[rows], uncond[rows], 3.0, batch, config(PLAIN))
        assert torch.allclose(both[rows], alone, atol=1e-6)
