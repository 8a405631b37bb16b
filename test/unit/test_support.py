"""Which pipelines are refused, with upstream's real stage and config classes."""

import importlib
from types import SimpleNamespace

import pytest

from sglang.multimodal_gen.configs.pipeline_configs.glm_image import GlmImagePipelineConfig
from sglang.multimodal_gen.configs.pipeline_configs.zimage import ZImagePipelineConfig
from sglang.multimodal_gen.runtime.guidance.support import GuidanceUnsupported, denoising_stages
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
