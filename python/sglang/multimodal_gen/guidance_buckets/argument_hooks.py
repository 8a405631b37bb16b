# SPDX-License-Identifier: Apache-2.0
"""Hooks at start-up: flags, config file and Python keywords, checked once."""

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

from sglang.multimodal_gen.configs import glm_image_prior as prior
from sglang.multimodal_gen.configs.guidance import (
    DEFAULT_RUNNING_SAMPLES,
    ROW_MODES,
    GuidanceConfig,
    guidance_is_on,
)
from sglang.multimodal_gen.configs.guidance_curves import (
    BUCKET_MODES,
    CURVE_HELP,
    MAX_BUCKETS,
    GuidanceError,
    check_buckets,
    parse_curve,
)
from sglang.multimodal_gen.guidance_buckets.graph_flags import (
    GRAPH_ARGUMENTS,
    add_graph_flags,
    graph_arguments,
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
    "guidance_trace": "trace",
}
_GUIDANCE = _ARGUMENTS | GRAPH_ARGUMENTS  # all that need --guidance-buckets


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
        f"(default: {DEFAULT_RUNNING_SAMPLES}; 0 with --batching-max-size or --batching-delay-ms, "
        "or where the DiT is offloaded). 0 runs one request at a time, as upstream.",
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
    group.add_argument(
        "--guidance-trace",
        metavar="DIR",
        help="Let a request say guidance_trace: true and write into DIR what each of its steps did "
        "beside what its cond branch and its uncond branch alone would have done.",
    )
    add_graph_flags(group)
    prior.add_arguments(parser)


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
    ours, rest = _split(kwargs)
    # upstream's flag has another name than its field, so its value is lost
    if "srt_encoder_connection_timeout" in rest:
        ours["connection_timeout"] = rest["srt_encoder_connection_timeout"]
    server_args = original(cls, rest)
    try:
        return _with_ours(server_args, ours)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def from_kwargs(original, cls, **kwargs: Any):
    """AROUND ServerArgs.from_kwargs: upstream raises on keys that it does not know."""
    ours, rest = _split(kwargs)
    return _with_ours(original(cls, **rest), ours)


def _split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our arguments, those that were given, and everything else."""
    names = _GUIDANCE.keys() | prior.NEW_ARGUMENTS.keys()
    given = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
    return given, {name: value for name, value in kwargs.items() if name not in names}


def our_arguments(server_args: Any) -> dict[str, Any]:
    """The keywords that make `from_kwargs` set the same values again."""
    arguments = prior.prior_arguments(server_args)
    if guidance_is_on(server_args):
        given = {name: getattr(server_args, name) for name in _ARGUMENTS}
        given |= graph_arguments(server_args.bucket_graphs)
        if not server_args.max_running_samples:
            del given["max_rows"], given["schedule_trace"]  # refused where they do nothing
        arguments |= given
    return arguments


def _with_ours(server_args: Any, ours: dict[str, Any]):
    guidance = {name: ours[name] for name in _GUIDANCE if name in ours}
    server_args = _with_guidance(server_args, guidance)
    given = {name: ours[name] for name in prior.NEW_ARGUMENTS if name in ours}
    server_args.prior_config = None
    if given or guidance_is_on(server_args):
        if "connection_timeout" in ours:
            server_args.srt_encoder_connect_timeout = ours["connection_timeout"]
        server_args.prior_config = prior.make_prior_config(server_args, given)
    return server_args


def _with_guidance(server_args: Any, given: dict[str, Any]):
    """Set every attribute of `_ARGUMENTS` on `server_args`, checked."""
    if isinstance(given.get("guidance_curve"), list):  # from a config file
        given["guidance_curve"] = json.dumps(given["guidance_curve"])
    if given.get("guidance_buckets") and "max_running_samples" not in given:
        from sglang.multimodal_gen.runtime.guidance.support import loop_obstacles

        steps = not loop_obstacles(server_args)
        given["max_running_samples"] = DEFAULT_RUNNING_SAMPLES if steps else 0
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
        if config.trace is not None:
            _make_folder(config.trace)
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


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise GuidanceError("--guidance-trace", path, "a folder that can be written")


def _refuse_idle(given: dict[str, Any], names: tuple[str, ...], needs: str, wanted: str) -> None:
    """No flag is accepted and ignored: raise for one that does nothing while `needs` is 0."""
    for name in names:
        if name in given:
            flag = "--" + name.replace("_", "-")
            raise GuidanceError(needs, 0, f"{wanted} where {flag} is given")
