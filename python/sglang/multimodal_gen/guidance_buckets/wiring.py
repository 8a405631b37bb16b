# SPDX-License-Identifier: Apache-2.0
"""The one table of every hook into upstream, and the plugin callbacks that register it.

Nothing of the runtime is imported here at module scope: plugins load before the platform is up.
Hooks are named by string and import what they need when they are first called.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_GEN = "sglang.multimodal_gen"
_HOOKS = f"{_GEN}.guidance_buckets"


@dataclass(frozen=True)
class Hook:
    """One place where this project joins upstream.

    Attributes:
        target: dotted path of the upstream function, method or class.
        kind: ``before``, ``after``, ``around`` or ``replace``.
        function: ``module:name`` of ours, under this package.
        parameters: those of the target that our function relies on, by name.
        purpose: what the hook is for.
    """

    target: str
    kind: str
    function: str
    parameters: tuple[str, ...]
    purpose: str

    def resolve(self) -> Any:
        module, name = self.function.split(":")
        return getattr(importlib.import_module(f"{_HOOKS}.{module}"), name)


GUIDANCE_HOOKS = (
    Hook(
        f"{_GEN}.runtime.server_args.server_args.ServerArgs.add_cli_args",
        "after",
        "argument_hooks:add_flags",
        ("parser",),
        "the --guidance-* flags",
    ),
    Hook(
        f"{_GEN}.runtime.server_args.server_args.ServerArgs.from_dict",
        "around",
        "argument_hooks:from_dict",
        ("kwargs",),
        "flags and config file: keep the --guidance-* values, check them",
    ),
    Hook(
        f"{_GEN}.runtime.server_args.server_args.ServerArgs.from_kwargs",
        "around",
        "argument_hooks:from_kwargs",
        ("kwargs",),
        "DiffGenerator: the same for Python keywords",
    ),
    Hook(
        f"{_GEN}.runtime.pipelines_core.build_pipeline",
        "after",
        "server_hooks:bucketize_pipeline",
        ("server_args",),
        "make the denoising stage obey plans, or refuse to start",
    ),
    Hook(
        f"{_GEN}.runtime.managers.gpu_worker.GPUWorker.init_device_and_model",
        "after",
        "server_hooks:capture_bucket_graphs",
        ("self",),
        "capture bucket graphs once the model is loaded, before the server is ready",
    ),
    Hook(
        f"{_GEN}.runtime.managers.scheduler.Scheduler._normalize_received_payload",
        "after",
        "server_hooks:plan_received_requests",
        ("identity", "reqs"),
        "make each request's plan on rank 0, before the request is broadcast",
    ),
    Hook(
        f"{_GEN}.runtime.managers.scheduler.Scheduler.event_loop",
        "around",
        "server_hooks:run_event_loop",
        ("self",),
        "with --max-running-samples: the loop of continuous batching",
    ),
    Hook(
        f"{_GEN}.runtime.managers.scheduler.Scheduler._dispatch_single_request",
        "before",
        "server_hooks:drop_bucket_graphs",
        ("self", "req_or_group"),
        "drop bucket graphs before a control request changes or moves the weights",
    ),
    Hook(
        f"{_GEN}.runtime.managers.scheduler.Scheduler._build_dynamic_batch_signature",
        "after",
        "server_hooks:sign_guidance",
        ("self", "req"),
        "only requests of equal guidance are merged by dynamic batching",
    ),
    Hook(
        f"{_GEN}.runtime.pipelines_core.schedule_batch.Req.set_as_warmup",
        "after",
        "request_hooks:replan_warmup",
        ("self", "warmup_steps"),
        "a plan for a warm-up copy's fewer steps",
    ),
    Hook(
        f"{_GEN}.runtime.observability.metrics.init_metrics",
        "after",
        "server_hooks:add_forward_counter",
        ("server_args",),
        "count DiT rows by branch in /metrics",
    ),
    Hook(
        f"{_GEN}.configs.sample.sampling_params.SamplingParams.from_user_sampling_params_args",
        "around",
        "request_hooks:build_sampling_params",
        ("model_path", "server_args"),
        "take the guidance fields out of a request and validate them",
    ),
    Hook(
        f"{_GEN}.configs.sample.sampling_params.SamplingParams.get_cli_args",
        "after",
        "request_hooks:cli_fields",
        ("args",),
        "sglang generate: the --guidance-* flags are the request's own",
    ),
    Hook(
        f"{_GEN}.runtime.entrypoints.diffusion_generator._replace_sampling_params_for_prompt",
        "after",
        "request_hooks:keep_options",
        ("sampling_params_orig",),
        "several prompts of one call share its guidance",
    ),
    Hook(
        f"{_GEN}.runtime.entrypoints.utils.prepare_request",
        "after",
        "request_hooks:attach_to_request",
        ("server_args", "sampling_params"),
        "write the options into Req.extra, ask for an uncond branch where a step needs it",
    ),
    Hook(
        f"{_GEN}.runtime.entrypoints.openai.utils.request_model_kwargs",
        "after",
        "request_hooks:json_fields",
        ("request", "sampling_params_cls", "api"),
        "read the guidance fields of a JSON request, and of a video's form",
    ),
    Hook(
        f"{_GEN}.runtime.entrypoints.openai.prompt_enhancement.maybe_enhance_prompt",
        "around",
        "request_hooks:remember_form_fields",
        ("request", "prompt", "enabled", "task", "image_paths"),
        "read the guidance fields of a multipart request",
    ),
    Hook(
        f"{_GEN}.runtime.entrypoints.openai.image_api._build_request_sampling_params",
        "around",
        "request_hooks:add_form_fields",
        ("request_id", "kwargs"),
        "hand them to the request's sampling params",
    ),
    Hook(
        f"{_GEN}.runtime.entrypoints.openai.utils.process_generation_batch",
        "around",
        "response_hooks:name_faults",
        ("scheduler_client", "batch"),
        "502 or 504 for a fault of the AR server; a client that goes away gives its rows back",
    ),
    Hook(
        f"{_GEN}.runtime.entrypoints.openai.protocol.ImageResponse",
        "replace",
        "image_response:ImageResponse",
        (),
        "the response model with a guidance object",
    ),
    Hook(
        f"{_GEN}.runtime.entrypoints.openai.image_api._build_image_response_kwargs",
        "after",
        "response_hooks:add_report",
        ("result",),
        "say in the response what was run",
    ),
    Hook(
        f"{_GEN}.runtime.utils.perf_logger.RequestMetrics.to_dict",
        "after",
        "response_hooks:report_in_metrics",
        ("self",),
        "the same in GenerationResult.metrics",
    ),
    Hook(
        f"{_GEN}.runtime.pipelines_core.stages.model_specific_stages.glm_image"
        ".pooled_image_features_to_tensor",
        "around",
        "model_hooks:stack_image_features",
        ("image_features",),
        "image-to-image in one process: transformers returns a list of (C, H, W) features",
    ),
    Hook(
        f"{_GEN}.runtime.pipelines_core.stages.model_specific_stages.glm_image"
        ".GlmImageBeforeDenoisingStage.__init__",
        "after",
        "model_hooks:call_encoder_alone",
        ("self", "text_encoder"),
        "tensor parallel 4: a glyph encoder of 6 heads is loaded with a decoder that it has not",
    ),
    Hook(
        f"{_GEN}.runtime.pipelines_core.stages.denoising.DenoisingStage._maybe_torch_compile",
        "before",
        "model_hooks:name_regions",
        ("self", "module"),
        "--regional-compile for families that do not name the blocks that repeat",
    ),
    Hook(
        f"{_GEN}.runtime.pipelines_core.stages.denoising.DenoisingStage"
        "._owns_compile_warmup_lifecycle",
        "after",
        "model_hooks:keep_dit_in_place",
        ("self",),
        "no --offload-during-compile where nothing would end it",
    ),
    Hook(
        f"{_GEN}.runtime.loader.component_loaders.vl_encoder_loader.VisionLanguageEncoderLoader"
        ".load_customized",
        "around",
        "prior_hooks:load_encoder",
        ("self", "component_model_path", "server_args"),
        "wait for the AR server, with progress and a deadline",
    ),
    Hook(
        f"{_GEN}.runtime.pipelines_core.stages.model_specific_stages.glm_image.GlmImageAR.forward",
        "around",
        "prior_hooks:write_prior",
        ("self", "batch", "server_args"),
        "prior tokens from the asynchronous AR client",
    ),
    Hook(
        f"{_GEN}.runtime.pipelines_core.stages.model_specific_stages.glm_image.GlmImageAR"
        ".run_grouped_requests",
        "around",
        "prior_hooks:write_priors",
        ("self", "batches", "server_args"),
        "the same for a group: any mix of sizes",
    ),
    Hook(
        f"{_GEN}.runtime.pipelines_core.stages.model_specific_stages.glm_image"
        ".resize_glm_image_to_alignment",
        "around",
        "prior_hooks:fit_source_image",
        ("image",),
        "a source image of any size: the DiT sees the size that the AR model sees",
    ),
    Hook(
        f"{_GEN}.runtime.pipelines_core.executors.parallel_executor.ParallelExecutor"
        "._execute_stages",
        "around",
        "prior_hooks:name_cause",
        ("self",),
        "an error of the AR stage keeps its text",
    ),
    Hook(
        f"{_GEN}.runtime.entrypoints.http_server.create_app",
        "after",
        "server_hooks:complete_app",
        ("server_args",),
        "/health says degraded while the AR server is dead; a first answer as fast as later ones",
    ),
    Hook(
        f"{_GEN}.runtime.launch_server.launch_disagg_server",
        "before",
        "disagg_hooks:serve_glm_image",
        ("server_args",),
        "a head that asks for each request's tokens by itself",
    ),
    Hook(
        f"{_GEN}.runtime.server_args.disagg.DisaggServerArgsMixin.for_disagg_role",
        "around",
        "disagg_hooks:keep_our_arguments",
        ("self", "role_type", "overrides"),
        "the values of our flags reach the workers of a role",
    ),
    Hook(
        f"{_GEN}.runtime.disaggregation.scheduler_mixin.SchedulerDisaggMixin._build_disagg_req",
        "after",
        "disagg_hooks:plan_relayed_request",
        ("self",),
        "a denoiser plans the request that the head sent it",
    ),
    Hook(
        f"{_GEN}.runtime.disaggregation.orchestrator._deserialize_request_metrics",
        "after",
        "disagg_hooks:restore_report",
        ("data",),
        "what a denoiser ran comes back to the head",
    ),
)

CPU_OPS_HOOKS = (
    Hook(
        f"{_GEN}.runtime.managers.cpu_worker.CPUWorker.__init__",
        "before",
        "model_hooks:supply_cpu_ops",
        ("self",),
        "two fused norms that the published wheel lacks on CPU",
    ),
    Hook(
        f"{_GEN}.runtime.disaggregation.scheduler_mixin.SchedulerDisaggMixin._init_disagg_state",
        "before",
        "disagg_hooks:supply_cpu_streams",
        ("self",),
        "disaggregated roles on CPU: streams and events that do nothing",
    ),
)

SRT_HOOKS = (
    Hook(
        "sglang.srt.model_loader.utils.get_model_architecture",
        "after",
        "srt_hooks:take_source_images",
        ("model_config",),
        "image-to-image: GLM-Image's AR server gives back the tokens of source images",
    ),
    Hook(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        "around",
        "srt_hooks:draw_by_token",
        ("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed")
        + ("positions", "return_filtered_probs"),
        "GLM-Image's AR server: a seed gives the same tokens whatever else is in the batch",
    ),
)

SRT_CPU_HOOKS = (
    Hook(
        "sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode",
        "around",
        "srt_hooks:skip_batch_invariant_kernels",
        (),
        "GLM-Image's AR server on CPU: deterministic inference without Triton kernels",
    ),
    Hook(
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        "around",
        "srt_hooks:hash_on_cpu",
        ("seed", "positions", "col_indices"),
        "the same: the hash that seeded sampling draws from",
    ),
    Hook(
        "sglang.srt.distributed.parallel_state.init_model_parallel_group",
        "around",
        "srt_hooks:keep_to_gloo",
        ("group_ranks", "local_rank", "backend", "use_pynccl"),
        "tensor parallel on a CPU host: gloo without NCCL beside it",
    ),
)


class _LazyHook:
    """Resolves a hook's function at its first call."""

    def __init__(self, hook: Hook):
        self._hook = hook
        self._function: Callable | None = None

    def __call__(self, *args, **kwargs):
        if self._function is None:
            self._function = self._hook.resolve()
        return self._function(*args, **kwargs)


def register_guidance() -> None:
    """Entry point ``guidance_buckets`` of ``sglang.multimodal_gen.plugins``."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    _register(GUIDANCE_HOOKS, HookRegistry, HookType)


def register_cpu_ops() -> None:
    """Entry point ``cpu_norm_ops`` of ``sglang.multimodal_gen.plugins``.

    Apart from the other, so that a CPU host can run upstream alone with the two ops.
    """
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    _register(CPU_OPS_HOOKS, HookRegistry, HookType)


def register_srt() -> None:
    """Entry point ``guidance_buckets`` of ``sglang.srt.plugins``."""
    import torch

    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _register(SRT_HOOKS, HookRegistry, HookType)
    if torch.accelerator.is_available():
        return
    _register(SRT_CPU_HOOKS, HookRegistry, HookType)
    # the one attention backend of a CPU host is deterministic there
    choices.add_deterministic_attention_backend_choices(["torch_native"])


def _register(hooks: tuple[Hook, ...], registry: Any, kinds: Any) -> None:
    for hook in hooks:
        # a class must be there when it is registered: upstream tells it from a function
        function = hook.resolve() if hook.kind == "replace" else _LazyHook(hook)
        registry.register(hook.target, function, kinds(hook.kind))


class HookNotApplied(RuntimeError):
    """Guidance buckets were asked for and a hook is missing: an upstream that changed."""


def require_hooks() -> None:
    """Raise `HookNotApplied`, naming every hook of `GUIDANCE_HOOKS` that upstream did not take."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    missing = [hook for hook in GUIDANCE_HOOKS if hook.target not in HookRegistry._patched]
    if missing:
        raise HookNotApplied(
            "--guidance-buckets cannot be used with this version of sglang; not applied: "
            + "; ".join(f"{hook.target} ({hook.purpose})" for hook in missing)
        )
