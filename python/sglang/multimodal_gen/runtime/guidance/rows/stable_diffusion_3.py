# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 rows: the text always fills its length, so nothing is ever masked."""

from sglang.multimodal_gen.runtime.guidance.rows.base import RowAdapter


class StableDiffusion3RowAdapter(RowAdapter):
    dit_class = "SD3Transformer2DModel"
    stacked = frozenset({"pooled_projections"})
