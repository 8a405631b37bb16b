# SPDX-License-Identifier: Apache-2.0
"""Hooks at start-up and in the scheduler: flags, the pipeline's stages, plans, metrics."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from sglang.multimodal_gen.configs.guidance import (
    BUCKET_MODES,
    CURVE_HELP,
    DEFAULT_RUNNING_SAMPLES,
    MAX_BUCKETS,
    ROW_MODES,
    GuidanceConfig,
    GuidanceError,
    check_buckets,
    guidance_is_on,
    parse_curve,
)
from sglang.multimodal_gen.guidance_buckets.graph_flags import (
    GRAPH_ARGUMENTS,
    add_graph_flags,
    graph_config,
)
from sglang.multimodal_gen.guidance_buckets.wiring import require_hooks

# argument name -> attribute of GuidanceConfig
_ARGUMENTS = {
    "guidance_buckets": "buckets",
    "guidance_curve": "curve",
    "guidance_bucket_mode": "bucket_mode",
    "guidance_rows": "rows",
    "max_running_samples": "max_running_samples",
    "max_rows": "max_rows",
    "schedule_trace": "schedule_trace",
}


# --- flags --------------------------------------------------------------------------------------


def add_flags(_parser: Any, parser: argparse.ArgumentParser) -> None:
    """AFTER ServerArgs.add_cli_args. The defaults are None: only what a user gives is passed on."""
    group = parser.add_argument_group("guidance buckets")
    group.add_argument(
        "--guidance-buckets",
        type=_bucket_count,
        metavar="N",
        help="Cut each request's guidance curve into N buckets of denoising steps and skip the "
        f"forwards that a scale of 1 or 0 makes needless. 0 (default) to {MAX_BUCKETS}; 0 is off.",
    )
    group.add_argument(
        "--guidance-curve",
        type=_curve,
        metavar="CURVE",
        help=f"Curve of requests that name none (default: constant): {CURVE_HELP}.",
    )
    group.add_argument(
        "--guidance-bucket-mode",
        choices=BUCKET_MODES,
        help="Inside a bucket the scale is constant (default) or runs linearly.",
    )
    group.add_argument(
        "--guidance-rows",
        choices=ROW_MODES,
        help="Run both branches of a step as one packed forward, as split forwards, or packed "
        "where it costs nothing (auto, default).",
    )
    group.add_argument(
        "--max-running-samples",
        type=int,
        metavar="N",
        help="Continuous batching: up to N requests advance step by step, sharing forwards "
        f"(default: {DEFAULT_RUNNING_SAMPLES}; 0 with --batching-max-size or --batching-delay-ms). "
        "0 runs one request at a time, as upstream.",
    )
    group.add_argument(
        "--max-rows",
        type=int,
        metavar="N",
        help="Most DiT rows of one shared step (default: 16).",
    )
    group.add_argument(
        "--schedule-trace",
        metavar="FILE",
        help="Write what the step loop does when, in the Chrome trace format.",
    )
    add_graph_flags(group)


def _bucket_count(text: str) -> int:
    try:
        buckets = check_buckets(int(text), field="--guidance-buckets", lowest=0)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"wanted a whole number from 0 to {MAX_BUCKETS}, got {text!r}"
        ) from None
    if buckets:
        require_hooks()  # here too: the hook that reads this flag may be the one that is missing
    return buckets


def _curve(text: str) -> str:
    try:
        parse_curve(text, field="not a curve")
    except GuidanceError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def from_dict(original, cls, kwargs: dict[str, Any]):
    """AROUND ServerArgs.from_dict, for flags and config file: upstream drops unknown keys."""
    given, rest = _split(kwargs)
    server_args = original(cls, rest)
    try:
        return _with_guidance(server_args, given)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def from_kwargs(original, cls, **kwargs: Any):
    """AROUND ServerArgs.from_kwargs: upstream raises on keys that it does not know."""
    given, rest = _split(kwargs)
    return _with_guidance(original(cls, **rest), given)


def _split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our arguments, those that were given, and everything else."""
    ours = _ARGUMENTS | GRAPH_ARGUMENTS
    given = {name: kwargs[name] for name in ours if kwargs.get(name) is not None}
    return given, {name: value for name, value in kwargs.items() if name not in ours}


def guidance_arguments(server_args: Any) -> dict[str, Any]:
    """The keywords that make `from_kwargs` set the same values again."""
    if not guidance_is_on(server_args):
        return {}
    graphs = {name: getattr(server_args.bucket_graphs, a) for name, a in GRAPH_ARGUMENTS.items()}
    return {name: getattr(server_args, name) for name in _ARGUMENTS} | graphs


def _with_guidance(server_args: Any, given: dict[str, Any]):
    """Set every attribute of `_ARGUMENTS` on `server_args`, checked."""
    if isinstance(given.get("guidance_curve"), list):  # from a config file
        given["guidance_curve"] = json.dumps(given["guidance_curve"])
    if given.get("guidance_buckets") and "max_running_samples" not in given:
        merges = server_args.batching_max_size > 1 or server_args.batching_delay_ms > 0
        given["max_running_samples"] = 0 if merges else DEFAULT_RUNNING_SAMPLES
    config = GuidanceConfig(
        **{_ARGUMENTS[name]: value for name, value in given.items() if name in _ARGUMENTS}
    )
    server_args.bucket_graphs = graph_config(given)
    for name, value in zip(_ARGUMENTS, asdict(config).values()):
        setattr(server_args, name, value)
    if config.buckets:
        from sglang.multimodal_gen.runtime.guidance.support import check_server_args

        require_hooks()
        check_server_args(server_args)
        if server_args.bucket_graphs.mode in ("full", "breakable"):
            from sglang.multimodal_gen.runtime.bucket_cuda_graph.build import check_settings

            check_settings(server_args)
        if not config.max_running_samples:
            loop_flags = ("max_rows", "schedule_trace")
            _refuse_idle(given, loop_flags, "--max-running-samples", "1 or more")
        else:
            server_args.async_output_save = True  # saving must not stall the others
    else:
        names = tuple(name for name in given if name != "guidance_buckets")
        _refuse_idle(given, names, "--guidance-buckets", f"1 to {MAX_BUCKETS}")
    return server_args


def _refuse_idle(given: dict[str, Any], names: tuple[str, ...], needs: str, wanted: str) -> None:
    """No flag is accepted and ignored: raise for one that does nothing while `needs` is 0."""
    for name in names:
        if name in given:
            flag = "--" + name.replace("_", "-")
            raise GuidanceError(needs, 0, f"{wanted} where {flag} is given")


# --- workers ------------------------------------------------------------------------------------


def bucketize_pipeline(pipeline: Any, server_args: Any) -> None:
    """AFTER build_pipeline. Raises GuidanceUnsupported for a pipeline that cannot obey plans."""
    if not guidance_is_on(server_args):
        return
    from sglang.multimodal_gen.runtime.guidance.support import check_stepwise, denoising_stages
    from sglang.multimodal_gen.runtime.pipelines_core.stages.bucketized_denoising import (
        BucketizedDenoisingMixin,
        bucketize_stage,
    )

    stages = denoising_stages(pipeline)
    mixin = BucketizedDenoisingMixin
    if server_args.max_running_samples:
        from sglang.multimodal_gen.runtime.pipelines_core.stages.stepwise_denoising import (
            StepwiseDenoisingMixin as mixin,
        )

        check_stepwise(stages)
    for stage in stages:
        bucketize_stage(stage, mixin)


def capture_bucket_graphs(_result: None, worker: Any) -> None:
    """AFTER GPUWorker.init_device_and_model, so before the server is ready."""
    if not guidance_is_on(worker.server_args):
        return
    from sglang.multimodal_gen.runtime.bucket_cuda_graph.build import build_bucket_graphs
    from sglang.multimodal_gen.runtime.pipelines_core.stages.bucketized_denoising import (
        bucketized_stages,
    )

    for stage in bucketized_stages(worker.pipeline):
        stage.graphs = build_bucket_graphs(stage, worker.server_args)


# Control requests that leave the weights where and what they are.
_HARMLESS_REQUESTS = (
    "ListLorasReq",
    "GetWeightsChecksumReqInput",
    "GetDisaggStatsReq",
    "ReleaseRealtimeSessionReq",
    "ShutdownReq",
)


def drop_bucket_graphs(scheduler: Any, req_or_group: Any) -> None:
    """BEFORE Scheduler._dispatch_single_request: LoRA, weight updates, sleep; failed ones too."""
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
    from sglang.multimodal_gen.runtime.pipelines_core.stages.bucketized_denoising import (
        bucketized_stages,
    )

    name = type(req_or_group).__name__
    if not guidance_is_on(scheduler.server_args) or isinstance(req_or_group, (Req, list)):
        return
    for stage in bucketized_stages(scheduler.worker.pipeline):
        if stage.graphs is not None and name not in _HARMLESS_REQUESTS:
            stage.graphs.drop(name)


def run_event_loop(original, scheduler: Any) -> None:
    """AROUND Scheduler.event_loop."""
    if not getattr(scheduler.server_args, "max_running_samples", 0):
        return original(scheduler)
    from sglang.multimodal_gen.runtime.disaggregation.roles import RoleType

    if scheduler.server_args.disagg_role == RoleType.DENOISER:
        from sglang.multimodal_gen.runtime.managers.bucket_denoiser import BucketDenoiser as Loop
    else:
        from sglang.multimodal_gen.runtime.managers.bucket_scheduler import BucketScheduler as Loop
    return Loop(scheduler).event_loop()


def plan_received_requests(items: list, identity: bytes, reqs: Any) -> None:
    """AFTER Scheduler._normalize_received_payload, which runs on rank 0 before the broadcast."""
    from sglang.multimodal_gen.runtime.guidance.requests import attach_plan
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    server_args = get_global_server_args()
    if not guidance_is_on(server_args):
        return
    for _, item in items:
        for req in item if isinstance(item, list) else [item]:
            if isinstance(req, Req):
                attach_plan(req, server_args)


def sign_guidance(signature: tuple | None, scheduler: Any, req: Any) -> tuple | None:
    """AFTER Scheduler._build_dynamic_batch_signature."""
    from sglang.multimodal_gen.runtime.guidance.plan import OPTIONS_KEY

    if signature is None or OPTIONS_KEY not in req.extra:
        return None  # leaves the result as it is
    return signature + ((OPTIONS_KEY, json.dumps(req.extra[OPTIONS_KEY], sort_keys=True)),)


def add_forward_counter(metrics: Any, server_args: Any, *_args, **_kwargs) -> None:
    """AFTER init_metrics, on replica leaders of a server with --enable-metrics."""
    if metrics is None or not guidance_is_on(server_args):
        return
    from prometheus_client import Counter

    counter = Counter(
        "sglang:diffusion_guidance_forwards_total",
        "DiT rows run for answered requests, by classifier-free guidance branch.",
        ("role", "replica", "branch"),
    )
    metrics.guidance_forwards = lambda branch: counter.labels(*metrics._labels, branch)
