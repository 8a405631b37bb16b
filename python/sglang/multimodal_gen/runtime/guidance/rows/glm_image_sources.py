# SPDX-License-Identifier: Apache-2.0
"""Image-to-image of GLM-Image under sequence parallelism: source images count once.

Every rank has all keys of the source images, which come before those of the text. Upstream 0.5.23
takes the first of them for the text and exchanges the rest with the picture's shards, so that they
weigh as much as there are ranks. Here the picture's keys are gathered, and each rank attends for
its own part.
"""

import torch

from sglang.multimodal_gen.runtime.distributed.parallel_state import get_sp_group


def attend_to_whole_sources(attention: torch.nn.Module) -> None:
    """
    Args:
        attention: a `GlmImageAttention` of this rank, one of several.
    """
    forward, attend = attention.forward, attention.attn.forward
    cache = None  # of the forward that runs

    def forward_with_cache(*args, kv_cache=None, **kwargs):
        nonlocal cache
        cache = kv_cache
        return forward(*args, kv_cache=kv_cache, **kwargs)

    def attend_here(query_BSHD, key_BSHD, value_BSHD, *, num_replicated_prefix=0, **kwargs):
        if cache is None or cache.k_cache is None or cache.mode == "skip":
            kwargs["num_replicated_prefix"] = num_replicated_prefix
            return attend(query_BSHD, key_BSHD, value_BSHD, **kwargs)
        if cache.mode == "read":
            shard = query_BSHD.shape[1] - num_replicated_prefix
            key_BSHD = _gather_end(key_BSHD, shard)
            value_BSHD = _gather_end(value_BSHD, shard)
        kwargs["skip_sequence_parallel_override"] = True
        return attend(query_BSHD, key_BSHD, value_BSHD, **kwargs)

    attention.forward, attention.attn.forward = forward_with_cache, attend_here


def _gather_end(whole_BSHD: torch.Tensor, shard: int) -> torch.Tensor:
    """What all ranks have alike, then the last `shard` positions of each."""
    alike_BSHD, shard_BSHD = whole_BSHD[:, :-shard], whole_BSHD[:, -shard:]
    return torch.cat([alike_BSHD, get_sp_group().all_gather(shard_BSHD.contiguous(), dim=1)], dim=1)
