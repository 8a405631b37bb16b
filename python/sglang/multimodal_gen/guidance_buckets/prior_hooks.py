# SPDX-License-Identifier: Apache-2.0
"""Hooks that put this project's AR client in the place of upstream's."""

from typing import Any

from sglang.multimodal_gen.configs.glm_image_prior import PriorError, prior_config

# the service of this process, where one was built
_service: Any = None

# GLM-Image's, in a process that prepares its source images
_image_processor: Any = None


def load_encoder(original, loader: Any, path: str, server_args: Any, *args, **kwargs) -> Any:
    """AROUND VisionLanguageEncoderLoader.load_customized: upstream asks for the AR server once."""
    config = prior_config(server_args)
    if config is not None and config.url is not None:
        from sglang.multimodal_gen.runtime.distributed.parallel_state import get_replica_group

        prior = _prior()
        prior.wait_for_server(config, tells=get_replica_group().rank_in_group == 0)
    return original(loader, path, server_args, *args, **kwargs)


def attach_service(pipeline: Any, server_args: Any) -> None:
    """After build_pipeline: the AR stage gets a service on the rank that runs it."""
    global _service, _image_processor
    from sglang.multimodal_gen.runtime.distributed.parallel_state import get_replica_group
    from sglang.multimodal_gen.runtime.observability.metrics import get_metrics
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages import glm_image

    config = prior_config(server_args)
    if config is not None and any(
        isinstance(stage, glm_image.GlmImageBeforeDenoisingStage) for stage in pipeline.stages
    ):
        processor = pipeline.get_module("processor")
        if processor is None:  # on a denoiser of a head
            from transformers import AutoProcessor

            processor = AutoProcessor.from_pretrained(pipeline.model_path, subfolder="processor")
        _image_processor = processor.image_processor
    if config is None or config.url is None or get_replica_group().rank_in_group != 0:
        return
    stages = [stage for stage in pipeline.stages if isinstance(stage, glm_image.GlmImageAR)]
    if stages:
        transformer = pipeline.get_module("transformer")
        _service = stages[0].prior_service = _prior().build_service(
            config,
            processor=stages[0].processor,
            codebook=transformer.config.prior_vq_quantizer_codebook_size,
            sampling=_prior().sampling_of(pipeline.model_path),
            server_metrics=get_metrics(),
        )


def fetch_early(req: Any) -> None:
    """On rank 0, as soon as a request is received."""
    if _service is not None:
        _service.fetch_early(req)


def fit_source_image(original, image: Any) -> Any:
    """AROUND glm_image.resize_glm_image_to_alignment, for the AR model and for the VAE."""
    if _image_processor is None:
        return original(image)
    from sglang.multimodal_gen.configs.glm_image_sources import fit_source

    return fit_source(image, _image_processor)


def write_prior(original, stage: Any, batch: Any, server_args: Any) -> Any:
    """AROUND GlmImageAR.forward."""
    service = getattr(stage, "prior_service", None)
    if service is not None:
        return _write(service, [batch])[0]
    if prior_config(server_args) is not None and prior_config(server_args).url is None:
        model = stage.vision_language_encoder.config.text_config
        _prior().check_request(batch, stage.processor, model.max_position_embeddings)
    return original(stage, batch, server_args)


def write_priors(original, stage: Any, batches: list, server_args: Any) -> list:
    """AROUND GlmImageAR.run_grouped_requests."""
    service = getattr(stage, "prior_service", None)
    if service is None:
        return original(stage, batches, server_args)
    return _write(service, batches)


def _write(service: Any, batches: list) -> list:
    from sglang.multimodal_gen.runtime.platforms import current_platform

    device = current_platform.get_local_torch_device()
    for batch, prior in zip(batches, service.fetch(batches).result()):
        _prior().assign_prior(batch, prior)
        batch.prior_token_id = batch.prior_token_id.to(device)
    return batches


def name_cause(original, executor: Any, *args, **kwargs) -> Any:
    """AROUND ParallelExecutor._execute_stages, which says "Error on rank 0" and no more."""
    try:
        return original(executor, *args, **kwargs)
    except RuntimeError as error:
        if isinstance(error.__cause__, PriorError):
            raise error.__cause__ from None
        raise


def watch_ar_server(app: Any, server_args: Any, *_args, **_kwargs) -> None:
    """After create_app: a route for /health before upstream's, which it asks."""
    config = prior_config(server_args)
    if config is None or config.url is None:
        return
    from sglang.multimodal_gen.runtime.entrypoints.ar_health import add_health_route

    add_health_route(app, config, server_args.model_path)


def _prior() -> Any:
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages import (
        glm_image_prior,
    )

    return glm_image_prior
