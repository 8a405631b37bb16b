"""Scale 1 is the cond branch and scale 0 the uncond branch, bit for bit, at every step."""

import numpy as np
import pytest

STEPS = 4


def test_scale_1_is_upstream_without_cfg(glm_split, glm_packed, glm_upstream):
    wanted = glm_upstream.generate(guidance_scale=1.0)
    for engine in (glm_split, glm_packed):
        got = engine.generate(guidance_scale=4.0, guidance_curve="constant:1")
        assert np.array_equal(got.latents, wanted.latents)


@pytest.mark.parametrize(("scale", "branch"), [(1, "cond"), (0, "uncond")])
def test_one_branch(glm_recorded, recording, scale, branch):
    alone = glm_recorded.generate(guidance_curve=f"constant:{scale}", num_inference_steps=STEPS)
    predictions = recording.take("noise")
    assert len(predictions) == STEPS
    assert alone.guidance["forwards"][branch] == STEPS
    assert sum(alone.guidance["forwards"].values()) == STEPS
    for step in range(STEPS):
        # alike up to `step`, where both branches run: cond first, then uncond
        curve = [scale] * step + [2] + [scale] * (STEPS - step - 1)
        both = glm_recorded.generate(guidance_curve=curve, num_inference_steps=STEPS)
        recorded = recording.take("noise")
        assert np.array_equal(both.latents[:, :step], alone.latents[:, :step])
        cond, uncond = recorded[step], recorded[step + 1]
        assert np.array_equal({"cond": cond, "uncond": uncond}[branch], predictions[step])
        assert not np.array_equal(cond, uncond)


def test_needless_rows_do_not_run(glm_recorded, recording):
    """What the answer counts is what ran."""
    result = glm_recorded.generate(guidance_curve=[2, 1, 1, 0, 3, 1])
    assert len(recording.take("noise")) == 2 + 1 + 1 + 1 + 2 + 1
    assert result.guidance["forwards"] == {"cond": 5, "uncond": 3}
