# SPDX-License-Identifier: Apache-2.0
"""Asks a checkpoint for held-out captions at constant scales and judges what it draws."""

import argparse
import json
from pathlib import Path

import torch
from draw import draw
from judge import judge
from parts import GRID
from PIL import Image
from sample import Sampler, make_noise
from scenes import captions, sample_scenes, words
from train_codebook import encode
from training import DEVICE

NAMES = ("scene", "color", "shape", "place", "size", "background")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--output", type=Path, help="folder for the table and a contact sheet")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--scales", type=float, nargs="+", default=[1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7]
    )
    parser.add_argument("--top-p", type=float, help="of the AR model, instead of its own")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument(
        "--true-priors", action="store_true", help="codes of the true picture, not the AR model's"
    )
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    scenes = sample_scenes(args.count, torch.Generator().manual_seed(args.seed), held_out=True)
    sampler = Sampler(args.checkpoint, DEVICE)
    if args.top_p is not None:
        sampler.language.generation_config.top_p = args.top_p
    if args.true_priors:
        true = draw(scenes.to(DEVICE))
        conditions = sampler.with_codes(encode(sampler.language.model, true, GRID), words(scenes))
    else:
        conditions = sampler.conditions(captions(scenes), words(scenes), args.seed)
    noise = make_noise(args.count, args.seed)
    rows, best = [], None
    for scale in args.scales:
        latent = sampler.denoise(conditions, [scale] * args.steps, noise)
        picture = torch.cat([sampler.decode(part).clamp(0, 1) for part in latent.split(64)])
        row = {"scale": scale, **score(picture, scenes)}
        rows.append(row)
        print("  ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
        if best is None or row["scene"] + row["word"] > best[0]:
            best = (row["scene"] + row["word"], scale, picture)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "scales.json").write_text(json.dumps(rows, indent=1))
        sheet = torch.cat([draw(scenes[:40]), best[2][:40].cpu()])
        save_sheet(sheet, args.output / "sheet.png")
        (args.output / "captions.txt").write_text("\n".join(captions(scenes[:40])))


def score(picture_NCHW: torch.Tensor, scenes) -> dict[str, float]:
    verdict = judge(picture_NCHW, scenes)
    values = {name: getattr(verdict, name).float().mean().item() for name in NAMES}
    values["word"] = verdict.word[verdict.worded].float().mean().item()
    values["letters"] = verdict.letters[verdict.worded].mean().item()
    return values


def save_sheet(picture_NCHW: torch.Tensor, path: Path, columns: int = 10) -> None:
    n, _, height, width = picture_NCHW.shape
    grid = picture_NCHW.view(n // columns, columns, 3, height, width)
    sheet = grid.permute(0, 3, 1, 4, 2).reshape(n // columns * height, columns * width, 3)
    Image.fromarray((sheet * 255).round().byte().numpy()).save(path)


if __name__ == "__main__":
    main()
