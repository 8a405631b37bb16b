"""torch.compile, by SGLang's own flags, while the number of rows of a step changes."""

import numpy as np

from harness.engine import FP32, Engine


def test_compiled_blocks(glm, glm_split):
    requests = [
        dict(guidance_curve="front:3:1@0.5", num_inference_steps=4),  # two rows a step, then one
        dict(num_outputs_per_prompt=2, num_inference_steps=2),
    ]
    compiled = {"enable_torch_compile": True, "regional_compile": True, "warmup_mode": "off"}
    quick = {"SGLANG_TORCH_COMPILE_MODE": "default"}
    with Engine(glm, guidance_buckets=8, env=quick, **compiled, **FP32) as engine:
        got = [engine.generate(seed=3, **request) for request in requests]
        log = engine.log.read_text()
    assert "Enabled regional torch.compile for 2 submodules in GlmImageTransformer2DModel" in log
    for request, one in zip(requests, got):
        other = glm_split.generate(seed=3, **request)
        assert one.guidance == other.guidance
        difference = np.abs(one.latents - other.latents).max()
        assert difference <= 1e-3 * np.abs(other.latents).max()
