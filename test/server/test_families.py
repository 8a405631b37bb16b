"""The same rules on other pipelines: Stable Diffusion 3, Qwen-Image, SANA (an order-2 sampler)."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness.engine import FP32, Engine

FAMILIES = {
    "sd3-medium": dict(text_encoder_precisions=("fp32", "fp32", "fp32")),
    "qwen-image": dict(text_encoder_precisions=("fp32",)),
    "sana": dict(text_encoder_precisions=("fp32",)),
}
NEGATIVE = dict(negative_prompt="blurry, with an odd number of words in it")


class Family:
    def __init__(self, name: str, checkpoint):
        options = FP32 | FAMILIES[name]
        self.name = name
        with ThreadPoolExecutor() as pool:  # a start is mostly imports: side by side they overlap
            engines = [
                pool.submit(Engine, checkpoint, **how, **options)
                for how in (
                    dict(upstream=True),
                    dict(guidance_buckets=8, guidance_rows="split"),
                    dict(guidance_buckets=8, guidance_rows="packed", max_running_samples=0),
                )
            ]
        self.upstream, self.split, self.packed = (engine.result() for engine in engines)

    def close(self):
        for engine in (self.upstream, self.split, self.packed):
            engine.close()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, checkpoints):
    started = Family(request.param, checkpoints[request.param])
    yield started
    started.close()


@pytest.mark.parametrize("buckets", [1, 3, 8, 64])
def test_constant_is_plain_cfg(family, buckets, relative_error):
    request = dict(guidance_scale=3.0, **NEGATIVE)
    wanted = family.upstream.generate(**request)
    split = family.split.generate(guidance_buckets=buckets, **request)
    packed = family.packed.generate(guidance_buckets=buckets, **request)
    assert np.array_equal(split.latents, wanted.latents)
    assert relative_error(packed.latents, wanted.latents) <= 1e-5


@pytest.mark.parametrize("curve", ["front:3:1@0.5", [2, 0, 1, 4, 0.5, 1]])
def test_packed_rows_equal_split_rows(family, curve, relative_error):
    split = family.split.generate(guidance_curve=curve, **NEGATIVE)
    packed = family.packed.generate(guidance_curve=curve, **NEGATIVE)
    assert relative_error(packed.latents, split.latents) <= 1e-5
    assert packed.guidance == split.guidance


def test_scale_1_is_upstream_without_cfg(family):
    wanted = family.upstream.generate(guidance_scale=1.0)
    got = family.packed.generate(guidance_scale=5.0, guidance_curve="constant:1")
    assert np.array_equal(got.latents, wanted.latents)


def test_scale_0_is_the_negative_prompt(family):
    """The uncond branch alone: what upstream makes of the negative prompt as a prompt."""
    text = "a red barn"
    wanted = family.upstream.generate(prompt=text, guidance_scale=1.0)
    got = family.split.generate(prompt="x", negative_prompt=text, guidance_curve="constant:0")
    assert np.array_equal(got.latents, wanted.latents)
    assert got.guidance["forwards"] == {"cond": 0, "uncond": 6}


@pytest.mark.parametrize(
    "post_process",
    [{"guidance_rescale": 0.7}, {"cfg_normalization": 0.9}, {"true_cfg_scale": 3.5}],
    ids=str,
)
def test_post_processes(family, post_process, relative_error):
    request = dict(guidance_scale=3.0) | post_process
    wanted = family.upstream.generate(**request)
    assert np.array_equal(family.split.generate(**request).latents, wanted.latents)
    packed = family.packed.generate(**request)
    assert relative_error(packed.latents, wanted.latents) <= 1e-5


def test_post_processes_follow_the_curve(family, relative_error):
    """A curve's step at scale s is what a request at scale s does there, whatever its own scale."""
    request = dict(guidance_rescale=0.7, num_inference_steps=1)
    if family.name == "sana":
        pytest.skip("one step of a second-order sampler is another schedule")
    wanted = family.upstream.generate(guidance_scale=4.0, **request)
    got = family.split.generate(guidance_scale=0.9, guidance_curve="constant:4", **request)
    assert np.array_equal(got.latents, wanted.latents)


def test_a_request_does_not_change_the_next(family):
    """The sampler's state starts anew, an order-2 one included."""
    first = family.split.generate(guidance_curve="front:3:1@0.5")
    family.split.generate(guidance_curve="constant:2", num_inference_steps=5, seed=8)
    again = family.split.generate(guidance_curve="front:3:1@0.5")
    assert np.array_equal(first.latents, again.latents)


def test_several_images(family):
    request = dict(num_outputs_per_prompt=2, guidance_curve="front:3:1@0.5")
    split = family.split.generate(**request)
    packed = family.packed.generate(**request)
    assert len(split.images) == 2
    assert np.abs(split.images.astype(int) - packed.images).max() <= 1
