# SPDX-License-Identifier: Apache-2.0
"""Hooks into SRT, for GLM-Image's AR server.

Everywhere it gives back the tokens of source images, and a seed's tokens do not depend on what else
is in the batch. On a CPU host it honours seeds too: SRT honours ``sampling_seed`` only under
``--enable-deterministic-inference``, whose kernels and hash have CUDA builds alone in the published
wheel. Eager CPU matmuls of one thread are the same alone or batched, so what is missing is the
hash; the kernels are not needed. And it runs on several ranks.
"""

import torch

_MASK = 0xFFFFFFFF
_draws_by_token = False  # in a process that serves GLM-Image's AR


def take_source_images(resolved: tuple[type, str], *_args, **_kwargs) -> tuple[type, str] | None:
    """AFTER get_model_architecture."""
    model_class, architecture = resolved
    if model_class.__name__ != "GlmImageForConditionalGeneration":
        return None  # leaves the result as it is
    from sglang.srt.models.glm_image_source_tokens import GlmImageWithSourceTokens

    global _draws_by_token
    _draws_by_token = True
    return GlmImageWithSourceTokens, architecture


def draw_by_token(
    original, probs, top_ks, top_ps, min_ps, need_min_p, sampling_seed, positions, **options
):
    """AROUND top_k_top_p_min_p_sampling_from_probs_torch.

    A batch comes here where one of its requests limits its tokens, as SRT's own health check does.
    The noise of a seed then goes to tokens by their rank, in other batches by their id: so a
    request would be given other tokens whenever a health check fell into its batch.
    """
    given = (probs, top_ks, top_ps, min_ps, need_min_p, sampling_seed, positions)
    if sampling_seed is None or not _draws_by_token or options.get("return_filtered_probs"):
        return original(*given, **options)
    from sglang.srt.layers.sampler import multinomial_with_seed

    options["return_filtered_probs"] = True
    _, weights_BV, ids_BV, _ = original(*given, **options)
    by_id_BV = torch.zeros_like(weights_BV).scatter_(1, ids_BV.long(), weights_BV)
    drawn_B1 = multinomial_with_seed(by_id_BV.double().log_(), sampling_seed, positions)
    return drawn_B1.view(-1).to(torch.int32)


def skip_batch_invariant_kernels(original, *args, **kwargs):
    """AROUND enable_batch_invariant_mode: its Triton kernels have no CPU."""
    from sglang.srt.utils.common import get_dispatch_device_backend

    try:
        get_dispatch_device_backend()
    except RuntimeError:  # no accelerator
        return None
    return original(*args, **kwargs)


def keep_to_gloo(original, group_ranks, local_rank, backend, **kwargs):
    """AROUND init_model_parallel_group, which opens NCCL for every group of several ranks."""
    if backend == "gloo":
        kwargs["use_pynccl"] = False
    return original(group_ranks, local_rank, backend, **kwargs)


def hash_on_cpu(original, seed, positions, col_indices):
    """AROUND murmur_hash32, where the CPU op is missing."""
    if seed.device.type != "cpu" or hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        return original(seed, positions, col_indices)
    return murmur_hash32_cpu(seed, positions, col_indices)


def murmur_hash32_cpu(
    seed_N: torch.Tensor, positions_N: torch.Tensor, col_indices_M: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits, seed 0) of the 16 bytes seed, position, column; ``[N, M]`` uint32.

    Austin Appleby's public-domain algorithm; the seed is a 64-bit, the others 32-bit little endian.
    """
    seed_N1 = seed_N.long()[:, None]
    position_N1 = positions_N.long()[:, None]
    column_1M = col_indices_M.long()[None, :]
    hashed = torch.zeros(1, 1, dtype=torch.long)
    for block in (seed_N1 & _MASK, (seed_N1 >> 32) & _MASK, position_N1 & _MASK, column_1M):
        hashed = _mix(hashed, block)
    hashed = hashed ^ 16  # the length
    hashed = _times(hashed ^ (hashed >> 16), 0x85EBCA6B)
    hashed = _times(hashed ^ (hashed >> 13), 0xC2B2AE35)
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def _mix(hashed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _times(_rotate(_times(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotate(hashed ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """A 32-bit product; in two halves, since the whole one overflows 63 bits."""
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + ((x * high & 0xFFFF) << 16)) & _MASK
