# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image rows: its attention takes a text mask; upstream builds one only for batches."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from sglang.multimodal_gen.runtime.distributed.parallel_state import get_sp_world_size
from sglang.multimodal_gen.runtime.guidance.rows.base import (
    BranchKwargs,
    PackedRows,
    RowAdapter,
)


class QwenImageRowAdapter(RowAdapter):
    """Rows share the image's rotary cache; the longest text's cache covers the shorter ones."""

    dit_class = "QwenImageTransformer2DModel"
    stacked = frozenset({"txt_seq_lens", "img_shapes"})
    shared = frozenset({"freqs_cis", "freqs_complex", "encoder_hidden_states_mask"})

    def __init__(self, dit: torch.nn.Module):
        super().__init__(dit)
        # upstream's attention takes masked text from one rank's sequence only
        self.can_mask = get_sp_world_size() == 1

    def refusal(self, groups: Sequence[BranchKwargs]) -> str | None:
        if self.dit.zero_cond_t:
            # the edit models append one timestep of zero, which rows of several samples misread
            return "a DiT with a zero timestep for its source image takes one row group"
        return super().refusal(groups)

    def group_mask(self, kwargs: BranchKwargs) -> torch.Tensor | None:
        mask = kwargs.get("encoder_hidden_states_mask")
        return mask[0] if isinstance(mask, (list, tuple)) else mask

    def finish(self, groups: Sequence[BranchKwargs], packed: PackedRows) -> PackedRows:
        longest = max(groups, key=lambda kwargs: self.text_of(kwargs).shape[1])
        return replace(
            packed,
            kwargs=packed.kwargs
            | {
                "encoder_hidden_states_mask": packed.mask_BL,
                "freqs_cis": longest.get("freqs_cis"),
                "freqs_complex": longest.get("freqs_complex"),
            },
        )
