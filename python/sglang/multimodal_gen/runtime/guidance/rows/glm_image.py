# SPDX-License-Identifier: Apache-2.0
"""GLM-Image rows. Its attention takes no mask, so one is slipped in around a packed forward."""

from collections.abc import Sequence
from contextlib import contextmanager

import torch

from sglang.multimodal_gen.runtime.distributed.parallel_state import get_sp_world_size
from sglang.multimodal_gen.runtime.guidance.rows.base import (
    BranchKwargs,
    PackedRows,
    RowAdapter,
)
from sglang.multimodal_gen.runtime.guidance.rows.glm_image_sources import attend_to_whole_sources


class GlmImageRowAdapter(RowAdapter):
    """cond and uncond differ in ``prior_token_drop`` and in the glyph text.

    Only image tokens carry rotary positions, so padding at the end of the text moves nothing. The
    key/value cache of source images has one mode a forward: image-to-image rows never share one.
    """

    dit_class = "GlmImageTransformer2DModel"
    stacked = frozenset({"prior_token_id", "prior_token_drop", "target_size", "crop_coords"})
    shared = frozenset({"freqs_cis"})
    in_graphs = True
    unpadded_text_length = 1  # without quoted text the glyph text is its end token alone

    def __init__(self, dit: torch.nn.Module):
        super().__init__(dit)
        self._key_mask_BS: torch.Tensor | None = None
        for block in dit.transformer_blocks:
            if get_sp_world_size() > 1:
                attend_to_whole_sources(block.attn1)
            self._mask_attention(block.attn1.attn)

    def refusal(self, groups: Sequence[BranchKwargs]) -> str | None:
        if any(kwargs.get("kv_caches") is not None for kwargs in groups):
            return "image-to-image rows read and skip one key/value cache"
        return super().refusal(
            [{k: v for k, v in kwargs.items() if k != "kv_caches_mode"} for kwargs in groups]
        )

    def example(
        self,
        latent_shape: tuple[int, ...],
        text_length: int,
        dtype: torch.dtype,
        text_dtypes: Sequence[torch.dtype],  # upstream casts the glyph text to the DiT's
        generator: torch.Generator,
    ) -> BranchKwargs:
        device = generator.device
        _, height, width = latent_shape
        tokens = height * width // self.dit.patch_size**2
        text_BLD = torch.randn(
            1, text_length, self.dit.text_embed_dim,
            generator=generator, device=device, dtype=dtype,
        )
        codes = self.dit.prior_token_embedding.num_embeddings
        drop = torch.rand((), generator=generator, device=device) < 0.5
        size_12 = torch.tensor([[height, width]], device=device, dtype=dtype) * 8  # pixels
        return {
            "encoder_hidden_states": text_BLD,
            "prior_token_id": torch.randint(
                codes, (1, tokens), generator=generator, device=device
            ),
            "prior_token_drop": drop.expand(1, tokens),
            "target_size": size_12,
            "crop_coords": torch.zeros_like(size_12),
            "freqs_cis": self.dit.rotary_emb(
                torch.empty(1, 1, height, width, device=device, dtype=dtype)
            ),
        }

    def _mask_attention(self, attention: torch.nn.Module) -> None:
        forward = attention.forward

        # torch 2.14 cannot compile attention for varying shapes on a CPU
        @torch.compiler.disable
        def masked_forward(query, key, value, *args, **kwargs):
            if self._key_mask_BS is not None:
                kwargs["attn_mask"] = self._key_mask_BS
            return forward(query, key, value, *args, **kwargs)

        attention.forward = masked_forward

    @contextmanager
    def attend(self, packed: PackedRows):
        if packed.mask_BL is None:
            yield
            return
        # one mask tensor a forward: under Ulysses the gathered mask is memoized on it
        self._key_mask_BS = self._with_image_keys(packed)
        try:
            yield
        finally:
            self._key_mask_BS = None

    def _with_image_keys(self, packed: PackedRows) -> torch.Tensor:
        """The text mask with the image tokens that this rank holds, ``[rows, text + image]``."""
        cos_SD, _ = packed.kwargs["freqs_cis"]
        image_BS = packed.mask_BL.new_ones(packed.mask_BL.shape[0], cos_SD.shape[0])
        return torch.cat([packed.mask_BL, image_BS], dim=1)
