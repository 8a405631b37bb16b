# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 rows: the text always fills its length, so nothing is ever masked."""

import torch

from sglang.multimodal_gen.runtime.guidance.rows.base import BranchKwargs, RowAdapter


class StableDiffusion3RowAdapter(RowAdapter):
    dit_class = "SD3Transformer2DModel"
    stacked = frozenset({"pooled_projections"})
    in_graphs = True
    unpadded_text_length = 77 + 256  # CLIP's tokens and T5's
    pads_text = False

    def example(
        self,
        latent_shape: tuple[int, ...],
        text_length: int,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> BranchKwargs:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)

        config = self.dit.config
        return {
            "encoder_hidden_states": random(1, text_length, config.joint_attention_dim),
            "pooled_projections": random(1, config.pooled_projection_dim),
        }
