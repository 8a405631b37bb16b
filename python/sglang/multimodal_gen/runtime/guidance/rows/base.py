# SPDX-License-Identifier: Apache-2.0
"""How a DiT family's rows are stacked into one forward."""

from abc import ABC
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

BranchKwargs = dict[str, Any]


@dataclass(frozen=True)
class PackedRows:
    """The conditioning of several row groups, stacked.

    Attributes:
        kwargs: for the DiT's forward, every tensor with all rows on its first dimension.
        mask_BL: True where a text token is real, ``[rows, text length]``; None where every row
            fills the text length, so that no mask is needed.
    """

    kwargs: BranchKwargs
    mask_BL: torch.Tensor | None = field(default=None)


class RowAdapter(ABC):
    """Stacks the conditioning of row groups (a group: one branch of one sample's images).

    A subclass names what its DiT's forward takes. Anything else that turns up in a group's
    conditioning makes `refusal` say so, and those rows run one forward a branch.
    """

    dit_class: ClassVar[str]  # the class name of the DiT that it serves
    text: ClassVar[str] = "encoder_hidden_states"  # [images, length, dim], alone or in a list
    stacked: ClassVar[frozenset[str]] = frozenset()  # [images, ...] tensors
    shared: ClassVar[frozenset[str]] = frozenset()  # the same for all rows of a forward
    ignored: ClassVar[frozenset[str]] = frozenset()  # accepted by the forward and not used
    masks: ClassVar[frozenset[str]] = frozenset()  # of the shared ones: text masks [images, length]

    can_mask: bool = True  # whether padded text can be masked in this layout of ranks

    # bucket CUDA graphs: families that set this implement `example`
    in_graphs: ClassVar[bool] = False
    unpadded_text_length: int | None = None  # of a text that nothing pads or masks
    pads_text: ClassVar[bool] = True  # False: every text has that length

    def __init__(self, dit: torch.nn.Module):
        self.dit = dit

    def refusal(self, groups: Sequence[BranchKwargs]) -> str | None:
        """Why these groups cannot share a forward, or None where they can."""
        known = self.stacked | self.shared | self.ignored | {self.text}
        for kwargs in groups:
            given = {name for name, value in kwargs.items() if value is not None}
            if extra := sorted(given - known):
                return f"{self.dit_class} rows with {', '.join(extra)} cannot be packed"
        return None

    def for_images(self, kwargs: BranchKwargs, images: int) -> BranchKwargs:
        """Conditioning with an entry for each image, also where all of them share one tensor."""
        names = (self.stacked | self.masks | {self.text}) & kwargs.keys()
        return kwargs | {name: _expand(kwargs[name], images) for name in names}

    def needs_mask(self, groups: Sequence[BranchKwargs]) -> bool:
        """Whether the groups' texts differ in length, so that packing them means padding."""
        return len({self.text_of(kwargs).shape[1] for kwargs in groups}) > 1

    def pack(self, groups: Sequence[BranchKwargs]) -> PackedRows:
        """Stack the groups' conditioning in their order, as it is.

        A step's autocast would refuse to join tensors of a third precision (bf16 DiT, fp16 text).
        """
        device_type = self.text_of(groups[0]).device.type
        with torch.autocast(device_type, enabled=False):
            return self._pack(groups)

    def _pack(self, groups: Sequence[BranchKwargs]) -> PackedRows:
        length = max(self.text_of(kwargs).shape[1] for kwargs in groups)
        mask_BL = self._text_mask(groups, length)
        texts = [pad_text(self.text_of(kwargs), length) for kwargs in groups]
        kwargs = dict(groups[0])
        kwargs[self.text] = torch.cat(texts)
        for name in self.stacked & kwargs.keys():
            kwargs[name] = _stack(name, [group[name] for group in groups])
        return self.finish(groups, PackedRows(kwargs, mask_BL))

    def finish(self, groups: Sequence[BranchKwargs], packed: PackedRows) -> PackedRows:
        """For what a family must still do to the packed conditioning, such as hand on the mask."""
        return packed

    def attend(self, packed: PackedRows) -> AbstractContextManager:
        """Entered around a packed forward, for a family whose forward takes no mask."""
        return nullcontext()

    def row_tensors(self, kwargs: BranchKwargs) -> dict[str, torch.Tensor]:
        """A group's conditioning that has one entry an image: what differs from row to row."""
        rows = {name: kwargs[name] for name in sorted(self.stacked & kwargs.keys())}
        return {name: row for name, row in rows.items() if row is not None} | {
            self.text: self.text_of(kwargs)
        }

    def shared_values(self, kwargs: BranchKwargs) -> BranchKwargs:
        """A group's conditioning that is the same for all rows."""
        return {name: kwargs[name] for name in sorted(self.shared & kwargs.keys())}

    def example(
        self,
        latent_shape: tuple[int, ...],
        text_length: int,
        dtype: torch.dtype,
        text_dtypes: Sequence[torch.dtype],
        generator: torch.Generator,
    ) -> BranchKwargs:
        """Random conditioning of one image, in the shapes and dtypes of a request's.

        Args:
            latent_shape: of one image, without the batch dimension.
            dtype: of the DiT.
            text_dtypes: of what each text encoder gives.
            generator: on the DiT's device; the default generator stays as it is.
        """
        raise NotImplementedError

    def image_tokens(
        self, latents: torch.Tensor, image_latent: torch.Tensor | None = None
    ) -> int:
        """Tokens of one image; `latents` is ``[images, tokens, dim]`` or ``[images, C, H, W]``.

        Tokens of a source image (`image_latent`) that the DiT sees beside them count too.
        """
        if latents.ndim == 3:
            source = 0 if image_latent is None else image_latent.shape[1]
            return latents.shape[1] + source
        return latents[0, 0].numel() // self.dit.patch_size**2

    def text_of(self, kwargs: BranchKwargs) -> torch.Tensor:
        text = kwargs[self.text]
        return text[0] if isinstance(text, (list, tuple)) else text

    def group_mask(self, kwargs: BranchKwargs) -> torch.Tensor | None:
        """A group's own text mask ``[images, length]``, where its conditioning has one."""
        return None

    def _text_mask(self, groups: Sequence[BranchKwargs], length: int) -> torch.Tensor | None:
        own = [self.group_mask(kwargs) for kwargs in groups]
        if all(mask is None for mask in own) and not self.needs_mask(groups):
            return None
        masks = []
        for kwargs, mask in zip(groups, own):
            text = self.text_of(kwargs)
            if mask is None:
                mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
            masks.append(torch.nn.functional.pad(mask.bool(), (0, length - text.shape[1])))
        return torch.cat(masks)


def pad_text(text_BLD: torch.Tensor, length: int) -> torch.Tensor:
    """Zero text tokens at the end, up to `length`."""
    return torch.nn.functional.pad(text_BLD, (0, 0, 0, length - text_BLD.shape[1]))


def _expand(value: Any, images: int) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim and len(value) == 1:
        return value.expand(images, *value.shape[1:])
    if isinstance(value, (list, tuple)):
        return type(value)(_expand(entry, images) for entry in value)
    return value


def _stack(name: str, values: list[Any]) -> Any:
    if all(value is None for value in values):
        return None
    if isinstance(values[0], list):  # one entry an image
        return [entry for value in values for entry in value]
    return torch.cat(values)
