# SPDX-License-Identifier: Apache-2.0
"""SANA rows: text reaches the image through cross-attention, which always takes a mask."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from sglang.multimodal_gen.runtime.guidance.rows.base import (
    BranchKwargs,
    PackedRows,
    RowAdapter,
)


class SanaRowAdapter(RowAdapter):
    dit_class = "SanaTransformer2DModel"
    shared = masks = frozenset({"encoder_attention_mask"})
    # its forward takes any keyword; these are what other families read
    ignored = frozenset({"encoder_hidden_states_mask"})

    def group_mask(self, kwargs: BranchKwargs) -> torch.Tensor | None:
        mask = kwargs.get("encoder_attention_mask")
        return mask[0] if isinstance(mask, (list, tuple)) else mask

    def finish(self, groups: Sequence[BranchKwargs], packed: PackedRows) -> PackedRows:
        return replace(packed, kwargs=packed.kwargs | {"encoder_attention_mask": packed.mask_BL})
