"""A constant curve is plain CFG: upstream's latents at every step, with any number of buckets."""

import numpy as np
import pytest

SCALE = 1.5
QUOTED = 'a shop sign that says "open until late" and "come in"'


@pytest.fixture(scope="module")
def plain(glm_upstream):
    return glm_upstream.generate(guidance_scale=SCALE)


@pytest.mark.parametrize("buckets", [1, 3, 8, 64])
def test_split_rows_equal_upstream_bit_for_bit(glm_split, plain, buckets):
    got = glm_split.generate(
        guidance_scale=SCALE, guidance_curve="constant", guidance_buckets=buckets
    )
    assert np.array_equal(got.latents, plain.latents)
    assert np.array_equal(got.images, plain.images)
    assert got.guidance["forwards"] == {"cond": 6, "uncond": 6}


@pytest.mark.parametrize("buckets", [1, 3, 8, 64])
def test_packed_rows_equal_upstream(glm_packed, plain, buckets, relative_error):
    got = glm_packed.generate(guidance_scale=SCALE, guidance_buckets=buckets)
    assert relative_error(got.latents, plain.latents) <= 1e-5


@pytest.mark.parametrize("prompt", ["no text", 'the letter "A"', QUOTED])
@pytest.mark.parametrize("curve", ["constant:2.5", "front:3:1@0.5", [2, 0, 1, 4, 0.5, 1]])
def test_packed_rows_equal_split_rows(glm_packed, glm_split, prompt, curve, relative_error):
    """Texts of different length are padded, and the padding changes nothing."""
    packed = glm_packed.generate(prompt=prompt, guidance_curve=curve)
    split = glm_split.generate(prompt=prompt, guidance_curve=curve)
    assert relative_error(packed.latents, split.latents) <= 1e-5
    assert packed.guidance == split.guidance


def test_several_images(glm_packed, glm_split, glm_upstream):
    request = dict(num_outputs_per_prompt=2, guidance_scale=SCALE, prompt=QUOTED)
    plain = glm_upstream.generate(**request)
    assert len(plain.images) == 2
    assert np.array_equal(glm_split.generate(**request).images, plain.images)
    packed = glm_packed.generate(**request)
    assert np.abs(packed.images.astype(int) - plain.images).max() <= 1


def test_guidance_changes_the_picture(glm_split, plain, relative_error):
    """The comparisons above would also hold for a scale that is ignored."""
    other = glm_split.generate(guidance_curve="constant:4")
    assert relative_error(other.latents, plain.latents) > 1e-2


def test_a_scale_that_turns_upstreams_cfg_off(glm_split, glm_upstream):
    for scale in (1.0, 0.5, 0.0):
        got = glm_split.generate(guidance_scale=scale)
        assert np.array_equal(
            got.latents, glm_upstream.generate(guidance_scale=scale).latents
        )
        assert got.guidance["forwards"] == {"cond": 6, "uncond": 0}
