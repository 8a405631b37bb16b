# SPDX-License-Identifier: Apache-2.0
"""What guidance buckets combine with. Everything else is refused here, by name."""

from collections.abc import Iterator
from typing import Any

from sglang.multimodal_gen.configs.guidance_curves import GuidanceError

# What `BucketizedDenoisingMixin` builds on; a stage with its own version of one runs another loop.
_LOOP_METHODS = (
    "forward",
    "_denoise",
    "_run_denoising_loop",
    "_before_denoising_loop",
    "_run_denoising_step",
    "_predict_noise_with_cfg",
    "_predict_noise",
    "_finalize_denoising_loop",
)

# Stages that write do_classifier_free_guidance themselves, from the request's own scale.
_DECIDING_STAGES = ("LLaDAImageTextConditioningStage",)


class GuidanceUnsupported(ValueError):
    """The server cannot run guidance buckets; the message names what stands in the way."""


def check_server_args(server_args: Any) -> None:
    """Refuse what is known to stand in the way before a model is loaded.

    Raises:
        GuidanceUnsupported: naming every obstacle.
    """
    _raise_for(list(_server_obstacles(server_args)))
    obstacles = loop_obstacles(server_args) if server_args.max_running_samples else []
    if obstacles:
        raise GuidanceUnsupported(
            "--max-running-samples does not combine with " + "; ".join(obstacles)
        )


def loop_obstacles(server_args: Any) -> list[str]:
    """What keeps a server from stepping several requests at once."""
    from sglang.multimodal_gen.runtime.server_args.server_args import RESIDENT

    obstacles = []
    if server_args.batching_max_size > 1 or server_args.batching_delay_ms > 0:
        obstacles.append(
            "--batching-max-size above 1 or a batching delay: it batches by itself"
        )
    if server_args.use_fsdp_inference:
        obstacles.append("--use-fsdp-inference (weights would be gathered for each step)")
    elif server_args.residency_mode("transformer") != RESIDENT:
        obstacles.append("an offloaded DiT (it would be moved for each step)")
    if offloads_during_compile(server_args):
        obstacles.append("--offload-during-compile (it would last for good)")
    return obstacles


def offloads_during_compile(server_args: Any) -> bool:
    """Whether the DiT was asked by name to be offloaded while it compiles: SGLang's default."""
    return bool(
        server_args.enable_torch_compile
        and server_args.offload_during_compile
        and server_args.is_arg_explicitly_set("offload_during_compile")
    )


def check_stepwise(stages: list[Any]) -> None:
    """Refuse continuous batching where there is more than one loop to step through.

    Raises:
        GuidanceUnsupported: naming the stages.
    """
    if len(stages) != 1:
        names = ", ".join(type(stage).__name__ for stage in stages)
        raise GuidanceUnsupported(
            f"--max-running-samples does not combine with the stages {names}: set it to 0"
        )


def _server_obstacles(server_args: Any) -> Iterator[str]:
    from sglang.multimodal_gen import envs
    from sglang.multimodal_gen.runtime.server_args.server_args import Backend

    if server_args.backend == Backend.DIFFUSERS:
        yield "--backend diffusers (the native backend is needed)"
    if server_args.comfyui_mode:
        yield "comfyui_mode (ComfyUI owns the sampler loop)"
    yield from _role_obstacles(server_args)
    if server_args.enable_breakable_cuda_graph:
        yield "--enable-breakable-cuda-graph (its graphs hold one forward a branch)"
    if server_args.guidance_trace is not None:
        yield from _trace_obstacles(server_args)
    if envs.SGLANG_CACHE_DIT_ENABLED:
        yield "SGLANG_CACHE_DIT_ENABLED (Cache-DiT counts forwards that buckets leave out)"
    if envs.SGLANG_DIFFUSION_CFG_GATE_STEP < 1:
        yield "SGLANG_DIFFUSION_CFG_GATE_STEP (use a curve instead)"


def _trace_obstacles(server_args: Any) -> Iterator[str]:
    """A trace needs whole predictions of both branches, and the VAE, on one rank."""
    from sglang.multimodal_gen.runtime.disaggregation.roles import RoleType

    if server_args.enable_cfg_parallel:
        yield "--guidance-trace under --enable-cfg-parallel"
    if (server_args.sp_degree or 1) > 1:
        yield "--guidance-trace under sequence parallelism (--sp-degree)"
    if server_args.disagg_role != RoleType.MONOLITHIC:
        yield f"--guidance-trace with --disagg-role {server_args.disagg_role.value}"


def _role_obstacles(server_args: Any) -> Iterator[str]:
    """Roles run for GLM-Image alone: AR server, head, and denoisers that also encode and decode."""
    from sglang.multimodal_gen.configs.pipeline_configs.glm_image import GlmImagePipelineConfig
    from sglang.multimodal_gen.runtime.disaggregation.roles import RoleType

    role = server_args.disagg_role
    if role == RoleType.MONOLITHIC:
        return
    if not isinstance(server_args.pipeline_config, GlmImagePipelineConfig):
        yield f"--disagg-role {role.value} of another model than GLM-Image"
    elif role not in (RoleType.SERVER, RoleType.DENOISER):
        yield f"--disagg-role {role.value} (GLM-Image's roles are server and denoiser)"
    elif server_args.srt_encoder_url is None:
        yield f"--disagg-role {role.value} without --srt-encoder-url"
    elif server_args.encoder_urls or server_args.decoder_urls:
        yield "--encoder-urls or --decoder-urls"


def unrouted(stage: Any) -> Any:
    """The stage itself, or the one that a router hands requests at full resolution to."""
    return getattr(stage, "standard_stage", stage)


def denoising_stages(pipeline: Any) -> list[Any]:
    """The pipeline's stages that denoise.

    Raises:
        GuidanceUnsupported: where a stage or the model does not run the plain loop.
    """
    from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage

    candidates = map(unrouted, pipeline.stages)
    stages = [stage for stage in candidates if isinstance(stage, DenoisingStage)]
    obstacles = [obstacle for stage in stages for obstacle in _stage_obstacles(stage)]
    if not stages:
        obstacles.append(f"{type(pipeline).__name__} has no denoising stage of the common kind")
    obstacles += [
        f"{type(stage).__name__} (it decides for itself whether an uncond branch runs)"
        for stage in pipeline.stages
        if type(stage).__name__ in _DECIDING_STAGES
    ]
    obstacles += _policy_obstacles(pipeline.server_args.pipeline_config)
    _raise_for(obstacles)
    return stages


def _stage_obstacles(stage: Any) -> Iterator[str]:
    from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage

    cls = type(stage)
    own = [
        name for name in _LOOP_METHODS if getattr(cls, name) is not getattr(DenoisingStage, name)
    ]
    if own:
        yield f"{cls.__name__} has a loop of its own ({', '.join(own)})"
    if stage.transformer_2 is not None:
        yield f"{cls.__name__} has two transformers"


def _policy_obstacles(pipeline_config: Any) -> Iterator[str]:
    from sglang.multimodal_gen.runtime.distributed.cfg_policy import CFGPolicy

    policy = type(pipeline_config.cfg_policy)
    if policy is not CFGPolicy:
        config = type(pipeline_config).__name__
        yield f"{config} combines its branches in its own way ({policy.__name__})"


def _raise_for(obstacles: list[str]) -> None:
    if obstacles:
        raise GuidanceUnsupported(
            "--guidance-buckets does not combine with " + "; ".join(obstacles)
        )


def check_request(sampling_params: Any, *, names_guidance: bool, scales: tuple[float, ...]) -> None:
    """Refuse what one request cannot combine with guidance buckets.

    Args:
        names_guidance: whether the request names a guidance field itself.
        scales: of its steps.

    Raises:
        GuidanceError: naming the field.
    """
    wanted = "it off: this server runs with --guidance-buckets"
    gate = sampling_params.cfg_gate_step
    if gate is not None and gate < 1:
        raise GuidanceError("cfg_gate_step", gate, f"{wanted} (use guidance_curve)")
    for field in ("enable_teacache", "enable_cache_dit", "enable_spectrum", "rollout"):
        if getattr(sampling_params, field):
            raise GuidanceError(field, True, wanted)
    if sampling_params.progressive_mode not in (None, "fullres"):
        raise GuidanceError(
            "progressive_mode", sampling_params.progressive_mode, "'fullres': this server runs "
            "with --guidance-buckets"
        )
    if names_guidance and _names_ignored_negative_prompt(sampling_params):
        raise GuidanceError(
            "negative_prompt",
            sampling_params.negative_prompt,
            "none beside a guidance field: GLM-Image has no negative prompt",
        )
    if sampling_params.negative_prompt is None and any(scale != 1 for scale in scales):
        raise GuidanceError(
            "negative_prompt",
            None,
            "a text (it may be empty) where a guidance scale of the request's or of the server's "
            "--guidance-curve is not 1",
        )


def _names_ignored_negative_prompt(sampling_params: Any) -> bool:
    from sglang.multimodal_gen.configs.sample.glmimage import GlmImageSamplingParams

    # the default of this field is some text, which GLM-Image ignores too: only a named one counts
    return (
        isinstance(sampling_params, GlmImageSamplingParams)
        and "negative_prompt" in getattr(sampling_params, "_explicit_fields", ())
        and bool((sampling_params.negative_prompt or "").strip())
    )
