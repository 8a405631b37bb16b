# SPDX-License-Identifier: Apache-2.0
"""Classifier-free guidance on the predictions of one sample, in fp32.

``uncond + s * (cond - uncond)``: Ho and Salimans, "Classifier-Free Diffusion Guidance",
arXiv:2207.12598, with the scale written as in Imagen and diffusers (1 is the cond branch).
"""

from typing import Any

import torch
import torch.distributed as dist

from sglang.multimodal_gen.runtime.distributed.parallel_state import (
    get_sp_group,
    get_sp_parallel_rank,
    get_sp_world_size,
)


class StepScaleView:
    """A request as the model's CFG post-process should see it at one step.

    Post-processes decide by the request's scale (Qwen-Image's norm matching does), and a curve
    gives each step its own. Everything else is read through to the request.
    """

    def __init__(self, batch: Any, scale: float):
        self._batch = batch
        self.guidance_scale = scale
        self.true_cfg_scale = scale if batch.true_cfg_scale is not None else None
        self.do_classifier_free_guidance = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


def combine(
    cond: torch.Tensor,
    uncond: torch.Tensor,
    scale: float,
    batch: Any,
    pipeline_config: Any,
) -> torch.Tensor:
    """Combine both predictions of a sample and post-process the result.

    Args:
        cond, uncond: ``[images, ...]``, any float dtype.
        scale: the step's effective scale, neither 0 nor 1 (those take one branch as it is).
        batch: the request, for ``cfg_normalization``, ``guidance_rescale`` and the model's own
            ``postprocess_cfg_noise``.

    Returns:
        ``[images, ...]`` in fp32.
    """
    cond, uncond = cond.float(), uncond.float()
    combined = uncond + scale * (cond - uncond)
    if batch.cfg_normalization and float(batch.cfg_normalization) > 0:
        combined = _limit_norm(combined, cond, float(batch.cfg_normalization), batch)
    if batch.guidance_rescale > 0:
        combined = _rescale(combined, cond, batch.guidance_rescale, batch)
    return pipeline_config.postprocess_cfg_noise(StepScaleView(batch, scale), combined, cond)


def is_plain(batch: Any, pipeline_config: Any) -> bool:
    """Whether `combine` is the formula alone for this request, without a post-process."""
    from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig

    own = type(pipeline_config).postprocess_cfg_noise
    return not (
        (batch.cfg_normalization and float(batch.cfg_normalization) > 0)
        or batch.guidance_rescale > 0
        or own is not PipelineConfig.postprocess_cfg_noise
    )


def _limit_norm(combined, cond, factor: float, batch) -> torch.Tensor:
    """Shrink each image's prediction to at most `factor` times the norm of its cond branch."""
    limit = _norm(cond, batch) * factor
    norm = _norm(combined, batch)
    return combined * torch.where(norm > limit, limit / norm, torch.ones_like(norm))


def _rescale(combined, cond, share: float, batch) -> torch.Tensor:
    """Blend towards the std of the cond branch: Lin et al., arXiv:2305.08891, section 3.4."""
    rescaled = combined * (_std(cond, batch) / _std(combined, batch))
    return share * rescaled + (1 - share) * combined


def _norm(x: torch.Tensor, batch) -> torch.Tensor:
    """L2 norm of each whole image, ``[images, 1, ...]``; `x` may be this rank's shard of it."""
    dims = tuple(range(1, x.ndim))
    if not batch.did_sp_shard_latents:
        return torch.linalg.vector_norm(x, dim=dims, keepdim=True)
    squares = _valid_part(x, batch).square().sum(dim=dims, keepdim=True)
    return _sum_over_sp(squares).sqrt()


def _std(x: torch.Tensor, batch) -> torch.Tensor:
    """Unbiased std of each whole image, ``[images, 1, ...]``; `x` may be this rank's shard."""
    dims = tuple(range(1, x.ndim))
    if not batch.did_sp_shard_latents:
        return x.std(dim=dims, keepdim=True)
    valid = _valid_part(x, batch)
    count = _sum_over_sp(x.new_full((1,), float(valid[0].numel())))
    mean = _sum_over_sp(valid.sum(dim=dims, keepdim=True)) / count
    squares = _sum_over_sp((valid - mean).square().sum(dim=dims, keepdim=True))
    return (squares / (count - 1)).sqrt()


def _sum_over_sp(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total, group=get_sp_group().device_group)
    return total


def _valid_part(x: torch.Tensor, batch) -> torch.Tensor:
    """This rank's shard without the padding that made the sharded axis divisible."""
    axis = {3: 1, 4: 2}.get(x.ndim, 2)  # tokens [B, S, C], rows [B, C, H, W], frames [B, C, T, ...]
    length = batch.raw_latent_shape[axis]
    padding = x.shape[axis] * get_sp_world_size() - length
    if padding <= 0:
        return x
    left = max(0, length - get_sp_parallel_rank() * x.shape[axis])
    return x.narrow(axis, 0, min(left, x.shape[axis]))
