"""torch.compile, by SGLang's own flags, while the number of rows of a step changes."""

import numpy as np

from harness.engine import COMPILED, FP32, QUICK_COMPILE, Engine
from harness.worker import Worker


def test_compiled_blocks(glm, glm_split):
    requests = [
        dict(guidance_curve="front:3:1@0.5", num_inference_steps=4),  # two rows a step, then one
        dict(num_outputs_per_prompt=2, num_inference_steps=2),
    ]
    options = {"guidance_buckets": 8, "warmup_mode": "off", **COMPILED, **FP32}
    with Engine(glm, env=QUICK_COMPILE, **options) as engine:
        got = [engine.generate(seed=3, **request) for request in requests]
        log = engine.log.read_text()
    assert "Enabled regional torch.compile for 2 submodules in GlmImageTransformer2DModel" in log
    for request, one in zip(requests, got):
        other = glm_split.generate(seed=3, **request)
        assert one.guidance == other.guidance
        difference = np.abs(one.latents - other.latents).max()
        assert difference <= 1e-3 * np.abs(other.latents).max()


def test_dit_is_not_offloaded_for_good(checkpoints):
    """SGLang offloads it until a `forward` that the loop does not call."""
    worker = Worker(
        checkpoints["sd3-medium"],  # GLM-Image's DiT has no layers that SGLang offloads
        guidance_buckets=8,
        **COMPILED,
        **FP32,
    )
    try:
        assert not worker.stage.transformer.layerwise_offload_managers
    finally:
        worker.close()
