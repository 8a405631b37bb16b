# SPDX-License-Identifier: Apache-2.0
"""From a request's fields to its options, and from those to its plan."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sglang.multimodal_gen.configs.guidance import (
    REQUEST_FIELDS,
    GuidanceConfig,
    GuidanceOptions,
    resolve_options,
)
from sglang.multimodal_gen.configs.guidance_curves import GuidanceError, check_steps
from sglang.multimodal_gen.runtime.guidance.plan import (
    OPTIONS_KEY,
    PLAN_KEY,
    REFUSAL_KEY,
    BucketPlan,
)
from sglang.multimodal_gen.runtime.guidance.support import check_request
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

logger = init_logger(__name__)

_LOWEST_SEED, _HIGHEST_SEED = -(2**63), 2**64 - 1  # of torch.Generator

# where upstream keeps the step count of the request that a warm-up stands for
_WARMED_STEPS_KEY = "cache_dit_num_inference_steps"


def server_guidance(server_args: Any) -> GuidanceConfig:
    """The server's settings; all off where the flags never reached `server_args`."""
    return GuidanceConfig(
        buckets=getattr(server_args, "guidance_buckets", 0),
        curve=getattr(server_args, "guidance_curve", "constant"),
        bucket_mode=getattr(server_args, "guidance_bucket_mode", "constant"),
        rows=getattr(server_args, "guidance_rows", "auto"),
        trace=getattr(server_args, "guidance_trace", None),
    )


def request_options(
    sampling_params: Any, server_args: Any, fields: Mapping[str, Any]
) -> GuidanceOptions | None:
    """Validate a request's guidance and resolve it; None on a server without guidance buckets.

    Args:
        sampling_params: complete, its step count final.
        fields: the guidance fields that the request names.

    Raises:
        GuidanceError: for anything that cannot be honoured. The API answers 400 with its text.
    """
    options = _resolve(sampling_params, server_args, fields)
    if not server_guidance(server_args).buckets:
        return None
    check_steps(sampling_params.num_inference_steps)
    _check_seeds(sampling_params, server_args)
    check_request(
        sampling_params,
        names_guidance=any(fields.get(name) is not None for name in REQUEST_FIELDS),
        scales=options.schedule(sampling_params.num_inference_steps).scales,
    )
    return options


def _check_seeds(sampling_params: Any, server_args: Any) -> None:
    """Refuse what fails where a request's images part, or is cut to their number elsewhere."""
    seed, images = sampling_params.seed, sampling_params.num_outputs_per_prompt
    given = [one for one in (seed if isinstance(seed, list) else [seed]) if isinstance(one, int)]
    if any(not _LOWEST_SEED <= one <= _HIGHEST_SEED - ((images or 1) - 1) for one in given):
        raise GuidanceError("seed", seed, f"from {_LOWEST_SEED} to {_HIGHEST_SEED} for each image")
    files = (sampling_params.prompt_path, getattr(server_args, "prompt_file_path", None))
    if isinstance(sampling_params.prompt, list) or any(files):
        return  # several prompts of a DiffGenerator may share a list, and it counts for itself
    if isinstance(seed, list) and len(seed) != images:
        raise GuidanceError("seed", seed, f"{images} in a list, one an image")


def _resolve(
    sampling_params: Any, server_args: Any, fields: Mapping[str, Any]
) -> GuidanceOptions:
    scale = server_args.pipeline_config.get_classifier_free_guidance_scale(
        sampling_params, sampling_params.guidance_scale
    )
    # the very object tells which one the model takes: both may have the same value
    uses_true_cfg = scale is sampling_params.true_cfg_scale and scale is not None
    scale_field = "true_cfg_scale" if uses_true_cfg else "guidance_scale"
    uses_cfg = sampling_params.should_use_classifier_free_guidance()
    return resolve_options(
        fields,
        server_guidance(server_args),
        scale=scale,
        scale_is_named=scale_field in getattr(sampling_params, "_explicit_fields", ()),
        plain_cfg_scale=scale if uses_cfg else 1.0,
    )


def attach_options(req: Any, options: GuidanceOptions) -> None:
    """Put the options where they travel, and ask for an uncond branch where a step needs it."""
    req.extra[OPTIONS_KEY] = options.to_dict()
    schedule = options.schedule(req.num_inference_steps)
    # a trace shows the uncond branch where the request could have one
    shows_uncond = options.trace and req.negative_prompt is not None
    req.do_classifier_free_guidance = shows_uncond or any(scale != 1 for scale in schedule.scales)


def attach_plan(req: Any, server_args: Any) -> None:
    """Make the request's plan. On rank 0, before the request is broadcast to the others.

    Requests that no API built carry no options yet and get the server's: warm-up, and those of a
    client whose process knows nothing of guidance buckets.
    """
    try:
        if OPTIONS_KEY not in req.extra:
            warms_up = req.is_warmup or req.extra.get("server_internal_prewarm")
            options = _warmup_options if warms_up else _server_options
            attach_options(req, options(req, server_args))
        _make_plan(req)
    except Exception as error:  # raised from here it would lose the request, and its answer
        logger.error("No guidance plan for request %s", req.request_id, exc_info=True)
        req.extra[REFUSAL_KEY] = str(error)


def _server_options(req: Any, server_args: Any) -> GuidanceOptions:
    return request_options(req.sampling_params, server_args, {})


def _warmup_options(req: Any, server_args: Any) -> GuidanceOptions:
    """The server's as far as a warm-up can have them: it is not refused for what they are."""
    options = _resolve(req.sampling_params, server_args, {})
    if req.negative_prompt is None:
        return replace(options, curve="constant", scale=1.0)
    return _fit_warmup(req, options)


def _fit_warmup(req: Any, options: GuidanceOptions) -> GuidanceOptions:
    steps = req.num_inference_steps
    return options.for_warmup(steps, req.extra.get(_WARMED_STEPS_KEY, steps))


def replan_as_warmup(req: Any) -> None:
    """A warm-up copy has fewer steps than the request that it was copied from."""
    attach_options(req, _fit_warmup(req, GuidanceOptions(**req.extra[OPTIONS_KEY])))
    _make_plan(req)


def _make_plan(req: Any) -> None:
    options = GuidanceOptions(**req.extra[OPTIONS_KEY])
    plan = BucketPlan.for_request(
        str(req.request_id),
        max(1, int(req.num_outputs_per_prompt or 1)),
        options.schedule(req.num_inference_steps),
    )
    req.extra[PLAN_KEY] = plan.to_dict()
