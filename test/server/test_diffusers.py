"""Per-step latents against diffusers' GlmImagePipeline: same prompt, seed and prior tokens."""

import numpy as np
import pytest
import torch

STEPS = 8


@pytest.fixture(scope="module")
def pipeline(glm):
    from diffusers import GlmImagePipeline

    return GlmImagePipeline.from_pretrained(glm, torch_dtype=torch.float32)


def diffusers_latents(pipeline, prompt: str, prior: np.ndarray, scale: float) -> np.ndarray:
    latents = []

    def keep(_pipeline, _step, _timestep, tensors):
        latents.append(tensors["latents"].numpy().copy())
        return {}

    pipeline.set_progress_bar_config(disable=True)
    pipeline(
        prompt=prompt,
        height=64,
        width=64,
        num_inference_steps=STEPS,
        guidance_scale=scale,
        generator=torch.Generator().manual_seed(7),
        prior_token_ids=torch.from_numpy(prior).long(),
        callback_on_step_end=keep,
        output_type="latent",
    )
    return np.stack(latents, axis=1)


@pytest.mark.parametrize("prompt", ["a cat", 'a sign that says "open" and "late"'])
@pytest.mark.parametrize("scale", [1.5, 4.0])
def test_latents_equal_diffusers(glm_recorded, recording, pipeline, relative_error, prompt, scale):
    recording.take("noise")
    got = glm_recorded.generate(prompt=prompt, guidance_scale=scale, num_inference_steps=STEPS)
    (prior,) = recording.take("prior")
    wanted = diffusers_latents(pipeline, prompt, prior, scale)
    assert relative_error(got.latents, wanted) <= 1e-5
