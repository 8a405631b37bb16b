# SPDX-License-Identifier: Apache-2.0
"""Hooks of the disaggregated roles: a head and denoisers, GLM-Image's AR on a server beside them.

The head validates a request and its options travel in `Req.extra`; each denoiser plans what it
runs, and its report comes back with the request's metrics.
"""

from typing import Any

from sglang.multimodal_gen.configs.guidance import guidance_is_on
from sglang.multimodal_gen.guidance_buckets.server_hooks import our_arguments


def keep_our_arguments(original, server_args: Any, role_type: Any, **overrides: Any):
    """AROUND ServerArgs.for_disagg_role, which copies dataclass fields only."""
    return original(server_args, role_type, **our_arguments(server_args), **overrides)


def plan_relayed_request(req: Any, scheduler: Any, *_args, **_kwargs) -> None:
    """AFTER SchedulerDisaggMixin._build_disagg_req, which sets a request's CFG by its scale alone.

    It runs on rank 0 where the request arrives, and on the others with the plan that rank 0 made.
    """
    from sglang.multimodal_gen.configs.guidance import GuidanceOptions
    from sglang.multimodal_gen.runtime.guidance.plan import OPTIONS_KEY, PLAN_KEY
    from sglang.multimodal_gen.runtime.guidance.requests import attach_options, attach_plan

    if "warnings" in req.extra:
        req.metrics.warnings = req.extra["warnings"]
    if not guidance_is_on(scheduler.server_args):
        return
    if OPTIONS_KEY in req.extra:
        attach_options(req, GuidanceOptions(**req.extra[OPTIONS_KEY]))
    if PLAN_KEY not in req.extra:
        attach_plan(req, scheduler.server_args)


def restore_report(metrics: Any, data: dict[str, Any] | None) -> None:
    """AFTER orchestrator._deserialize_request_metrics, the other half of `report_in_metrics`."""
    if metrics is not None:
        metrics.guidance = data.get("guidance")
        metrics.warnings = data.get("warnings")


def supply_cpu_streams(*_args, **_kwargs) -> None:
    """BEFORE SchedulerDisaggMixin._init_disagg_state."""
    from sglang.multimodal_gen.runtime.disaggregation.cpu_streams import use_cpu_streams

    use_cpu_streams()
