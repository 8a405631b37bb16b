# SPDX-License-Identifier: Apache-2.0
"""Hooks in the workers: the pipeline's stages, bucket graphs, the loop, plans, metrics."""

import json
from typing import Any

from sglang.multimodal_gen.configs.guidance import guidance_is_on
from sglang.multimodal_gen.guidance_buckets import prior_hooks


def complete_app(app: Any, server_args: Any, *_args, **_kwargs) -> None:
    """AFTER create_app, in the process that answers HTTP."""
    prior_hooks.watch_ar_server(app, server_args)
    if guidance_is_on(server_args):
        from PIL import Image

        from sglang.multimodal_gen.guidance_buckets import response_hooks  # noqa: F401

        # SGLang's warm-up requests do not come this way: the first answer would load these
        Image.preinit()


def bucketize_pipeline(pipeline: Any, server_args: Any) -> None:
    """AFTER build_pipeline. Raises GuidanceUnsupported for a pipeline that cannot obey plans."""
    prior_hooks.attach_service(pipeline, server_args)
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
    if server_args.guidance_trace is not None:
        from sglang.multimodal_gen.runtime.guidance.inside import (
            TracedDenoisingMixin,
            trace_decoding,
        )

        mixin = type(f"Traced{mixin.__name__}", (TracedDenoisingMixin, mixin), {})
        trace_decoding(pipeline)
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
    "dict",  # a client's ping
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
    for _, item in items:
        for req in item if isinstance(item, list) else [item]:
            if isinstance(req, Req):
                if guidance_is_on(server_args):
                    attach_plan(req, server_args)
                prior_hooks.fetch_early(req)


def sign_guidance(signature: tuple | None, scheduler: Any, req: Any) -> tuple | None:
    """AFTER Scheduler._build_dynamic_batch_signature."""
    from sglang.multimodal_gen.runtime.guidance.plan import OPTIONS_KEY

    options = req.extra.get(OPTIONS_KEY)
    if signature is None or options is None:
        return None  # leaves the result as it is
    if options["trace"]:
        signature += (id(req),)  # merged, requests would share one trace
    return signature + ((OPTIONS_KEY, json.dumps(options, sort_keys=True)),)


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
