# SPDX-License-Identifier: Apache-2.0
"""Trains the DiT and its glyph encoder: flow matching on the VAE's latents.

In one picture out of eight both branches' worth of conditioning is dropped, prior tokens and word
alike, which is what GLM-Image's uncond branch is at inference.
"""

import torch
import torch.nn.functional as F
from draw import draw
from masked_dit import MaskedDit, embed_glyphs, glyph_ids
from parts import GRID, make_ar_model, make_dit, make_glyph_encoder, make_tokenizer
from scenes import sample_scenes, words
from train_codebook import encode_small, in_8_bits, load_codebook, shrink
from training import DEVICE, Clock, Trainer, autocast, parse_args, save, wait_for

DROP = 0.125


def main() -> None:
    args = parse_args(
        __doc__,
        ["vae", "codebook", "output"],
        **dict(seconds=620.0, scenes=200_000, batch=512, peak=1.5e-3, seed=4),
    )
    data = make_data(args)
    small = data.pop("small")
    dit, glyph_encoder = make_dit(), make_glyph_encoder()
    start_at_zero(dit)
    dit.to(DEVICE), glyph_encoder.to(DEVICE)
    forward = compiled_dit(dit, glyph_encoder, data, args.batch)
    model = make_ar_model(make_tokenizer()).model
    load_codebook(model, wait_for(args.codebook))
    with autocast():
        data["codes"] = encode_small(model.to(DEVICE), small, GRID).short()
    del small
    trainer = Trainer([dit, glyph_encoder], peak=args.peak)
    clock = Clock("dit", args.seconds, trainer, state=args.output.with_suffix(".state"))
    for rate in clock:
        loss = flow_loss(forward, glyph_encoder, data, args.batch)
        trainer.step(loss, rate)
        clock.note(loss)
    trainer.use_average()
    save({"dit": dit.state_dict(), "glyph": glyph_encoder.state_dict()}, args.output)
    clock.forget()


def flow_loss(forward, glyph_encoder, data, batch: int) -> torch.Tensor:
    """The mean squared error of the velocity, noise - latent, over a random batch."""
    pick = torch.randint(len(data["latent"]), (batch,), device=DEVICE)
    latent_NCHW = data["latent"][pick].float()
    drop = torch.rand(batch, device=DEVICE) < DROP
    ids, num_glyphs = data["ids"][pick].clone(), data["num_glyphs"][pick]
    ids[:, 0] = torch.where(drop, 1, ids[:, 0])  # the empty word: an end token alone
    num_glyphs = torch.where(drop, 1, num_glyphs)
    sigma = sample_sigma(batch)
    noise = torch.randn_like(latent_NCHW)
    noisy = torch.lerp(latent_NCHW, noise, sigma[:, None, None, None])
    with autocast():
        glyph = embed_glyphs(glyph_encoder, ids, num_glyphs)
        codes = data["codes"][pick].long()
        velocity = forward(noisy, glyph, num_glyphs, codes, drop, sigma * 1000 - 1)
    return F.mse_loss(velocity.float(), noise - latent_NCHW)


def compiled_dit(dit, glyph_encoder, data, batch: int) -> MaskedDit:
    """With compiled blocks where that works: about twice as fast."""
    if DEVICE.type == "cuda":
        try:
            forward = MaskedDit(dit, torch.compile)
            flow_loss(forward, glyph_encoder, data, batch).backward()
            return forward
        except Exception as error:  # no C compiler, no Triton
            print(f"dit: not compiled: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return MaskedDit(dit)


def sample_sigma(count: int) -> torch.Tensor:
    """Three quarters logit-normal, the rest even."""
    even = torch.rand(count, device=DEVICE)
    middle = torch.sigmoid(torch.randn(count, device=DEVICE))
    return torch.where(torch.rand(count, device=DEVICE) < 0.25, even, middle)


def start_at_zero(dit) -> None:
    """Every block starts as the identity and the model at a velocity of zero."""
    layers = [block.norm1.linear for block in dit.transformer_blocks]
    for layer in [*layers, dit.norm_out.linear, dit.proj_out]:
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)


@torch.no_grad()
def make_data(args) -> dict[str, torch.Tensor]:
    """Latents, pictures as the encoder of the prior tokens sees them, and words; on the device."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(wait_for(args.vae))
    vae.to(DEVICE, memory_format=torch.channels_last)
    mean, deviation = (
        torch.tensor(values, device=DEVICE)[None, :, None, None]
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    scenes = sample_scenes(args.scenes, torch.Generator().manual_seed(args.seed))
    latents, small = [], []
    for start in range(0, args.scenes, 256):
        picture = draw(scenes[start : start + 256].to(DEVICE))
        small.append(in_8_bits(shrink(picture, GRID)))
        with autocast():
            moments = vae.encode((picture * 2 - 1).contiguous(memory_format=torch.channels_last))
        latents.append(((moments.latent_dist.mode().float() - mean) / deviation).half())
    ids, num_glyphs = glyph_ids(words(scenes))
    print(f"dit: {args.scenes} scenes ready", flush=True)
    return {
        "latent": torch.cat(latents).contiguous(),
        "codes": torch.zeros(args.scenes, GRID**2, dtype=torch.short, device=DEVICE),
        "small": torch.cat(small),
        "ids": ids.to(DEVICE),
        "num_glyphs": num_glyphs.to(DEVICE),
    }


if __name__ == "__main__":
    main()
