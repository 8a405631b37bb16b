# SPDX-License-Identifier: Apache-2.0
"""Hooks of the disaggregated roles: a head and denoisers, GLM-Image's AR on a server beside them.

The head validates a request and its options travel in `Req.extra`; each denoiser plans what it
runs, and its report comes back with the request's metrics.
"""

import base64
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.configs.glm_image_prior import SOURCE_IMAGES_KEY, prior_config
from sglang.multimodal_gen.configs.guidance import guidance_is_on
from sglang.multimodal_gen.guidance_buckets.argument_hooks import our_arguments


def keep_our_arguments(original, server_args: Any, role_type: Any, **overrides: Any):
    """AROUND ServerArgs.for_disagg_role, which copies the dataclass fields of `server_args` only.

    So precisions would be lost too, which are fields of its pipeline config.
    """
    arguments = our_arguments(server_args)
    role_args = original(server_args, role_type, **arguments, **overrides)
    if arguments:
        role_args.pipeline_config = server_args.pipeline_config
    return role_args


def serve_glm_image(server_args: Any) -> None:
    """BEFORE launch_disagg_server: the class of the head that it makes."""
    config = prior_config(server_args)
    if config is not None and config.url is not None:
        from sglang.multimodal_gen.runtime import launch_server
        from sglang.multimodal_gen.runtime.disaggregation.glm_image_head import GlmImageHead

        launch_server.DiffusionServer = GlmImageHead


def carry_source_images(req: Any, server_args: Any) -> None:
    """After prepare_request, on a head: uploaded files are the head's, denoisers get their bytes.

    Encoded, as they came. Upstream's head refuses requests with an image path.
    """
    if prior_config(server_args) is None or server_args.disagg_role != "server":
        return
    if req.image_path:
        paths = req.image_path if isinstance(req.image_path, list) else [req.image_path]
        req.extra[SOURCE_IMAGES_KEY] = [_data_url(path) for path in paths]
        req.image_path = None


def _data_url(path: str) -> str:
    if path.startswith(("data:", "http://", "https://")):
        return path
    return "data:image/*;base64," + base64.b64encode(Path(path).read_bytes()).decode()


def plan_relayed_request(req: Any, scheduler: Any, *_args, **_kwargs) -> None:
    """AFTER SchedulerDisaggMixin._build_disagg_req, which sets a request's CFG by its scale alone.

    It runs on rank 0 where the request arrives, and on the others with the plan that rank 0 made.
    """
    from sglang.multimodal_gen.configs.guidance import GuidanceOptions
    from sglang.multimodal_gen.runtime.guidance.plan import OPTIONS_KEY, PLAN_KEY
    from sglang.multimodal_gen.runtime.guidance.requests import attach_options, attach_plan

    if SOURCE_IMAGES_KEY in req.extra:
        req.image_path = req.extra[SOURCE_IMAGES_KEY]
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
