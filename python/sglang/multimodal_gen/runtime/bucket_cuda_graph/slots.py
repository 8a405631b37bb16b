# SPDX-License-Identifier: Apache-2.0
"""Where a step's rows lie in the static inputs: index lists, no torch."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SampleRows:
    """One sample of a step.

    Attributes:
        serial: differs for every sample that was ever run.
        images: of the sample.
        branches: that this step needs, one or two of them; the last is the cond one where there
            are two.
    """

    serial: int
    images: int
    branches: tuple[str, ...]

    @property
    def rows(self) -> int:
        return self.images * len(self.branches)


@dataclass(frozen=True)
class RowMap:
    """A step's rows in a bucket.

    Attributes:
        loads: slot of each row whose conditioning is not there yet, by (serial, branch, image).
        image_of_row: for every slot, whose latents go in; padding rows repeat image 0.
        cond_row, uncond_row: for every image, the slot of that branch; the same slot twice where a
            sample is unguided, so that the combine gives exactly that row.
    """

    loads: dict[tuple[int, str, int], int]
    image_of_row: list[int]
    cond_row: list[int]
    uncond_row: list[int]


def map_rows(samples: Sequence[SampleRows], held: Sequence[Hashable | None], rows: int) -> RowMap:
    """Place the samples' rows in the first `rows` slots, leaving those in place that are there.

    Args:
        held: what each slot holds, (serial, branch, image) or None; at least `rows` slots.
    """
    wanted = {
        (sample.serial, branch, image): offset + image
        for sample, offset in zip(samples, _offsets(samples))
        for branch in sample.branches
        for image in range(sample.images)
    }
    slots = {key: slot for slot, key in enumerate(held[:rows]) if key in wanted}
    free = iter(sorted(set(range(rows)) - set(slots.values())))
    loads = {key: next(free) for key in wanted if key not in slots}
    slots |= loads
    image_of_row = [0] * rows
    for key, image in wanted.items():
        image_of_row[slots[key]] = image
    cond_row, uncond_row = [0] * rows, [0] * rows
    for sample, offset in zip(samples, _offsets(samples)):
        for image in range(sample.images):
            uncond_row[offset + image] = slots[sample.serial, sample.branches[0], image]
            cond_row[offset + image] = slots[sample.serial, sample.branches[-1], image]
    return RowMap(loads, image_of_row, cond_row, uncond_row)


def _offsets(samples: Sequence[SampleRows]) -> list[int]:
    """The first image of each sample among all images of the step."""
    offsets, images = [], 0
    for sample in samples:
        offsets.append(images)
        images += sample.images
    return offsets
