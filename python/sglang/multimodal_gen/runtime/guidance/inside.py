# SPDX-License-Identifier: Apache-2.0
"""Seeing inside a request's guidance: what each step did, beside what either branch would have.

With ``--guidance-trace DIR`` a request may say ``guidance_trace: true``. Beside its own prediction
each of its steps then runs the cond branch and the uncond branch alone. Kept are norms and the
scale that the prediction shows, for every step, and pictures for some: the latents, and where the
prediction, the cond branch (scale 1) and the uncond branch (scale 0) lead. They are decoded small
after the request's own picture, onto one contact sheet.
"""

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sglang.multimodal_gen.configs.guidance_curves import GuidanceSchedule, branches_of
from sglang.multimodal_gen.runtime.distributed.parallel_state import get_replica_group
from sglang.multimodal_gen.runtime.guidance.combine import combine
from sglang.multimodal_gen.runtime.guidance.plan import OPTIONS_KEY
from sglang.multimodal_gen.runtime.guidance.trace_sheet import TracedStep, draw_sheet
from sglang.multimodal_gen.runtime.pipelines_core.diffusion_scheduler_utils import (
    clone_scheduler_runtime,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.bucketized_denoising import RUN_KEY
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger
from sglang.multimodal_gen.runtime.utils.precision import resolve_decode_precision

logger = init_logger(__name__)

MAX_PICTURED_STEPS = 16
MAX_TRACES = 200  # in the folder; older ones go
MAX_LATENT_SIDE = 32  # latents are averaged down to this before they are decoded
_TRACE_KEY = "_guidance_trace"  # in Req.extra; the underscore keeps it from travelling


@dataclass
class GuidanceTrace:
    """One request's trace while it runs. Of several images it follows the first.

    Attributes:
        sampler: the request's own, read only.
        pictured: the steps that get pictures.
        steps: a dict of scalars (tensors on the device, so that no step waits) for each step.
        pictures: [1, ...] latents by step and column.
    """

    schedule: GuidanceSchedule
    sampler: Any
    pictured: frozenset[int]
    steps: list[dict[str, Any]] = field(default_factory=list)
    pictures: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def record(
        self,
        step: int,
        timestep: torch.Tensor,
        latents: torch.Tensor,
        predictions: dict[str, torch.Tensor],
        expected: torch.Tensor | None,
    ) -> None:
        """Note one step.

        Args:
            latents: ``[images, ...]`` that the predictions were made for.
            predictions: ``guided``, ``cond`` and, where the request has that branch, ``uncond``.
            expected: what the two branches combine to, None where there is one.
        """
        guided, cond = predictions["guided"][:1], predictions["cond"][:1]
        row = {
            "step": step,
            "bucket": self.schedule.bucket_ids[step],
            "scale": self.schedule.scales[step],
            "timestep": timestep.flatten()[0],
            "norm_cond": cond.norm(),
            "norm_uncond": None,
            "norm_guided": guided.norm(),
            "shown_scale": None,
            "error": None,
        }
        if expected is not None:
            uncond = predictions["uncond"][:1]
            difference = cond - uncond
            size = difference.norm().clamp(min=1e-12)
            row["norm_uncond"] = uncond.norm()
            row["shown_scale"] = ((guided - uncond) * difference).sum() / size**2
            row["error"] = (guided - expected[:1]).norm() / size
        self.steps.append(row)
        if step in self.pictured:
            self.pictures[step] = {"latents": latents[:1]} | {
                name: self._leads_to(prediction[:1], step, timestep, latents[:1])
                for name, prediction in predictions.items()
            }

    def _leads_to(self, prediction, step: int, timestep, latents) -> torch.Tensor:
        """The clean latents that a flow's velocity points to; else the latents of one step on."""
        sampler = self.sampler
        kind = str(getattr(sampler.config, "prediction_type", "flow_prediction"))
        if "flow" in kind:
            return latents - sampler.sigmas[step].to(latents) * prediction
        return clone_scheduler_runtime(sampler).step(
            model_output=prediction, timestep=timestep, sample=latents, return_dict=False
        )[0]

    def rows(self) -> list[dict[str, Any]]:
        """The steps as plain numbers, rounded to six digits."""
        return [{name: _plain(value) for name, value in step.items()} for step in self.steps]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    return float(f"{value:.6g}") if isinstance(value, float) else value


def pictured_steps(num_steps: int) -> frozenset[int]:
    """At most `MAX_PICTURED_STEPS` of them, evenly spread, the first and the last included."""
    count = min(num_steps, MAX_PICTURED_STEPS)
    if count == 1:
        return frozenset([0])
    return frozenset(i * (num_steps - 1) // (count - 1) for i in range(count))


class TracedDenoisingMixin:
    """Before a bucketized stage's mixin: runs both branches alone for requests that ask for it.

    The request's own prediction is made first and as always, in a shared forward too.
    """

    def _before_denoising_loop(self, ctx: Any, batch: Any, server_args: Any) -> None:
        super()._before_denoising_loop(ctx, batch, server_args)
        if batch.extra[OPTIONS_KEY].get("trace") and not ctx.is_warmup:
            schedule = ctx.extra[RUN_KEY].schedule
            batch.extra[_TRACE_KEY] = GuidanceTrace(
                schedule, ctx.scheduler, pictured_steps(schedule.num_steps)
            )

    def _predict_noise_with_cfg(self, **step: Any) -> torch.Tensor:
        guided = super()._predict_noise_with_cfg(**step)
        trace = step["batch"].extra.get(_TRACE_KEY)
        if trace is not None:
            self._trace_step(trace, guided, step)
        return guided

    def _trace_step(
        self, trace: GuidanceTrace, guided: torch.Tensor, step: dict[str, Any]
    ) -> None:
        index, batch = step["timestep_index"], step["batch"]
        predictions = {"guided": guided}
        for name, scale in (("cond", 1.0), ("uncond", 0.0)):
            if any(b.is_conditional == (name == "cond") for b in step["cfg_policy"].branches):
                predictions[name] = self._predict_at(scale, trace.schedule, step)
        expected = None
        if "uncond" in predictions:
            scale = trace.schedule.scales[index]
            cond, uncond = predictions["cond"], predictions["uncond"]
            expected = {1.0: cond, 0.0: uncond}.get(scale)
            if len(branches_of(scale)) == 2:
                config = step["server_args"].pipeline_config
                expected = combine(cond, uncond, scale, batch, config)
        trace.record(index, step["timestep"], step["latents"], predictions, expected)

    def _predict_at(
        self, scale: float, schedule: GuidanceSchedule, step: dict[str, Any]
    ) -> torch.Tensor:
        """The same step at another scale; what it runs is not counted as the request's."""
        own = self._run
        scales = (scale,) * schedule.num_steps
        other = GuidanceSchedule(bucket_ids=schedule.bucket_ids, scales=scales)
        self._run = type(own)(schedule=other, packed=None)
        try:
            return super()._predict_noise_with_cfg(**step)
        finally:
            self._run = own


class TracedDecodingMixin:
    """Before a decoding stage's class: writes the trace when the picture itself is decoded."""

    @torch.no_grad()
    def forward(self, batch: Any, server_args: Any) -> Any:
        output = super().forward(batch, server_args)
        trace = batch.extra.pop(_TRACE_KEY, None)
        if trace is None:
            return output
        try:
            rows, pictured = self._develop(trace, batch, server_args)  # on every rank
            if get_replica_group().rank_in_group == 0:
                self._write(rows, pictured, batch, server_args)
        except Exception as error:  # the picture is fine, and it is what was asked for
            logger.exception("No guidance trace of %s", batch.request_id)
            if getattr(batch.metrics, "guidance", None) is not None:
                batch.metrics.guidance["trace"] = {"error": str(error)}
        return output

    def _develop(self, trace: GuidanceTrace, batch: Any, server_args: Any):
        """The steps as plain numbers, and the pictured ones with their pictures decoded."""
        rows = trace.rows()
        with self.use_declared_component(
            component_name=self.component_name, module=self.vae
        ) as vae:
            self.vae = vae
            pictured = [
                TracedStep(
                    rows[step],
                    {
                        name: self._decode_small(latents, batch, server_args)
                        for name, latents in columns.items()
                    },
                )
                for step, columns in trace.pictures.items()
            ]
        return rows, pictured

    def _write(
        self,
        rows: list[dict[str, Any]],
        pictured: list[TracedStep],
        batch: Any,
        server_args: Any,
    ) -> None:
        report = batch.metrics.guidance
        sheet = _free_path(Path(server_args.guidance_trace), batch.request_id)
        data = sheet.with_suffix(".json")
        draw_sheet(pictured, report["curve"]).save(sheet)
        data.write_text(json.dumps({"curve": report["curve"], "steps": rows}, indent=1) + "\n")
        _keep_newest(sheet.parent)
        report["trace"] = {"sheet": str(sheet), "data": str(data)}
        logger.info("Guidance trace of %s: %s", batch.request_id, sheet)

    def _decode_small(self, latents: torch.Tensor, batch: Any, server_args: Any) -> torch.Tensor:
        """[3, H, W] in 0..1, on the CPU."""
        latents = server_args.pipeline_config.post_denoising_loop(latents, batch)
        factor = -(-max(latents.shape[-2:]) // MAX_LATENT_SIDE)
        if factor > 1:
            small = F.avg_pool2d(latents.reshape(-1, *latents.shape[-3:]).float(), factor)
            latents = small.reshape(*latents.shape[:-2], *small.shape[-2:]).to(latents)
        quality = batch.sampling_params.quality
        dtype = resolve_decode_precision(server_args, self.component_name, quality=quality)
        picture = self.decode(latents, server_args, vae_dtype=dtype)
        return picture.reshape(3, *picture.shape[-2:]).float().cpu()


def _free_path(folder: Path, request_id: Any) -> Path:
    """Where a sheet goes. The prompts of one `sglang generate` have one id, others have none."""
    name = "guidance-" + re.sub(r"[^\w.-]", "_", str(request_id or time.time_ns()))[:128]
    ends = ("", *(f"-{number}" for number in range(2, MAX_TRACES + 2)))
    return next(path for end in ends if not (path := folder / f"{name}{end}.png").exists())


def _keep_newest(folder: Path) -> None:
    """Drop all but the newest `MAX_TRACES` of the traces in `folder`; other files stay."""
    sheets = sorted(folder.glob("guidance-*.png"), key=lambda path: path.stat().st_mtime)
    for sheet in sheets[:-MAX_TRACES]:
        sheet.unlink(missing_ok=True)
        sheet.with_suffix(".json").unlink(missing_ok=True)


def trace_decoding(pipeline: Any) -> None:
    """Make the pipeline's decoding stages write the traces of their requests, in place."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages.decoding import DecodingStage

    for stage in pipeline.stages:
        if isinstance(stage, DecodingStage):
            cls = type(stage)
            stage.__class__ = type(f"Traced{cls.__name__}", (TracedDecodingMixin, cls), {})
