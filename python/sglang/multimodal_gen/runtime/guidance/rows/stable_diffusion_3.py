# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 rows: its attention takes no mask, so texts of one length share a forward."""

from collections.abc import Sequence
from functools import reduce

import torch

from sglang.multimodal_gen.runtime.guidance.rows.base import BranchKwargs, RowAdapter


class StableDiffusion3RowAdapter(RowAdapter):
    dit_class = "SD3Transformer2DModel"
    stacked = frozenset({"pooled_projections"})
    can_mask = False
    in_graphs = True
    unpadded_text_length = 77 + 256  # CLIP's tokens and T5's
    pads_text = False

    def example(
        self,
        latent_shape: tuple[int, ...],
        text_length: int,
        dtype: torch.dtype,
        text_dtypes: Sequence[torch.dtype],
        generator: torch.Generator,
    ) -> BranchKwargs:
        def random(*shape: int, of: Sequence[torch.dtype]) -> torch.Tensor:
            joined = reduce(torch.promote_types, of)  # by torch.cat
            return torch.randn(shape, generator=generator, device=generator.device).to(joined)

        config = self.dit.config
        clip_dtypes = text_dtypes[:2]
        return {
            "encoder_hidden_states": random(
                1, text_length, config.joint_attention_dim, of=text_dtypes
            ),
            "pooled_projections": random(1, config.pooled_projection_dim, of=clip_dtypes),
        }
