# SPDX-License-Identifier: Apache-2.0
"""Guidance settings of a server and options of a request, with their validation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang.multimodal_gen.configs.guidance_curves import (
    GuidanceError,
    GuidanceSchedule,
    branches_of,
    check_bucket_mode,
    check_buckets,
    make_schedule,
    parse_curve,
)

DEFAULT_RUNNING_SAMPLES = 8
ROW_MODES = ("auto", "packed", "split")
REQUEST_FIELDS = ("guidance_curve", "guidance_buckets", "guidance_bucket_mode", "guidance_trace")


@dataclass(frozen=True, kw_only=True)
class GuidanceConfig:
    """The server's own settings, one for each flag of this project.

    Attributes:
        buckets: ``--guidance-buckets``; 0 turns everything here off.
        curve: ``--guidance-curve``, for requests that name none.
        bucket_mode: ``--guidance-bucket-mode``, one of `BUCKET_MODES`.
        rows: ``--guidance-rows``, one of `ROW_MODES`.
        max_running_samples: ``--max-running-samples``; 0 keeps upstream's loop.
        max_rows: ``--max-rows``, DiT rows of one shared step.
        schedule_trace: ``--schedule-trace``, a file for what the step loop does when.
        trace: ``--guidance-trace``, a folder for the traces that requests ask for.
    """

    buckets: int = 0
    curve: str | tuple[float, ...] = "constant"
    bucket_mode: str = "constant"
    rows: str = "auto"
    max_running_samples: int = 0
    max_rows: int = 16
    schedule_trace: str | None = None
    trace: str | None = None

    def __post_init__(self):
        check_buckets(self.buckets, field="--guidance-buckets", lowest=0)
        parse_curve(self.curve, field="--guidance-curve")
        check_bucket_mode(self.bucket_mode, field="--guidance-bucket-mode")
        if self.rows not in ROW_MODES:
            raise GuidanceError("--guidance-rows", self.rows, " or ".join(ROW_MODES))
        _check_count(self.max_running_samples, "--max-running-samples", lowest=0)
        _check_count(self.max_rows, "--max-rows", lowest=2)


def guidance_is_on(server_args: Any) -> bool:
    """Whether the server runs guidance buckets; False where its flags never came into play."""
    return bool(getattr(server_args, "guidance_buckets", 0))


@dataclass(frozen=True, kw_only=True)
class GuidanceOptions:
    """What one request runs with, everything resolved.

    Attributes:
        curve: text or a list of numbers, as the response shows it.
        buckets: 1 to `MAX_BUCKETS`.
        bucket_mode: one of `BUCKET_MODES`.
        scale: the request's own scale, which a curve without numbers follows.
        trace: whether each step is shown beside its branches.
    """

    curve: str | list[float]
    buckets: int
    bucket_mode: str
    scale: float
    trace: bool = False

    def schedule(self, num_steps: int) -> GuidanceSchedule:
        """Bucket and scale of each of `num_steps` steps.

        Raises:
            GuidanceError: where the curve is a list of another length.
        """
        return make_schedule(
            parse_curve(self.curve),
            num_steps,
            buckets=self.buckets,
            mode=self.bucket_mode,
            scale=self.scale,
        )

    def for_warmup(self, warmup_steps: int, warmed_steps: int) -> "GuidanceOptions":
        """The same options for a warm-up, which must run the branches that a request will.

        A list of another length, and a curve that would not be guided at so few steps, become a
        constant at their highest guided scale.

        Args:
            warmup_steps: of the warm-up.
            warmed_steps: of the request that it stands for.
        """
        curve = parse_curve(self.curve)
        guided = self._guided_scales(curve.num_steps or warmed_steps)
        fits = curve.num_steps in (None, warmup_steps)
        if fits and (self._guided_scales(warmup_steps) or not guided):
            return self
        return replace(self, curve="constant", scale=max(guided, default=1.0))

    def _guided_scales(self, num_steps: int) -> list[float]:
        scales = self.schedule(num_steps).scales
        return [scale for scale in scales if len(branches_of(scale)) == 2]

    def to_dict(self) -> dict[str, Any]:
        return {
            "curve": self.curve,
            "buckets": self.buckets,
            "bucket_mode": self.bucket_mode,
            "scale": self.scale,
            "trace": self.trace,
        }


def _check_count(value: Any, field: str, *, lowest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise GuidanceError(field, value, f"a whole number from {lowest}")


def resolve_options(
    fields: Mapping[str, Any],
    config: GuidanceConfig,
    *,
    scale: float,
    scale_is_named: bool,
    plain_cfg_scale: float,
) -> GuidanceOptions:
    """What a request runs with, from its own fields and the server's defaults.

    Args:
        fields: those of `REQUEST_FIELDS` that the request names; None counts as not named.
        config: the server's settings.
        scale: the request's ``true_cfg_scale`` where the model uses one, else its
            ``guidance_scale``.
        scale_is_named: whether the request gave that scale itself. Then a default curve with
            numbers of its own steps aside for a constant at that scale.
        plain_cfg_scale: the effective scale of plain classifier-free guidance: `scale`, or 1
            where upstream runs no uncond branch (a scale up to 1, no negative prompt). A request
            that names no curve, on a server whose default is ``constant``, gets what it would get
            without this project.

    Raises:
        GuidanceError: for a field that is wrong, or any field while guidance buckets are off.
    """
    named = {name: fields[name] for name in REQUEST_FIELDS if fields.get(name) is not None}
    if named and not config.buckets:
        name, value = next(iter(named.items()))
        wanted = "no guidance field: start the server with --guidance-buckets N to use it"
        raise GuidanceError(name, value, wanted)
    curve = parse_curve(config.curve, field="--guidance-curve")
    if "guidance_curve" in named:
        curve = parse_curve(named["guidance_curve"])
    elif curve.has_numbers and scale_is_named:
        curve = parse_curve("constant")
    if "guidance_curve" not in named and curve.spec == "constant":
        scale = plain_cfg_scale
    return GuidanceOptions(
        curve=curve.spec,
        buckets=check_buckets(named.get("guidance_buckets", config.buckets)),
        bucket_mode=check_bucket_mode(named.get("guidance_bucket_mode", config.bucket_mode)),
        scale=scale,
        trace=_check_trace(named.get("guidance_trace", False), config),
    )


def _check_trace(value: Any, config: GuidanceConfig) -> bool:
    if not isinstance(value, bool):
        raise GuidanceError("guidance_trace", value, "true or false")
    if value and config.trace is None:
        raise GuidanceError(
            "guidance_trace", value, "false: this server was started without --guidance-trace DIR"
        )
    return value
