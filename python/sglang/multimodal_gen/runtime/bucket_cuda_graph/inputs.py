# SPDX-License-Identifier: Apache-2.0
"""Static inputs: the tensors that graphs of one shape read, refreshed before each replay."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sglang.multimodal_gen.runtime.bucket_cuda_graph.buckets import GraphShape
from sglang.multimodal_gen.runtime.bucket_cuda_graph.slots import RowMap, SampleRows, map_rows
from sglang.multimodal_gen.runtime.guidance.rows import PackedRows, RowAdapter
from sglang.multimodal_gen.runtime.guidance.rows.base import BranchKwargs


@dataclass(frozen=True)
class GraphSample:
    """One sample's part in a step.

    Attributes:
        serial: differs for every sample that was ever run.
        latents: ``[images, ...]`` as the DiT takes them.
        timestep_B: ``[images]``.
        scale: of the step.
        branches: conditioning by branch, uncond before cond; one of them where it is unguided.
    """

    serial: int
    latents: torch.Tensor
    timestep_B: torch.Tensor
    scale: float
    branches: dict[str, BranchKwargs]

    @cached_property
    def rows(self) -> SampleRows:
        return SampleRows(self.serial, len(self.latents), tuple(self.branches))


class StaticInputs:
    """Buffers for up to `max_rows` rows; a bucket of fewer rows reads the first of them.

    Latents, timesteps and scales are per image and copied at every step. Conditioning is per row
    and copied when a row arrives. Which image a row denoises and which rows an image combines are
    inputs too.
    """

    def __init__(
        self,
        adapter: RowAdapter,
        shape: GraphShape,
        max_rows: int,
        example: BranchKwargs,
        latents: torch.Tensor,
    ):
        """
        Args:
            example: conditioning of one image with a text of at most the shape's length.
            latents: of one image, ``[1, ...]`` as the DiT takes them.
        """
        self.adapter = adapter
        self.shape = shape
        device = latents.device
        self.latents = latents.new_zeros(max_rows, *latents.shape[1:])
        self.timestep_I = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self.scale_I = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self.index_3R = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        self.rows = {
            name: row.new_zeros(max_rows, *row.shape[1:])
            for name, row in adapter.row_tensors(example).items()
        }
        text = self.rows[adapter.text]
        self.rows[adapter.text] = text.new_zeros(max_rows, shape.text_length, *text.shape[2:])
        self.mask_RL = None
        if shape.masked:
            self.mask_RL = torch.ones(max_rows, shape.text_length, dtype=torch.bool, device=device)
        self.shared = _map(adapter.shared_values(example), torch.clone)
        self._latents: list[torch.Tensor] = []  # each sample's part of `latents`
        self._held: list[tuple | None] = [None] * max_rows
        self._mapped: tuple[tuple[SampleRows, ...], int] | None = None
        self._scales: tuple[float, ...] | None = None

    def refusal(self, sample: GraphSample) -> str | None:
        """Why this sample's tensors cannot be copied in unchanged, or None."""
        if sample.timestep_B.dtype != self.timestep_I.dtype:
            return f"timesteps are {sample.timestep_B.dtype}"
        for kwargs in sample.branches.values():
            rows = self.adapter.row_tensors(kwargs)
            if rows.keys() != self.rows.keys():
                return f"conditioning is {sorted(rows)}"
            for name, row in rows.items():
                ours = self.rows[name]
                skip = 2 if name == self.adapter.text else 1  # the text may be shorter
                if row.dtype != ours.dtype or row.shape[skip:] != ours.shape[skip:]:
                    return f"{name} is {row.dtype} {tuple(row.shape)}"
            if _spec(self.adapter.shared_values(kwargs)) != _spec(self.shared):
                return f"{', '.join(sorted(self.adapter.shared))} differ in shape or dtype"
        return None

    def holds(self, samples: Sequence[GraphSample], rows: int) -> bool:
        """Whether the conditioning of exactly these rows is there already."""
        return self._mapped == (tuple(sample.rows for sample in samples), rows)

    def load(self, samples: Sequence[GraphSample], rows: int) -> None:
        """Refresh everything that a bucket of `rows` rows reads."""
        sizes = [sample.rows.images for sample in samples]
        if not self.holds(samples, rows):
            mapped = tuple(sample.rows for sample in samples), rows
            # until all of it is there, nothing is known to be
            self._mapped = None
            self._load_rows(samples, map_rows(mapped[0], self._held, rows))
            self._latents = list(self.latents[: sum(sizes)].split(sizes))
            self._mapped = mapped
        torch._foreach_copy_(self._latents, [sample.latents for sample in samples])
        torch.cat([s.timestep_B for s in samples], out=self.timestep_I[: sum(sizes)])
        scales = tuple(s.scale for s, size in zip(samples, sizes) for _ in range(size))
        if scales != self._scales:
            _upload(self.scale_I[: len(scales)], list(scales))
            self._scales = scales

    def _load_rows(self, samples: Sequence[GraphSample], row_map: RowMap) -> None:
        branches = {
            (sample.serial, branch): kwargs
            for sample in samples
            for branch, kwargs in sample.branches.items()
        }
        for key, slot in row_map.loads.items():
            serial, branch, image = key
            self._held[slot] = None
            self._load_row(branches[serial, branch], image, slot)
            self._held[slot] = key
        first = samples[0]
        _copy(self.shared, self.adapter.shared_values(next(iter(first.branches.values()))))
        index = [row_map.image_of_row, row_map.cond_row, row_map.uncond_row]
        _upload(self.index_3R[:, : len(row_map.image_of_row)], index)

    def _load_row(self, kwargs: BranchKwargs, image: int, slot: int) -> None:
        rows = self.adapter.row_tensors(kwargs)
        for name, row in rows.items():
            ours = self.rows[name][slot]
            if name != self.adapter.text:
                ours.copy_(row[image])
                continue
            length = row.shape[1]
            ours[:length].copy_(row[image])
            if self.mask_RL is not None:
                ours[length:].zero_()
                self._load_mask(kwargs, image, slot, length)

    def _load_mask(self, kwargs: BranchKwargs, image: int, slot: int, length: int) -> None:
        mask_L = self.mask_RL[slot]
        own = self.adapter.group_mask(kwargs)
        mask_L[length:].zero_()
        if own is None:
            mask_L[:length].fill_(True)
        else:
            mask_L[:length].copy_(own[image])

    def forget(self) -> None:
        """Load everything anew at the next step: what the buffers hold is not known."""
        self._held = [None] * len(self._held)
        self._mapped = self._scales = None

    def packed(self, rows: int) -> PackedRows:
        """The first `rows` rows as the DiT's conditioning."""
        kwargs: BranchKwargs = dict(self.shared)
        kwargs.update({name: buffer[:rows] for name, buffer in self.rows.items()})
        return PackedRows(kwargs, None if self.mask_RL is None else self.mask_RL[:rows])

    def row_inputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and timesteps of the first `rows` rows, gathered from their images."""
        image_of_row = self.index_3R[0, :rows]
        return (
            self.latents[:rows].index_select(0, image_of_row),
            self.timestep_I[:rows].index_select(0, image_of_row),
        )

    def combine(self, prediction: torch.Tensor, rows: int) -> torch.Tensor:
        """``uncond + s * (cond - uncond)`` of each image, ``[rows, ...]`` in fp32.

        The entries behind the last image are of no meaning.
        """
        prediction = prediction.float()
        cond = prediction.index_select(0, self.index_3R[1, :rows])
        uncond = prediction.index_select(0, self.index_3R[2, :rows])
        scale = self.scale_I[:rows].view(-1, *[1] * (prediction.ndim - 1))
        return uncond + scale * (cond - uncond)

    def branch_rows(self, prediction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cond and uncond row of each image, ``[max rows, ...]``; as meaningless at the end."""
        rows = len(prediction)
        return (
            prediction.index_select(0, self.index_3R[1, :rows]),
            prediction.index_select(0, self.index_3R[2, :rows]),
        )


def _upload(target: torch.Tensor, values: list) -> None:
    """Host numbers into a static tensor, without waiting for the device."""
    pinned = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
    target.copy_(pinned, non_blocking=True)


def _map(value: Any, function) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _map(entry, function) for name, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_map(entry, function) for entry in value)
    return value


def _spec(value: Any) -> Any:
    return _map(value, lambda tensor: (tuple(tensor.shape), tensor.dtype))


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    elif isinstance(target, dict):
        for name, entry in target.items():
            _copy(entry, source[name])
    elif isinstance(target, (tuple, list)):
        for entry, other in zip(target, source):
            _copy(entry, other)
