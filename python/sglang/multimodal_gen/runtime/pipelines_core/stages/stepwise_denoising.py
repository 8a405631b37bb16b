# SPDX-License-Identifier: Apache-2.0
"""A bucketized denoising stage whose samples advance one step at a time, several in one forward."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm

from sglang.multimodal_gen.configs.bucket_graphs import DEFAULT_MAX_IMAGE_TOKENS
from sglang.multimodal_gen.configs.guidance_curves import COND_BRANCH, UNCOND_BRANCH, branches_of
from sglang.multimodal_gen.runtime.distributed.communication_op import (
    cfg_model_parallel_all_gather,
)
from sglang.multimodal_gen.runtime.distributed.parallel_state import (
    get_classifier_free_guidance_rank,
)
from sglang.multimodal_gen.runtime.guidance.combine import combine
from sglang.multimodal_gen.runtime.guidance.rows import PackedRows, rows_pack
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
from sglang.multimodal_gen.runtime.pipelines_core.diffusion_scheduler_utils import (
    clone_scheduler_runtime,
)
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.bucketized_denoising import (
    RUN_KEY,
    BucketizedDenoisingMixin,
    GuidedRun,
    graph_sample,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import (
    DenoisingContext,
    DenoisingStepState,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.precision import autocast_context

_CFG_PARALLEL_ORDER = (COND_BRANCH, UNCOND_BRANCH)  # the branch of CFG rank 0, of rank 1


@dataclass(eq=False)
class RunningSample:
    """A request between its first and its last step. Its state is its own, the sampler included.

    Attributes:
        share_key: samples of equal keys may share a forward; None shares with nobody.
        most_rows: of a shared step: with more it is limited by arithmetic, and takes that much
            longer. None has no limit.
        progress: reports steps to a client that asked for them.
        step: the next step to run.
        started: when its first step could run, of ``time.monotonic()``.
    """

    batch: Req
    ctx: DenoisingContext
    timesteps_cpu: torch.Tensor
    share_key: tuple | None
    most_rows: int | None
    progress: tqdm
    step: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def run(self) -> GuidedRun:
        return self.ctx.extra[RUN_KEY]

    @property
    def images(self) -> int:
        return len(self.ctx.latents)

    @property
    def scale(self) -> float:
        return self.run.schedule.scales[self.step]

    @property
    def rows(self) -> int:
        """Rows of its next step."""
        return self.images * len(branches_of(self.scale))

    @property
    def done(self) -> bool:
        return self.step == len(self.timesteps_cpu)

    def kwargs_of(self, branch: str) -> dict[str, Any]:
        for candidate in self.ctx.cfg_policy.branches:
            if candidate.is_conditional == (branch == COND_BRANCH):
                return candidate.kwargs
        raise LookupError(f"the request has no {branch} branch")


@dataclass(frozen=True)
class RowGroup:
    """One branch of one sample in a shared forward."""

    sample: RunningSample
    branch: str

    @property
    def key(self) -> tuple[int, str]:
        # not the sample's id(): a later sample may live at the same address
        return self.sample.run.serial, self.branch


class StepwiseDenoisingMixin(BucketizedDenoisingMixin):
    """`start_sample`, then `step_samples` until it is done, then `finish_sample`."""

    padded_rows: int = 0  # of the last step, up to its row bucket
    _prediction: torch.Tensor | None = None  # made for the sample whose sampler runs next
    _packed: tuple[tuple, PackedRows] | None = None  # of the last shared forward, with its groups

    def start_sample(self, batch: Req, server_args: ServerArgs) -> RunningSample:
        """Everything between the stages before this one and the first step."""
        ctx = self._prepare_denoising_loop(batch, server_args)
        # the stage's sampler is set anew for the next request while this one still runs
        ctx.scheduler = batch.scheduler = clone_scheduler_runtime(ctx.scheduler)
        self._before_denoising_loop(ctx, batch, server_args)
        return RunningSample(
            batch=batch,
            ctx=ctx,
            timesteps_cpu=ctx.timesteps.cpu(),
            share_key=self._share_key(ctx, batch, server_args),
            most_rows=self._most_rows(ctx),
            # the bars of samples side by side would overwrite each other
            progress=self.progress_bar(total=len(ctx.timesteps), batch=batch, disable=True),
        )

    def finish_sample(self, sample: RunningSample, server_args: ServerArgs) -> Req:
        """Everything between the last step and the stages after this one."""
        self._finalize_denoising_loop(sample.ctx, sample.batch, server_args)
        return sample.batch

    def _most_rows(self, ctx: DenoisingContext) -> int | None:
        if self.row_adapter is None:
            return None
        return max(1, DEFAULT_MAX_IMAGE_TOKENS // self.row_adapter.image_tokens(ctx.latents))

    def _share_key(
        self, ctx: DenoisingContext, batch: Req, server_args: ServerArgs
    ) -> tuple | None:
        adapter = self.row_adapter
        groups = [branch.kwargs for branch in ctx.cfg_policy.branches]
        if adapter is None or batch.image_latent is not None or adapter.refusal(groups):
            return None
        image_tokens = adapter.image_tokens(ctx.latents)
        masked = adapter.needs_mask(groups)
        lengths = sorted({adapter.text_of(kwargs).shape[1] for kwargs in groups})
        shares = rows_pack(
            server_args.guidance_rows, refusal=None, masked=masked, image_tokens=image_tokens
        )
        if not shares or batch.skip_softmax_params or (masked and not adapter.can_mask):
            return None
        # where a mask would cost more than it saves, only texts of one length share
        free = adapter.can_mask and rows_pack(
            server_args.guidance_rows, refusal=None, masked=True, image_tokens=image_tokens
        )
        return (
            # packed latents of a picture and of one on its side have one shape
            (batch.width, batch.height),
            tuple(ctx.latents.shape[1:]),
            ctx.latents.dtype,
            ctx.target_dtype,
            batch.quality,
            batch.attention_backend_override,
            () if free else tuple(lengths),
        )

    def step_samples(self, samples: Sequence[RunningSample], server_args: ServerArgs) -> None:
        """Advance each sample by one step, in one forward (two under CFG parallel, one a rank).

        Raises:
            Exception: from the forward or a sampler; samples whose `step` is unchanged have not
                moved and can be stepped again.
        """
        ctx = samples[0].ctx
        self.mount(samples[0].batch)  # the samples of the last step may have asked for others
        with autocast_context(
            ctx.target_dtype, server_args.disable_autocast, enabled=ctx.autocast_enabled
        ):
            states = [self._step_state(sample, server_args) for sample in samples]
            predictions = [None] * len(samples)
            if len(samples) > 1:
                predictions = self._predict_shared(samples, states, server_args)
            for sample, state, prediction in zip(samples, states, predictions):
                self._prediction = prediction
                self._run_denoising_step(sample.ctx, state, sample.batch, server_args)
                self._record_trajectory(sample.ctx, state, sample.batch, server_args)
                sample.step += 1
                sample.progress.update()
            self.padded_rows = 0 if self.graphs is None else self.graphs.padding

    def prepare_step(self, samples: Sequence[RunningSample], server_args: ServerArgs) -> None:
        """Everything of the next step that can fail before its forward."""
        for sample in samples:
            self._step_state(sample, server_args)
        if len(samples) > 1:
            self._pack_groups(self._row_groups(samples, server_args))

    def _step_state(self, sample: RunningSample, server_args: ServerArgs) -> DenoisingStepState:
        return self._prepare_step_state(
            sample.ctx,
            sample.batch,
            server_args,
            sample.step,
            sample.timesteps_cpu[sample.step],
            sample.timesteps_cpu,
        )

    def _predict_noise_with_cfg(self, *args, **kwargs) -> torch.Tensor:
        prediction, self._prediction = self._prediction, None
        if prediction is not None:
            return prediction
        return super()._predict_noise_with_cfg(*args, **kwargs)

    def _predict_shared(
        self,
        samples: Sequence[RunningSample],
        states: Sequence[DenoisingStepState],
        server_args: ServerArgs,
    ) -> list[torch.Tensor]:
        """Each sample's prediction at its own scale, from rows ``[uncond... | cond...]``."""
        inputs = {
            sample.run.serial: self._model_inputs(sample, state, server_args)
            for sample, state in zip(samples, states)
        }
        groups = self._row_groups(samples, server_args)
        if all(sample.run.in_graphs for sample in samples):
            graph_samples = [
                graph_sample(s.run, *inputs[s.run.serial], s.scale, s.kwargs_of) for s in samples
            ]
            batches = [sample.batch for sample in samples]
            replayed = self._replay(graph_samples, batches, server_args.pipeline_config)
            if replayed is not None:
                self._count(groups, server_args)
                return replayed
        elif self.graphs is not None:
            self.graphs.count_alone()
        packed = self._pack_groups(groups)
        first = samples[0]
        with (
            set_forward_context(
                current_timestep=first.step,
                attn_metadata=states[0].attn_metadata,
                forward_batch=first.batch,
            ),
            self.row_adapter.attend(packed),
        ):
            first.batch.is_cfg_negative = False
            rows = self._predict_noise(
                current_model=states[0].current_model,
                latent_model_input=torch.cat([inputs[g.sample.run.serial][0] for g in groups]),
                timestep=torch.cat([inputs[g.sample.run.serial][1] for g in groups]),
                target_dtype=first.ctx.target_dtype,
                guidance=None,
                **packed.kwargs,
            )
        pipeline_config = server_args.pipeline_config
        split = rows.split([group.sample.images for group in groups])
        predictions = {
            group.key: pipeline_config.slice_noise_pred(part, group.sample.ctx.latents)
            for group, part in zip(groups, split)
        }
        self._count(groups, server_args)
        if server_args.enable_cfg_parallel:
            self._exchange_branches(samples, predictions)
        return [self._combine(sample, predictions, pipeline_config) for sample in samples]

    def _model_inputs(
        self, sample: RunningSample, state: DenoisingStepState, server_args: ServerArgs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx = sample.ctx
        latents = ctx.scheduler.scale_model_input(
            ctx.latents.to(ctx.target_dtype), state.t_device
        )
        timestep_B = self.expand_timestep_before_forward(
            sample.batch,
            server_args,
            state.t_device,
            ctx.target_dtype,
            ctx.seq_len,
            ctx.reserved_frames_mask,
        )
        return latents, timestep_B

    def _row_groups(
        self, samples: Sequence[RunningSample], server_args: ServerArgs
    ) -> list[RowGroup]:
        """The groups of this rank's forward; under CFG parallel a guided sample has one a rank."""
        groups = []
        for branch in (UNCOND_BRANCH, COND_BRANCH):
            for sample in samples:
                needed = branches_of(sample.scale)
                if len(needed) == 2 and server_args.enable_cfg_parallel:
                    needed = (_CFG_PARALLEL_ORDER[get_classifier_free_guidance_rank()],)
                if branch in needed:
                    groups.append(RowGroup(sample, branch))
        return groups

    def _pack_groups(self, groups: list[RowGroup]) -> PackedRows:
        key = tuple(group.key for group in groups)
        if self._packed is None or self._packed[0] != key:
            packed = self.row_adapter.pack([g.sample.kwargs_of(g.branch) for g in groups])
            self._packed = (key, packed)
        return self._packed[1]

    def forget_packed(self) -> None:
        """Drop the conditioning of the last shared forward: its samples may be gone."""
        self._packed = None

    def _count(self, groups: list[RowGroup], server_args: ServerArgs) -> None:
        for group in groups:
            alone = len(branches_of(group.sample.scale)) == 1
            idle = server_args.enable_cfg_parallel and get_classifier_free_guidance_rank() > 0
            if not (alone and idle):  # every CFG rank runs an unguided row, one of them counts
                group.sample.run.counter.add(group.branch, group.sample.images)

    def _exchange_branches(
        self, samples: Sequence[RunningSample], predictions: dict[tuple, torch.Tensor]
    ) -> None:
        guided = [sample for sample in samples if len(branches_of(sample.scale)) == 2]
        if not guided:
            return
        own = _CFG_PARALLEL_ORDER[get_classifier_free_guidance_rank()]
        local = torch.cat([predictions[RowGroup(sample, own).key] for sample in guided])
        by_rank = cfg_model_parallel_all_gather(local, dim=0, separate_tensors=True)
        for branch, rows in zip(_CFG_PARALLEL_ORDER, by_rank):
            for sample, part in zip(guided, rows.split([sample.images for sample in guided])):
                predictions[RowGroup(sample, branch).key] = part

    def _combine(
        self, sample: RunningSample, predictions: dict[tuple, torch.Tensor], pipeline_config: Any
    ) -> torch.Tensor:
        needed = branches_of(sample.scale)
        parts = {branch: predictions[RowGroup(sample, branch).key] for branch in needed}
        if len(needed) == 1:
            return parts[needed[0]].float()
        return combine(
            parts[COND_BRANCH],
            parts[UNCOND_BRANCH],
            sample.scale,
            sample.batch,
            pipeline_config,
        )
