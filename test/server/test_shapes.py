"""The shapes checkpoint: loads in SGLang as it is and in diffusers; evaluated as it is served."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.engine import FP32, Engine

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"
CHECKPOINT = SHAPES / "glm-image-shapes"
PROMPT = 'a small red circle left of a large blue star, striped mint background, the word "OK"'
REQUEST = {
    "prompt": PROMPT + " at the bottom",
    "width": 192,
    "height": 192,
    "num_inference_steps": 6,
    "seed": 11,
}
# latents of size 1: fp32 rounding in another order, over six steps
LATENT_BOUND = 1e-3
PIXEL_BOUND = 6  # of 255: SGLang hands latents to the VAE in bf16 and cuts pixels off, not rounds


def draw_in_batches(path: Path, scales: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """What benchmark/eval_guidance.py would draw for `REQUEST`: latents and pixels."""
    code = f"""
import sys; sys.path.insert(0, {str(SHAPES)!r})
import numpy as np, torch
from pathlib import Path
from sample import Sampler, make_noise
sampler = Sampler(Path({str(CHECKPOINT)!r}), torch.device("cpu"))
request = {REQUEST!r}
conditions = sampler.conditions([request["prompt"]], ["OK"], request["seed"])
latent = sampler.denoise(conditions, {scales!r}, make_noise(1, request["seed"]))
picture = sampler.decode(latent).clamp(0, 1)[0].permute(1, 2, 0)
np.savez({str(path)!r}, latent=latent.numpy(), picture=picture.numpy() * 255)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with np.load(path) as arrays:
        return arrays["latent"], arrays["picture"]


def test_stock_sglang_draws_what_the_evaluation_draws(tmp_path):
    with Engine(CHECKPOINT, upstream=True, text_encoder_precisions=("fp32",), **FP32) as engine:
        served = engine.generate(**REQUEST, guidance_scale=2.5)
    latent, picture = draw_in_batches(tmp_path / "drawn.npz", [2.5] * 6)
    assert np.abs(served.latents[:, -1] - latent).max() < LATENT_BOUND
    assert np.abs(served.images[0].astype(float) - picture).max() < PIXEL_BOUND


def test_curves_too(tmp_path):
    curve = [3, 3, 1, 2, 0, 2]
    with Engine(
        CHECKPOINT, guidance_buckets=8, text_encoder_precisions=("fp32",), **FP32
    ) as engine:
        served = engine.generate(**REQUEST, guidance_curve=curve)
    latent, picture = draw_in_batches(tmp_path / "drawn.npz", [float(scale) for scale in curve])
    assert np.abs(served.latents[:, -1] - latent).max() < LATENT_BOUND
    assert np.abs(served.images[0].astype(float) - picture).max() < PIXEL_BOUND


def test_diffusers_draws_it():
    import torch
    from diffusers import GlmImagePipeline

    pipeline = GlmImagePipeline.from_pretrained(CHECKPOINT)
    picture = pipeline(
        REQUEST["prompt"],
        width=192,
        height=192,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(11),
    ).images[0]
    assert picture.size == (192, 192)


def test_it_stays_small():
    assert CHECKPOINT.is_dir()
    sizes = [path.stat().st_size for path in CHECKPOINT.rglob("*") if path.is_file()]
    assert 1e6 < max(sizes) <= 12e6
    assert sum(sizes) <= 16e6


@pytest.mark.parametrize("seed", [1, 2])
def test_the_judge_knows_drawn_pictures(seed, monkeypatch):
    """Pictures as they should be are right; the same pictures for other captions are not."""
    monkeypatch.syspath_prepend(str(SHAPES))
    import torch
    from draw import draw
    from judge import judge
    from scenes import sample_scenes

    scenes = sample_scenes(60, torch.Generator().manual_seed(seed), held_out=True)
    pictures = draw(scenes)
    verdict = judge(pictures, scenes)
    assert verdict.scene.float().mean() > 0.95 and verdict.size.float().mean() > 0.95
    assert verdict.word[verdict.worded].float().mean() > 0.95
    other = judge(pictures.roll(1, 0), scenes)
    assert other.scene.float().mean() < 0.1
    assert other.word[other.worded].float().mean() < 0.1
