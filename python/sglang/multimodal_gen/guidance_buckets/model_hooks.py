# SPDX-License-Identifier: Apache-2.0
"""Hooks that mend what upstream's models lack."""

from typing import Any

import torch

from sglang.multimodal_gen.configs.guidance import guidance_is_on
from sglang.multimodal_gen.runtime.guidance.support import offloads_during_compile


def supply_cpu_ops(*_args, **_kwargs) -> None:
    """BEFORE CPUWorker.__init__."""
    from sglang.multimodal_gen.runtime.layers.cpu_norm_ops import register_missing_ops

    register_missing_ops()


def stack_image_features(original, image_features: Any):
    """AROUND pooled_image_features_to_tensor.

    transformers 5.19 pools to one (C, H, W) tensor an image, of different sizes, and its
    tokenizer of images takes that list; upstream would concatenate them.
    """
    pooled = getattr(image_features, "pooler_output", None)
    features = image_features if pooled is None else pooled
    if isinstance(features, (list, tuple)) and all(
        isinstance(feature, torch.Tensor) and feature.ndim == 3 for feature in features
    ):
        return features
    return original(image_features)


def call_encoder_alone(_result: None, stage: Any, *_args, **_kwargs) -> None:
    """AFTER GlmImageBeforeDenoisingStage.__init__.

    The glyph encoder has 6 heads. Where tensor parallelism does not divide them, upstream loads
    it through transformers as an encoder with a decoder, whose forward asks for decoder inputs.
    """
    from transformers import T5Model

    if type(stage.text_encoder) is T5Model:
        stage.text_encoder.forward = stage.text_encoder.encoder.forward


def name_regions(stage: Any, module: Any) -> None:
    """BEFORE DenoisingStage._maybe_torch_compile: what --regional-compile compiles.

    Some families, GLM-Image among them, do not say which of their submodules repeat.
    """
    from sglang.multimodal_gen.configs.models.fsdp import is_blocks_or_transformer_blocks

    if (
        guidance_is_on(stage.server_args)
        and hasattr(module, "transformer_blocks")
        and not getattr(module, "_compile_conditions", ())
    ):
        module._compile_conditions = [is_blocks_or_transformer_blocks]


def keep_dit_in_place(_owns: bool, stage: Any) -> bool | None:
    """AFTER DenoisingStage._owns_compile_warmup_lifecycle.

    SGLang offloads a DiT layer by layer until it has compiled, and brings it back in the stage's
    `forward`. The loop steps without `forward`, and bucket graphs are captured before any.
    """
    args = stage.server_args
    if not guidance_is_on(args) or offloads_during_compile(args):
        return None  # as upstream decided
    return False if args.max_running_samples or args.bucket_graphs.mode != "off" else None
