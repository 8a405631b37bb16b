"""Where bf16 loses precision: latents against diffusers in fp32, one part after another in fp32.

    python benchmark/bench_precision.py MODEL --size 64
    python benchmark/bench_precision.py MODEL --size 512  # on a GPU

MODEL is a GLM-Image checkpoint. Every engine runs plain CFG (a constant curve) in bf16; diffusers
repeats each run in fp32 with the engine's own prior tokens and the same noise. The error is
||latents - reference|| / ||reference||, at the first, the middle and the last step.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from common import markdown_table, print_section

SEED = 7
PROMPT = 'a shop sign that says "open until late"'
SCALE = 4.0


def main() -> None:
    args = parse_args()
    variants = {
        "upstream": dict(upstream=True),
        "guidance buckets (combine and latents in fp32)": dict(guidance_buckets=8),
        "the same, rows split": dict(guidance_buckets=8, guidance_rows="split"),
        "and timestep embedding in fp32": dict(guidance_buckets=8, parts="timestep"),
        "and attention in fp32": dict(guidance_buckets=8, parts="attention"),
        "and both in fp32": dict(guidance_buckets=8, parts="timestep,attention"),
    }
    latents, priors = {}, {}
    for name, options in variants.items():
        latents[name], priors[name] = run_engine(args, **options)
    references = {}
    reference = Reference(args, dtype="float32")
    for name, prior in priors.items():
        key = prior.tobytes()
        if key not in references:
            references[key] = reference.run(prior)
    del reference
    first = next(iter(priors.values()))
    names = list(variants)
    rows = [row(name, latents[name], references[priors[name].tobytes()]) for name in names]
    rows.append(row("diffusers in bf16", Reference(args, dtype="bfloat16").run(first),
                    references[first.tobytes()]))
    header = ["bf16 run", "first step", "middle step", "last step"]
    print_section(f"{args.size}x{args.size}, {args.steps} steps, scale {SCALE}",
                  markdown_table(header, rows))


def run_engine(args, *, parts: str = "", **options) -> tuple[np.ndarray, np.ndarray]:
    """Latents after each step ``[1, steps, C, H, W]`` and the prior tokens."""
    from harness.engine import Engine
    from harness.processes import probe_environment
    from harness.recording import Recording

    with tempfile.TemporaryDirectory() as directory:
        environment = probe_environment(PROBE_RECORD=directory, PROBE_FP32=parts)
        with Engine(
            args.model,
            env=environment,
            dit_precision="bf16",
            text_encoder_precisions=("fp32",),
            **options,
            **args.engine,
        ) as engine:
            result = engine.generate(
                prompt=PROMPT,
                width=args.size,
                height=args.size,
                num_inference_steps=args.steps,
                guidance_scale=SCALE,
                seed=SEED,
            )
        (prior,) = Recording(Path(directory)).take("prior")
    return result.latents, prior


class Reference:
    """diffusers' GlmImagePipeline on the same device."""

    def __init__(self, args, dtype: str):
        import torch
        from diffusers import GlmImagePipeline

        self.args = args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = getattr(torch, dtype)
        pipeline = GlmImagePipeline.from_pretrained(args.model, torch_dtype=self.dtype)
        pipeline.set_progress_bar_config(disable=True)
        self.pipeline = pipeline.to(self.device)

    def run(self, prior: np.ndarray) -> np.ndarray:
        import torch

        args, pipeline = self.args, self.pipeline
        generator = torch.Generator(self.device).manual_seed(SEED)
        channels, scale = pipeline.transformer.config.in_channels, pipeline.vae_scale_factor
        side = args.size // scale
        noise_BCHW = torch.randn(
            1, channels, side, side, generator=generator, device=self.device
        )
        kept = []

        def keep(_pipeline, _step, _timestep, tensors):
            kept.append(tensors["latents"].float().cpu().numpy())
            return {}

        pipeline(
            prompt=PROMPT,
            height=args.size,
            width=args.size,
            num_inference_steps=args.steps,
            guidance_scale=SCALE,
            latents=noise_BCHW,
            prior_token_ids=torch.from_numpy(prior).long().to(self.device),
            callback_on_step_end=keep,
            output_type="latent",
        )
        return np.stack(kept, axis=1)


def row(name: str, got: np.ndarray, wanted: np.ndarray) -> list[str]:
    def error(step: int) -> str:
        difference = np.linalg.norm(got[:, step] - wanted[:, step])
        return f"{difference / np.linalg.norm(wanted[:, step]):.2e}"

    return [name, *map(error, (0, got.shape[1] // 2, -1))]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON, for DiffGenerator")
    return parser.parse_args()


if __name__ == "__main__":
    main()
