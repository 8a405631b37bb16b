"""Guidance fields in forms, and the requests that cannot have them."""

import asyncio
import io
from types import SimpleNamespace

import pytest
from starlette.datastructures import FormData, UploadFile

from sglang.multimodal_gen.configs.guidance_curves import GuidanceError, check_buckets, parse_curve
from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import QwenImagePipelineConfig
from sglang.multimodal_gen.configs.sample.glmimage import GlmImageSamplingParams
from sglang.multimodal_gen.configs.sample.qwenimage import QwenImageSamplingParams
from sglang.multimodal_gen.guidance_buckets.request_hooks import (
    build_sampling_params,
    form_fields,
    json_fields,
    remember_form_fields,
)
from sglang.multimodal_gen.guidance_buckets.server_hooks import sign_guidance
from sglang.multimodal_gen.runtime.guidance.requests import attach_plan, request_options
from sglang.multimodal_gen.runtime.guidance.support import check_request

FILE = UploadFile(io.BytesIO(b"x"), filename="x")


def test_a_file_is_refused_by_name():
    with pytest.raises(GuidanceError, match="guidance_curve"):
        parse_curve(FILE)
    with pytest.raises(GuidanceError, match="guidance_buckets"):
        check_buckets(FILE)


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ([], {}),
        ([("guidance_curve", "front:2:1@0.4")], {"guidance_curve": "front:2:1@0.4"}),
        ([("guidance_curve", "[2, 1]")], {"guidance_curve": "[2, 1]"}),
        ([("guidance_curve[]", "2"), ("guidance_curve[]", "1.5")], {"guidance_curve": [2, 1.5]}),
        ([("guidance_curve", "2"), ("guidance_curve", "x")], {"guidance_curve": [2, "x"]}),
        ([("guidance_curve", "")], {"guidance_curve": ""}),
        ([("guidance_buckets", "8")], {"guidance_buckets": 8}),
        ([("guidance_buckets", "2.5")], {"guidance_buckets": 2.5}),
        ([("guidance_buckets", "true")], {"guidance_buckets": True}),
        ([("guidance_buckets", "eight")], {"guidance_buckets": "eight"}),
        ([("guidance_bucket_mode", "linear")], {"guidance_bucket_mode": "linear"}),
        ([("guidance_buckets", FILE)], {"guidance_buckets": FILE}),
        ([("guidance_curve", FILE)], {"guidance_curve": FILE}),
        ([("extra_body", '{"guidance_buckets": 4}')], {"guidance_buckets": 4}),
        ([("extra_params", '{"guidance_curve": [2, 1]}')], {"guidance_curve": [2, 1]}),
        (
            [("extra_body", '{"guidance_buckets": 4}'), ("guidance_buckets", "8")],
            {"guidance_buckets": 8},
        ),
        ([("extra_body", "[" * 2000)], {}),
        ([("extra_body", FILE)], {}),
    ],
    ids=str,
)
def test_form_fields(form, fields):
    assert form_fields(FormData([("prompt", "a cat"), *form])) == fields


@pytest.mark.parametrize(
    ("form", "extra", "fields"),
    [
        ([("guidance_curve", "front:2:1@0.4")], {}, {"guidance_curve": "front:2:1@0.4"}),
        ([("guidance_buckets", "8")], {}, {"guidance_buckets": 8}),
        ([], {"guidance_curve": "peak"}, {"guidance_curve": "peak"}),  # a body of JSON
    ],
)
def test_fields_of_a_video(form, extra, fields):
    async def read_form():
        return FormData(form)

    async def keep_prompt(request, prompt, **_kwargs):
        return prompt

    async def serve() -> dict:
        request, kwargs = SimpleNamespace(form=read_form), {}
        assert await remember_form_fields(keep_prompt, request, "a cat", task="video") == "a cat"
        json_fields(kwargs, SimpleNamespace(model_extra=extra), object, "video")
        return kwargs

    assert asyncio.run(serve()) == fields


def params(cls=QwenImageSamplingParams, **fields):
    made = cls(**fields)
    made._explicit_fields = set(fields)
    return made


@pytest.mark.parametrize(
    ("sampling_params", "scales", "field"),
    [
        (params(cfg_gate_step=0.9), (2.0,), "cfg_gate_step"),
        (params(enable_teacache=True), (1.0,), "enable_teacache"),
        (params(enable_cache_dit=True), (1.0,), "enable_cache_dit"),
        (params(enable_spectrum=True), (1.0,), "enable_spectrum"),
        (params(rollout=True), (1.0,), "rollout"),
        (params(progressive_mode="dct"), (1.0,), "progressive_mode"),
        (params(GlmImageSamplingParams, negative_prompt="x"), (2.0,), "negative_prompt"),
        (SimpleNamespace(**vars(params()) | {"negative_prompt": None}), (2.0,), "negative_prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(sampling_params, scales, field):
    with pytest.raises(GuidanceError) as error:
        check_request(sampling_params, names_guidance=True, scales=scales)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("sampling_params", "scales"),
    [
        (params(cfg_gate_step=1.0), (2.0,)),
        (params(enable_cache_dit=False), (2.0,)),
        (params(guidance_rescale=0.7, cfg_normalization=1.0, true_cfg_scale=3.0), (2.0,)),
        (params(GlmImageSamplingParams), (2.0,)),
        (params(GlmImageSamplingParams, negative_prompt=" "), (2.0,)),
        (SimpleNamespace(**vars(params()) | {"negative_prompt": None}), (1.0, 1.0)),
    ],
    ids=str,
)
def test_not_refused(sampling_params, scales):
    check_request(sampling_params, names_guidance=True, scales=scales)


def test_glm_images_negative_prompt_is_ignored_as_upstream_where_no_field_is_named():
    named = params(GlmImageSamplingParams, negative_prompt="x")
    check_request(named, names_guidance=False, scales=(2.0,))


def server(**attributes):
    defaults = dict(guidance_buckets=8, pipeline_config=QwenImagePipelineConfig())
    return SimpleNamespace(**defaults | attributes)


def test_too_many_steps_are_refused_where_the_curve_would_be_cut():
    with pytest.raises(GuidanceError, match="num_inference_steps: got 10001, wanted at most 10000"):
        request_options(params(num_inference_steps=10_001), server(), {})
    assert request_options(params(num_inference_steps=10_000), server(), {})
    off, long = server(guidance_buckets=0), params(num_inference_steps=10**6)
    assert build_sampling_params(lambda *args, **kwargs: long, "model", off) is long


@pytest.mark.parametrize(
    ("images", "seed", "given", "prompts"),
    [
        (1, 7, True, "one"),
        (2, [1, 2], True, "one"),
        (2, [1, 2, 3], False, "one"),
        (2, [1], False, "one"),
        (1, [1, 2], False, "one"),
        (2, [1, 2, 3, 4], True, "two"),  # two prompts of a DiffGenerator, which counts for itself
        (2, [1, 2, 3, 4], True, "a file"),
    ],
)
def test_a_list_of_seeds_has_one_an_image(images, seed, given, prompts):
    request = params(num_outputs_per_prompt=images, seed=seed, num_inference_steps=4, prompt="a")
    if prompts == "two":
        request.prompt = ["a", "b"]
    args = server(prompt_file_path="prompts" if prompts == "a file" else None)
    if given:
        assert request_options(request, args, {})
    else:
        with pytest.raises(GuidanceError, match=f"seed: got .*, wanted {images} in a list"):
            request_options(request, args, {})


def test_what_dynamic_batching_may_merge():
    """Equal guidance, and nothing that is traced: the trace would be the first request's."""

    plain, same, other, traced, also = (
        SimpleNamespace(extra={"guidance": dict(curve=curve, trace=trace)})
        for curve, trace in [*[("front", False)] * 2, ("peak", False), *[("front", True)] * 2]
    )
    assert sign_guidance(("x",), None, plain) == sign_guidance(("x",), None, same)
    assert sign_guidance(("x",), None, plain) != sign_guidance(("x",), None, other)
    assert sign_guidance(("x",), None, traced) != sign_guidance(("x",), None, also)


def planned(curve, *, steps=2, **attributes):
    """What rank 0 puts into a request that no API built."""
    sampling_params = params(num_inference_steps=steps, guidance_scale=4.0)
    sampling_params._explicit_fields = set()
    defaults = dict(request_id="r", num_outputs_per_prompt=1, num_inference_steps=steps)
    defaults |= dict(is_warmup=False, extra={}, negative_prompt="x", guidance_scale=4.0)
    req = SimpleNamespace(sampling_params=sampling_params, **defaults | attributes)
    sampling_params.negative_prompt = req.negative_prompt
    attach_plan(req, server(guidance_curve=curve))
    scales = req.extra["bucket_plan"]["samples"][0]["scales"] if "bucket_plan" in req.extra else ()
    return scales, req.extra.get("guidance_refusal")


@pytest.mark.parametrize(
    ("curve", "request_", "scales"),
    [
        ("constant", {}, (4.0, 4.0)),
        ((1.0, 3.0, 2.0), {}, (3.0, 3.0)),
        ((1.0, 3.0), {}, (1.0, 3.0)),
        ("front:2:1@0.5", {"negative_prompt": None}, (1.0, 1.0)),
        ("front:2:1@0.5", {}, (2.0, 1.0)),
        ("constant:3", {"steps": 20_000}, (3.0,) * 20_000),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_warm_up_is_guided_where_it_can_be(curve, request_, scales):
    assert planned(curve, is_warmup=True, **request_) == (scales, None)
    prewarm = {"extra": {"server_internal_prewarm": True}}
    assert planned(curve, **prewarm, **request_) == (scales, None)


@pytest.mark.parametrize(
    ("curve", "request_", "refusal"),
    [
        ((1.0, 3.0, 2.0), {}, "guidance_curve: got a list of 3 numbers, wanted 2"),
        ("front:2:1@0.5", {"negative_prompt": None}, "negative_prompt: got None"),
        ("constant:3", {"steps": 20_000}, "num_inference_steps: got 20000"),
    ],
    ids=repr,
)
def test_a_request_that_no_api_built_does_not_run_unguided(curve, request_, refusal):
    """It is refused where its answer is made: an error here would lose it."""
    scales, got = planned(curve, **request_)
    assert scales == () and refusal in got
