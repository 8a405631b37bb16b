# SPDX-License-Identifier: Apache-2.0
"""Draws pictures with the checkpoint, many at a time, for evaluation: no server.

Prior tokens come from the checkpoint's AR model through its processor. Latents go through the
checkpoint's DiT with one scale for each step, by the rules of guidance buckets: at exactly 1 only
the cond branch runs, at exactly 0 only the uncond branch.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, GlmImageTransformer2DModel
from masked_dit import MaskedDit, embed_glyphs, glyph_ids
from parts import GRID, PREVIEW_GRID
from scenes import SIZE
from transformers import AutoProcessor, GlmImageForConditionalGeneration, T5EncoderModel


@dataclass
class Conditions:
    """What the DiT gets to know of N captions.

    Attributes:
        codes: [N, GRID * GRID] prior tokens.
        glyph_NLD, num_glyphs: the words, padded; how many of their tokens count.
        empty_glyph_LD: the empty word's, which the uncond branch sees.
    """

    codes: torch.Tensor
    glyph_NLD: torch.Tensor
    num_glyphs: torch.Tensor
    empty_glyph_LD: torch.Tensor

    def __getitem__(self, index) -> "Conditions":
        return Conditions(
            self.codes[index], self.glyph_NLD[index], self.num_glyphs[index], self.empty_glyph_LD
        )


class Sampler:
    def __init__(self, checkpoint: Path, device: torch.device, dtype=torch.float32):
        def load(cls, name):
            return cls.from_pretrained(checkpoint / name).to(device, dtype).eval()

        self.device, self.dtype = device, dtype
        self.processor = AutoProcessor.from_pretrained(checkpoint / "processor")
        self.language = load(GlmImageForConditionalGeneration, "vision_language_encoder")
        self.glyph_encoder = load(T5EncoderModel, "text_encoder")
        self.dit = MaskedDit(load(GlmImageTransformer2DModel, "transformer"))
        self.vae = load(AutoencoderKL, "vae")

    @torch.no_grad()
    def conditions(self, captions: list[str], words: list[str], seed: int, batch: int = 256):
        """Prior tokens written by the AR model, and the words' embeddings."""
        torch.manual_seed(seed)
        codes = [self._write(captions[i : i + batch]) for i in range(0, len(captions), batch)]
        return self.with_codes(torch.cat(codes), words)

    @torch.no_grad()
    def with_codes(self, codes: torch.Tensor, words: list[str]) -> Conditions:
        ids, num_glyphs = (part.to(self.device) for part in glyph_ids([*words, ""]))
        glyph = embed_glyphs(self.glyph_encoder, ids, num_glyphs).to(self.dtype)
        return Conditions(codes, glyph[:-1], num_glyphs[:-1], glyph[-1])

    def _write(self, captions: list[str]) -> torch.Tensor:
        messages = [
            [{"role": "user", "content": [{"type": "text", "text": caption}]}]
            for caption in captions
        ]
        inputs = self.processor.apply_chat_template(
            messages,
            tokenize=True,
            padding=True,
            target_h=SIZE,
            target_w=SIZE,
            return_dict=True,
            return_tensors="pt",
        ).to(self.device)
        tokens = PREVIEW_GRID**2 + GRID**2
        written = self.language.generate(**inputs, max_new_tokens=tokens + 1, do_sample=True)
        start = inputs["input_ids"].shape[1] + PREVIEW_GRID**2
        return written[:, start : start + GRID**2]

    @torch.no_grad()
    def denoise(self, conditions: Conditions, scales: list[float], noise_NCHW) -> torch.Tensor:
        """Latents after one step for each of `scales`, from noise, which is as large as fits."""
        steps = len(scales)
        latent = noise_NCHW.to(self.device, torch.float32)
        times = [int(1000 - i * 999 / steps) for i in range(steps)]
        sigmas = [time / 1000 for time in times] + [0.0]
        for i, scale in enumerate(scales):
            branches = {1.0: ["cond"], 0.0: ["uncond"]}.get(scale, ["uncond", "cond"])
            velocity = self._velocity(conditions, branches, latent, times[i] - 1)
            if len(velocity) == 2:
                uncond, cond = velocity
                combined = uncond + scale * (cond - uncond)
            else:
                (combined,) = velocity
            latent = latent + (sigmas[i + 1] - sigmas[i]) * combined
        return latent

    def _velocity(self, conditions: Conditions, branches: list[str], latent, time: float):
        count, parts = len(latent), len(branches)
        is_uncond = torch.tensor([b == "uncond" for b in branches], device=self.device)
        drop = is_uncond.repeat_interleave(count)
        glyph = torch.where(
            drop[:, None, None],
            conditions.empty_glyph_LD,
            conditions.glyph_NLD.repeat(parts, 1, 1),
        )
        velocity = self.dit(
            latent.repeat(parts, 1, 1, 1).to(self.dtype),
            glyph,
            torch.where(drop, 1, conditions.num_glyphs.repeat(parts)),
            conditions.codes.repeat(parts, 1),
            drop,
            torch.full((count * parts,), time, device=self.device),
        )
        return velocity.float().chunk(parts)

    @torch.no_grad()
    def decode(self, latent_NCHW: torch.Tensor) -> torch.Tensor:
        """Pictures; values may leave 0..1 where guidance was strong."""
        mean, deviation = (
            torch.tensor(values, device=self.device)[None, :, None, None]
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        latent = (latent_NCHW * deviation + mean).to(self.dtype)
        return self.vae.decode(latent).sample.float() / 2 + 0.5


def make_noise(count: int, seed: int) -> torch.Tensor:
    """Noise of `count` pictures, each from a seed of its own: `seed`, `seed + 1`, ..."""
    shape = (1, 16, SIZE // 8, SIZE // 8)
    draws = [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed + i)) for i in range(count)
    ]
    return torch.cat(draws)
