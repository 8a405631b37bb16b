# SPDX-License-Identifier: Apache-2.0
"""The bucket plan: what the scheduler decided and every rank obeys. Plain data, no torch."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from sglang.multimodal_gen.configs.guidance_curves import GuidanceSchedule, branches_of

PLAN_KEY = "bucket_plan"  # in Req.extra, beside the options that it was made from
OPTIONS_KEY = "guidance"
REFUSAL_KEY = "guidance_refusal"  # instead of both: why the request has no plan


@dataclass(frozen=True, kw_only=True)
class SampleStep:
    """One sample's part in one step of a plan: which step it is at and which rows it has."""

    sample_id: str
    images: int
    step: int
    bucket: int
    scale: float

    @property
    def branches(self) -> tuple[str, ...]:
        return branches_of(self.scale)

    @property
    def rows(self) -> int:
        return self.images * len(self.branches)


@dataclass(frozen=True, kw_only=True)
class PlannedSample:
    """The steps of one sample that a plan covers.

    Attributes:
        sample_id: the request's id.
        images: how many images of the request are denoised side by side (``n``); they share
            everything but their seed.
        first_step: the denoising step that the plan's first step is to this sample.
        bucket_ids, scales: of this sample's steps, from `first_step` on.
    """

    sample_id: str
    images: int
    first_step: int
    bucket_ids: tuple[int, ...]
    scales: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Which samples run in the next steps, and each one's step, bucket, scale and rows.

    Valid until the set of samples changes, so it is sent when it changes and not at every step.
    """

    samples: tuple[PlannedSample, ...]

    @classmethod
    def for_request(cls, request_id: str, images: int, schedule: GuidanceSchedule) -> "BucketPlan":
        """A plan for one request alone, from its first step to its last."""
        return cls(
            samples=(
                PlannedSample(
                    sample_id=request_id,
                    images=images,
                    first_step=0,
                    bucket_ids=schedule.bucket_ids,
                    scales=schedule.scales,
                ),
            )
        )

    @property
    def num_steps(self) -> int:
        """Steps until the first sample is done."""
        return min(len(sample.scales) for sample in self.samples)

    def at(self, step: int) -> tuple[SampleStep, ...]:
        """The samples of the plan's `step`-th step (first is 0)."""
        return tuple(
            SampleStep(
                sample_id=sample.sample_id,
                images=sample.images,
                step=sample.first_step + step,
                bucket=sample.bucket_ids[step],
                scale=sample.scales[step],
            )
            for sample in self.samples
        )

    def digest(self) -> bytes:
        """32 bytes that differ for any two plans that differ."""
        # repr of a float is exact, so JSON is as good as the bits
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).digest()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "BucketPlan":
        return cls(
            samples=tuple(
                PlannedSample(
                    **{
                        **sample,
                        "bucket_ids": tuple(sample["bucket_ids"]),
                        "scales": tuple(sample["scales"]),
                    }
                )
                for sample in data["samples"]
            )
        )
