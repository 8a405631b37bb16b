"""Which pipelines are refused, with upstream's real stage and config classes."""

import importlib
from types import SimpleNamespace

import pytest

from sglang.multimodal_gen.configs.bucket_graphs import BucketGraphConfig
from sglang.multimodal_gen.configs.pipeline_configs.glm_image import GlmImagePipelineConfig
from sglang.multimodal_gen.configs.pipeline_configs.zimage import ZImagePipelineConfig
from sglang.multimodal_gen.guidance_buckets.model_hooks import keep_dit_in_place
from sglang.multimodal_gen.runtime.disaggregation.roles import RoleType
from sglang.multimodal_gen.runtime.guidance.support import (
    GuidanceUnsupported,
    check_server_args,
    denoising_stages,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.progressive_resolution.denoising import (
    ProgressiveDenoisingStageRouter,
)

STAGES = "sglang.multimodal_gen.runtime.pipelines_core.stages"


def stage(cls=DenoisingStage, **attributes):
    """A stage without its model: only its class and what it would hold are looked at."""
    made = cls.__new__(cls)
    vars(made).update({"transformer_2": None, **attributes})
    return made


def pipeline(*stages, config=GlmImagePipelineConfig):
    return SimpleNamespace(
        stages=[*stages, object()], server_args=SimpleNamespace(pipeline_config=config())
    )


def test_the_common_stage():
    plain = stage()
    assert denoising_stages(pipeline(plain)) == [plain]


def test_a_router_hands_full_resolution_to_the_common_stage():
    plain = stage()
    router = stage(ProgressiveDenoisingStageRouter, standard_stage=plain)
    assert denoising_stages(pipeline(router)) == [plain]


@pytest.mark.parametrize(
    ("stages", "config", "message"),
    [
        ([stage(transformer_2=object())], GlmImagePipelineConfig, "two transformers"),
        ([stage()], ZImagePipelineConfig, "own way.*ZImageCFGPolicy"),
        ([], GlmImagePipelineConfig, "no denoising stage"),
    ],
)
def test_refused(stages, config, message):
    with pytest.raises(GuidanceUnsupported, match=message):
        denoising_stages(pipeline(*stages, config=config))


@pytest.mark.parametrize(
    "name",
    [
        "denoising_dmd:DmdDenoisingStage",
        "model_specific_stages.ideogram:Ideogram4DenoisingStage",
        "model_specific_stages.moss_image:MOSSImageDenoisingStage",
        "model_specific_stages.ltx_2.denoising:LTX2DenoisingStage",
        "model_specific_stages.flux3_image:Flux3ImageDenoiseStage",
    ],
)
def test_a_stage_with_a_loop_of_its_own(name):
    module, cls = name.split(":")
    own = getattr(importlib.import_module(f"{STAGES}.{module}"), cls)
    with pytest.raises(GuidanceUnsupported, match=f"{cls} has a loop of its own"):
        denoising_stages(pipeline(stage(own)))


def server_args(**attributes):
    """What the check looks at, of a server that it accepts."""
    defaults = dict(
        backend=None,
        comfyui_mode=False,
        enable_breakable_cuda_graph=False,
        disagg_role=RoleType.MONOLITHIC,
        pipeline_config=GlmImagePipelineConfig(),
        srt_encoder_url="http://127.0.0.1:1",
        encoder_urls=None,
        decoder_urls=None,
        max_running_samples=0,
        guidance_trace=None,
        batching_max_size=1,
        batching_delay_ms=0,
        use_fsdp_inference=False,
        residency_mode=lambda component: "resident",
        enable_torch_compile=False,
        offload_during_compile=True,
        is_arg_explicitly_set=lambda name: False,
    )
    return SimpleNamespace(**{**defaults, **attributes})


@pytest.mark.parametrize("role", [RoleType.MONOLITHIC, RoleType.SERVER, RoleType.DENOISER])
def test_roles_of_glm_image(role):
    check_server_args(server_args(disagg_role=role))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (dict(disagg_role=RoleType.ENCODER), "--disagg-role encoder"),
        (dict(disagg_role=RoleType.DECODER), "--disagg-role decoder"),
        (dict(disagg_role=RoleType.DENOISER, srt_encoder_url=None), "without --srt-encoder-url"),
        (
            dict(disagg_role=RoleType.DENOISER, pipeline_config=ZImagePipelineConfig()),
            "of another model",
        ),
        (dict(disagg_role=RoleType.SERVER, encoder_urls="tcp://a:1"), "--encoder-urls"),
    ],
)
def test_other_roles_are_refused(attributes, message):
    with pytest.raises(GuidanceUnsupported, match=message):
        check_server_args(server_args(**attributes))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (dict(batching_max_size=2), "it batches by itself"),
        (dict(batching_delay_ms=5), "it batches by itself"),
        (dict(use_fsdp_inference=True), "--use-fsdp-inference"),
        (dict(residency_mode=lambda component: "component-offload"), "an offloaded DiT"),
        (
            dict(enable_torch_compile=True, is_arg_explicitly_set=lambda name: True),
            "--offload-during-compile",
        ),
    ],
)
def test_what_several_samples_do_not_combine_with(attributes, message):
    check_server_args(server_args(**attributes))
    with pytest.raises(GuidanceUnsupported, match=message):
        check_server_args(server_args(max_running_samples=8, **attributes))


@pytest.mark.parametrize(
    ("attributes", "decision"),
    [
        (dict(max_running_samples=8), False),
        (dict(max_running_samples=8, guidance_buckets=None), None),
        (dict(bucket_graphs=BucketGraphConfig(mode="auto")), False),
        (dict(bucket_graphs=BucketGraphConfig(mode="off")), None),
        (dict(is_arg_explicitly_set=lambda name: True), None),  # so graphs are refused
    ],
)
def test_where_a_dit_is_not_offloaded_while_it_compiles(attributes, decision):
    args = dict(guidance_buckets=8, bucket_graphs=BucketGraphConfig(mode="auto"))
    args = server_args(enable_torch_compile=True, **{**args, **attributes})
    assert keep_dit_in_place(True, SimpleNamespace(server_args=args)) is decision
