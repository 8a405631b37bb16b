# SPDX-License-Identifier: Apache-2.0
"""Trains the VAE on pictures drawn as it goes; writes it with its latents' mean and deviation."""

import torch
import torch.nn.functional as F
from draw import draw
from parts import make_vae
from scenes import sample_scenes
from training import DEVICE, Clock, Trainer, autocast, parse_args

KL_WEIGHT = 1e-3
EDGE_WEIGHT = 0.5  # flat pictures are all in their edges


def main() -> None:
    args = parse_args(__doc__, ["output"], seconds=90.0, batch=64, seed=1)
    generator = torch.Generator().manual_seed(args.seed)
    vae = make_vae().to(DEVICE, memory_format=torch.channels_last)
    trainer = Trainer([vae], peak=2e-3)
    clock = Clock("vae", args.seconds, trainer)
    for rate in clock:
        picture = draw(sample_scenes(args.batch, generator).to(DEVICE)) * 2 - 1
        picture = picture.contiguous(memory_format=torch.channels_last)
        with autocast():
            moments = vae.encode(picture).latent_dist
            decoded = vae.decode(moments.sample()).sample.float()
        error = (decoded - picture).abs().mean() + (decoded - picture).square().mean()
        edges = sum((a - b).abs().mean() for a, b in zip(_steps(decoded), _steps(picture)))
        kl = (moments.mean.square() + moments.var - 1 - moments.logvar).float().mean() / 2
        trainer.step(error + EDGE_WEIGHT * edges + KL_WEIGHT * kl, rate)
        clock.note(error, edges, kl)
    trainer.use_average()
    mean, deviation = latent_statistics(vae, generator)
    finished = make_vae(latents_mean=mean, latents_std=deviation)
    finished.load_state_dict(vae.state_dict())
    unfinished = args.output.with_suffix(".new")
    finished.save_pretrained(unfinished)
    unfinished.rename(args.output)  # the DiT waits for it


def _steps(picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return picture.diff(dim=2), picture.diff(dim=3)


@torch.no_grad()
def latent_statistics(vae, generator) -> tuple[list[float], list[float]]:
    latents = []
    for _ in range(8):
        picture = draw(sample_scenes(64, generator).to(DEVICE)) * 2 - 1
        latents.append(vae.encode(picture).latent_dist.mode().float())
        error = F.l1_loss(vae.decode(latents[-1]).sample.clamp(-1, 1), picture) / 2
    print(f"vae: mean error {error * 255:.2f} of 255", flush=True)
    latent = torch.cat(latents).transpose(0, 1).flatten(1)
    return latent.mean(1).tolist(), latent.std(1).tolist()


if __name__ == "__main__":
    main()
