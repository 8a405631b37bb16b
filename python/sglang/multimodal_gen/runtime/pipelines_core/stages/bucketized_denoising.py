# SPDX-License-Identifier: Apache-2.0
"""A denoising stage that obeys a bucket plan: each step at its own scale, with its own rows."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang.multimodal_gen.configs.guidance_curves import (
    COND_BRANCH,
    UNCOND_BRANCH,
    GuidanceSchedule,
    branches_of,
)
from sglang.multimodal_gen.runtime.bucket_cuda_graph import (
    BucketGraphs,
    GraphSample,
    publish_graphs,
)
from sglang.multimodal_gen.runtime.distributed.cfg_parallel_utils import run_cfg_parallel
from sglang.multimodal_gen.runtime.distributed.cfg_policy import CFGBranch, CFGPolicy
from sglang.multimodal_gen.runtime.distributed.parallel_state import (
    get_classifier_free_guidance_rank,
    get_replica_group,
)
from sglang.multimodal_gen.runtime.guidance.agreement import agree_on_plan
from sglang.multimodal_gen.runtime.guidance.combine import combine, is_plain
from sglang.multimodal_gen.runtime.guidance.plan import (
    OPTIONS_KEY,
    PLAN_KEY,
    REFUSAL_KEY,
    BucketPlan,
)
from sglang.multimodal_gen.runtime.guidance.report import (
    RowCounter,
    build_report,
    publish_report,
)
from sglang.multimodal_gen.runtime.guidance.rows import (
    PackedRows,
    RowAdapter,
    build_row_adapter,
    rows_pack,
)
from sglang.multimodal_gen.runtime.guidance.support import unrouted
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import (
    DenoisingContext,
    DenoisingStage,
    DenoisingStepState,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

logger = init_logger(__name__)

RUN_KEY = "guided_run"  # in DenoisingContext.extra


@dataclass
class GuidedRun:
    """One request's way through its plan.

    Attributes:
        packed: both branches' conditioning; None: one forward a branch.
        in_graphs: whether its steps may replay bucket graphs.
        serial: no other run ever has it.
    """

    schedule: GuidanceSchedule
    packed: PackedRows | None
    in_graphs: bool = False
    serial: int = field(default_factory=itertools.count().__next__)
    counter: RowCounter = field(default_factory=RowCounter)


class BucketizedDenoisingMixin:
    """Overrides what a step predicts; loop, sampler and everything else stay the stage's own.

    Mixed in by `bucketize_stage`, before a class that inherits `DenoisingStage`'s loop.
    """

    row_adapter: RowAdapter | None = None
    graphs: BucketGraphs | None = None  # set when the model is loaded, where there are any
    _run: GuidedRun | None = None  # of the request whose step runs now

    def _before_denoising_loop(
        self, ctx: DenoisingContext, batch: Req, server_args: ServerArgs
    ) -> None:
        # what dynamic batching merged must be the same on every rank, as well as the plan
        acts_on = (str(batch.request_id), tuple(ctx.latents.shape))
        plan, refusal = None, None
        # a rank that cannot go on says so below: the others would wait for it
        try:
            if REFUSAL_KEY in batch.extra:
                raise RuntimeError(batch.extra[REFUSAL_KEY])
            plan = BucketPlan.from_dict(batch.extra[PLAN_KEY])
            refusal = _plan_refusal(plan, ctx)
            super()._before_denoising_loop(ctx, batch, server_args)
            if self.row_adapter is not None:
                for branch in ctx.cfg_policy.branches:
                    branch.kwargs.update(
                        self.row_adapter.for_images(branch.kwargs, len(ctx.latents))
                    )
            sample = plan.samples[0]
            ctx.extra[RUN_KEY] = GuidedRun(
                schedule=GuidanceSchedule(bucket_ids=sample.bucket_ids, scales=sample.scales),
                packed=self._pack(ctx, batch, server_args),
                in_graphs=self._in_graphs(ctx, batch),
            )
        except Exception as error:
            logger.error("No step can be run of request %s", batch.request_id, exc_info=True)
            refusal = refusal or repr(error)
        agree_on_plan(plan, acts_on=acts_on, refusal=refusal)

    def _pack(
        self, ctx: DenoisingContext, batch: Req, server_args: ServerArgs
    ) -> PackedRows | None:
        branches = ctx.cfg_policy.branches
        if self.row_adapter is None or len(branches) < 2 or server_args.enable_cfg_parallel:
            return None
        groups = [branch.kwargs for branch in reversed(branches)]  # uncond, then cond
        refusal = self.row_adapter.refusal(groups)
        masked = refusal is None and self.row_adapter.needs_mask(groups)
        if masked and (batch.skip_softmax_params or not self.row_adapter.can_mask):
            refusal = "this attention takes no mask"
        packs = rows_pack(
            server_args.guidance_rows,
            refusal=refusal,
            masked=masked,
            image_tokens=self.row_adapter.image_tokens(ctx.latents, batch.image_latent),
        )
        return self.row_adapter.pack(groups) if packs else None

    def _in_graphs(self, ctx: DenoisingContext, batch: Req) -> bool:
        groups = [branch.kwargs for branch in ctx.cfg_policy.branches]
        return (
            self.graphs is not None
            and batch.image_latent is None
            and batch.attention_backend_override is None
            and not batch.skip_softmax_params
            and self.row_adapter.refusal(groups) is None
        )

    def mount(self, batch: Req) -> None:
        """Put the attention backend and the kernel fusions on the DiT that a request asks for."""
        self._maybe_override_attention_backend(
            batch, force_fa_for_self_attention=bool(batch.skip_softmax_params)
        )
        self._maybe_toggle_quality_fusions(batch)

    def _run_denoising_step(
        self,
        ctx: DenoisingContext,
        step: DenoisingStepState,
        batch: Req,
        server_args: ServerArgs,
    ) -> None:
        self._run = ctx.extra[RUN_KEY]
        try:
            super()._run_denoising_step(ctx, step, batch, server_args)
        finally:
            self._run = None  # it holds the request's conditioning

    def _predict_noise_with_cfg(
        self,
        current_model: torch.nn.Module,
        latent_model_input: torch.Tensor,
        timestep: torch.Tensor,
        batch: Req,
        timestep_index: int,
        attn_metadata: Any,
        target_dtype: torch.dtype,
        current_guidance_scale: float,
        cfg_policy: CFGPolicy,
        cfg_gate_state: dict[str, Any] | None,
        server_args: ServerArgs,
        guidance: torch.Tensor | None,
        latents: torch.Tensor,
    ) -> torch.Tensor:
        """The step's prediction at the plan's scale, ``[images, ...]`` in fp32.

        Upstream's scale (`current_guidance_scale`) and its gating state are not used: a server
        with guidance buckets refuses the options behind them.
        """
        run = self._run
        scale = run.schedule.scales[timestep_index]
        pipeline_config = server_args.pipeline_config

        def forward(kwargs, latents_BX, timestep_B, guidance_B, is_cfg_negative):
            batch.is_cfg_negative = is_cfg_negative
            with set_forward_context(
                current_timestep=timestep_index,
                attn_metadata=attn_metadata,
                forward_batch=batch,
            ):
                return self._predict_noise(
                    current_model=current_model,
                    latent_model_input=latents_BX,
                    timestep=timestep_B,
                    target_dtype=target_dtype,
                    guidance=guidance_B,
                    **kwargs,
                )

        def predict_branch(branch: CFGBranch, *, used: bool = True) -> torch.Tensor:
            if used:
                run.counter.add(_branch_name(branch), len(latents))
            prediction = forward(
                branch.kwargs,
                latent_model_input,
                timestep,
                guidance,
                not branch.is_conditional,
            )
            return pipeline_config.slice_noise_pred(prediction, latents)

        def predict_packed(packed: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
            run.counter.add(COND_BRANCH, len(latents))
            run.counter.add(UNCOND_BRANCH, len(latents))
            with self.row_adapter.attend(packed):
                prediction = forward(
                    packed.kwargs,
                    torch.cat([latent_model_input, latent_model_input]),
                    torch.cat([timestep, timestep]),
                    None if guidance is None else torch.cat([guidance, guidance]),
                    False,
                )
            uncond, cond = prediction.chunk(2)
            return (
                pipeline_config.slice_noise_pred(cond, latents),
                pipeline_config.slice_noise_pred(uncond, latents),
            )

        branches = {_branch_name(branch): branch for branch in cfg_policy.branches}
        needed = branches_of(scale)
        if run.in_graphs and (len(needed) == 1 or run.packed is not None):
            sample = graph_sample(
                run, latent_model_input, timestep, scale, lambda name: branches[name].kwargs
            )
            replayed = self._replay([sample], [batch], pipeline_config)
            if replayed is not None:
                for name in needed:
                    run.counter.add(name, len(latents))
                return replayed[0]
        elif self.graphs is not None:
            self.graphs.count_alone()
        # under CFG parallel a rank without a branch of its own runs one whose output is dropped
        used = not server_args.enable_cfg_parallel or (
            get_classifier_free_guidance_rank() < len(needed)
        )
        if len(needed) == 1:
            return predict_branch(branches[needed[0]], used=used).float()
        if server_args.enable_cfg_parallel:
            cond, uncond = run_cfg_parallel(
                cfg_policy, lambda branch: predict_branch(branch, used=used)
            )
        elif run.packed is not None:
            cond, uncond = predict_packed(run.packed)
        else:
            cond, uncond = map(predict_branch, cfg_policy.branches)
        return combine(cond, uncond, scale, batch, pipeline_config)

    def _replay(
        self, samples: Sequence[GraphSample], batches: Sequence[Req], pipeline_config: Any
    ) -> list[torch.Tensor] | None:
        """Each sample's prediction at its scale, in fp32; None where the step runs eagerly."""
        own_combine = [
            len(sample.branches) == 2 and not is_plain(batch, pipeline_config)
            for sample, batch in zip(samples, batches)
        ]
        predictions = self.graphs.predict(
            samples, batches[0].quality, branches=any(own_combine)
        )
        if predictions is None:
            return None
        return [
            combine(made.cond, made.uncond, sample.scale, batch, pipeline_config)
            if own
            else made.combined
            for made, own, sample, batch in zip(predictions, own_combine, samples, batches)
        ]

    def _finalize_denoising_loop(
        self, ctx: DenoisingContext, batch: Req, server_args: ServerArgs
    ) -> None:
        run: GuidedRun = ctx.extra[RUN_KEY]
        if not (ctx.is_warmup or batch.extra.get("server_internal_prewarm")):
            rows = run.counter.total()
            if get_replica_group().rank_in_group == 0:
                report = build_report(
                    batch.extra[OPTIONS_KEY]["curve"], run.schedule, rows, len(ctx.latents)
                )
                publish_report(batch, report, rows)
                if self.graphs is not None:
                    publish_graphs(self.graphs)
        super()._finalize_denoising_loop(ctx, batch, server_args)


def graph_sample(
    run: GuidedRun,
    latents: torch.Tensor,
    timestep_B: torch.Tensor,
    scale: float,
    kwargs_of: Callable[[str], dict[str, Any]],
) -> GraphSample:
    """A step of one sample, as bucket graphs take it."""
    needed = branches_of(scale)
    branches = [name for name in (UNCOND_BRANCH, COND_BRANCH) if name in needed]
    return GraphSample(
        serial=run.serial,
        latents=latents,
        timestep_B=timestep_B,
        scale=scale,
        branches={name: kwargs_of(name) for name in branches},
    )


def _branch_name(branch: CFGBranch) -> str:
    return COND_BRANCH if branch.is_conditional else UNCOND_BRANCH


def _plan_refusal(plan: BucketPlan, ctx: DenoisingContext) -> str | None:
    if plan.num_steps != len(ctx.timesteps):
        return f"it has {plan.num_steps} steps and the sampler {len(ctx.timesteps)}"
    needed = {branch for scale in plan.samples[0].scales for branch in branches_of(scale)}
    missing = needed - set(map(_branch_name, ctx.cfg_policy.branches))
    if missing:
        return f"the pipeline prepared no {' and no '.join(sorted(missing))} branch"
    return None


def bucketize_stage(
    stage: DenoisingStage,
    mixin: type[BucketizedDenoisingMixin] = BucketizedDenoisingMixin,
) -> None:
    """Make `stage` obey bucket plans, in place: its class gains `mixin`."""
    cls = type(stage)
    stage.__class__ = type(f"Bucketized{cls.__name__}", (mixin, cls), {})
    stage.row_adapter = build_row_adapter(stage.transformer)
    rows = "one forward a branch" if stage.row_adapter is None else "packed rows"
    logger.info("Guidance buckets: %s, %s", cls.__name__, rows)


def bucketized_stages(pipeline: Any) -> list[BucketizedDenoisingMixin]:
    """The stages of a pipeline that obey plans."""
    stages = map(unrouted, pipeline.stages)
    return [stage for stage in stages if isinstance(stage, BucketizedDenoisingMixin)]
