# SPDX-License-Identifier: Apache-2.0
"""Row adapters: how the rows of one DiT family share a forward. One module a family."""

import torch

from sglang.multimodal_gen.runtime.guidance.rows.base import PackedRows, RowAdapter
from sglang.multimodal_gen.runtime.guidance.rows.glm_image import GlmImageRowAdapter
from sglang.multimodal_gen.runtime.guidance.rows.qwen_image import QwenImageRowAdapter
from sglang.multimodal_gen.runtime.guidance.rows.sana import SanaRowAdapter
from sglang.multimodal_gen.runtime.guidance.rows.stable_diffusion_3 import (
    StableDiffusion3RowAdapter,
)

ROW_ADAPTERS: dict[str, type[RowAdapter]] = {
    adapter.dit_class: adapter
    for adapter in (
        GlmImageRowAdapter,
        QwenImageRowAdapter,
        SanaRowAdapter,
        StableDiffusion3RowAdapter,
    )
}

# Above this many image tokens a row, two forwards cost less than one that masks its keys: a key
# mask moves attention off the flash kernel (docs/benchmarks.md, "Packed rows").
MASKED_ROWS_MAX_IMAGE_TOKENS = 1024


def build_row_adapter(dit: torch.nn.Module) -> RowAdapter | None:
    """The adapter for this DiT, or None for a family that has none."""
    # FSDP puts a class of its own in front
    for cls in type(dit).__mro__:
        if cls.__name__ in ROW_ADAPTERS:
            return ROW_ADAPTERS[cls.__name__](dit)
    return None


def rows_pack(mode: str, *, refusal: str | None, masked: bool, image_tokens: int) -> bool:
    """Whether both branches of a guided step run as one packed forward.

    Args:
        mode: ``--guidance-rows``.
        refusal: why the rows cannot share a forward, or None.
        masked: whether sharing means padding texts and masking the padding.
        image_tokens: of one row, on this rank.
    """
    if refusal is not None or mode == "split":
        return False
    if mode == "packed":
        return True
    return not masked or image_tokens <= MASKED_ROWS_MAX_IMAGE_TOKENS


__all__ = ["PackedRows", "RowAdapter", "build_row_adapter", "rows_pack"]
