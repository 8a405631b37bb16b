# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's DiT over rows whose words differ in length: padded glyph tokens are masked out.

The modules are GlmImageTransformer2DModel's own; only their order is written anew, because its
forward has no mask that leaves the other rows as they are.
"""

import torch
import torch.nn.functional as F
from parts import GRID, MAX_GLYPHS
from scenes import SIZE


class MaskedAttention:
    """An attention processor whose mask says which keys count: [N, 1, 1, text + image]."""

    def __call__(
        self,
        attn,
        hidden_states,
        encoder_hidden_states,
        attention_mask=None,
        image_rotary_emb=None,
        kv_cache=None,
    ):
        num_text = encoder_hidden_states.shape[1]
        joint = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        heads = (attn.heads, -1)
        q, k, v = (layer(joint).unflatten(2, heads) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q).to(v.dtype), attn.norm_k(k).to(v.dtype)
        q, k = (_turn(x, num_text, *image_rotary_emb).transpose(1, 2) for x in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), attn_mask=attention_mask)
        mixed = attn.to_out[0](mixed.transpose(1, 2).flatten(2))
        return mixed[:, num_text:], mixed[:, :num_text]


def _turn(x, num_text: int, cos, sin):
    """Rotary positions of the image tokens; text has none."""
    text, image = x[:, :num_text], x[:, num_text:]
    real, imaginary = image.chunk(2, dim=-1)
    turned = torch.cat([-imaginary, real], dim=-1)
    image = image * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)
    return torch.cat([text, image], dim=1)


class MaskedDit:
    def __init__(self, dit, compiled=lambda function: function):
        self.dit = dit
        device = dit.proj_out.weight.device
        for block in dit.transformer_blocks:
            block.attn1.set_processor(MaskedAttention())
        self.blocks = [compiled(block) for block in dit.transformer_blocks]
        latent = torch.empty(1, 1, SIZE // 8, SIZE // 8)
        self.rotary = tuple(part.to(device) for part in dit.rope(latent))

    def __call__(self, noisy_NCHW, glyph_NLD, num_glyphs, codes, drop, timestep) -> torch.Tensor:
        """One forward.

        Args:
            noisy_NCHW: latents.
            glyph_NLD: [N, MAX_GLYPHS, width]; only the first `num_glyphs` ([N]) count.
            codes: [N, GRID * GRID] prior tokens; drop: [N] bool, rows that do without.
            timestep: [N], sigma * 1000 - 1.
        """
        dit, count = self.dit, len(noisy_NCHW)
        hidden = dit.image_projector(noisy_NCHW)
        text = dit.glyph_projector(glyph_NLD)
        prior = dit.prior_token_embedding(upsample(codes))
        prior = torch.where(drop[:, None, None], torch.zeros_like(prior), prior)
        hidden = hidden + dit.prior_projector(prior)
        size = noisy_NCHW.new_full((count, 2), float(SIZE), dtype=torch.float32)
        temb = dit.time_condition_embed(timestep, size, torch.zeros_like(size), hidden.dtype)
        is_glyph = torch.arange(MAX_GLYPHS, device=hidden.device) < num_glyphs[:, None]
        is_image = is_glyph.new_ones(count, hidden.shape[1])
        mask = torch.cat([is_glyph, is_image], dim=1)[:, None, None]
        for block in self.blocks:
            hidden, text = block(hidden, text, temb, self.rotary, mask)
        out = dit.proj_out(dit.norm_out(hidden, temb))
        side, patch = SIZE // 16, dit.config.patch_size
        out = out.reshape(count, side, side, -1, patch, patch)
        return out.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def upsample(codes: torch.Tensor) -> torch.Tensor:
    """Prior tokens of 32 pixels to the DiT's of 16: [N, 4 * GRID * GRID]."""
    codes = codes.view(-1, GRID, GRID)
    return codes.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)


def glyph_ids(words: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """ByT5's ids of words, padded to [N, MAX_GLYPHS], and how many of each count."""
    rows = [[byte + 3 for byte in word.encode()] + [1] for word in words]
    ids = torch.tensor([row + [0] * (MAX_GLYPHS - len(row)) for row in rows])
    return ids, torch.tensor([len(row) for row in rows])


def embed_glyphs(encoder, ids: torch.Tensor, num_glyphs: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(MAX_GLYPHS, device=ids.device) < num_glyphs[:, None]
    return encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
