# SPDX-License-Identifier: Apache-2.0
"""Which bucket a step's rows run in: decisions on plain data, no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True, order=True)
class GraphShape:
    """What graphs of one family share but for their rows.

    Attributes:
        latent_shape: of one image, without the batch dimension.
        text_length: tokens of every row's text.
        masked: whether shorter texts are padded up to `text_length` and masked. Where texts have
            that length by themselves no mask is needed, and that is a bucket of its own.
        dtype: of the latents that go into the DiT.
        quality: the request level whose kernel fusions were mounted.
    """

    latent_shape: tuple[int, ...]
    text_length: int
    masked: bool
    dtype: str
    quality: str

    @property
    def label(self) -> str:
        latent = "x".join(map(str, self.latent_shape[-2:]))
        text = f"text up to {self.text_length}" if self.masked else f"text {self.text_length}"
        return f"latent {latent}, {text}, {self.dtype}, {self.quality}"


@dataclass(frozen=True, kw_only=True, order=True)
class GraphBucket:
    """One graph: so many rows of one shape."""

    shape: GraphShape
    rows: int

    @property
    def label(self) -> str:
        return f"{self.rows} row{'s' * (self.rows > 1)}, {self.shape.label}"


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one forward of a bucket's rows, measured when it was captured."""

    replay_ms: float
    eager_ms: float


def row_bucket(rows: int, row_buckets: Sequence[int]) -> int | None:
    """The smallest of `row_buckets` that holds `rows`, or None."""
    return min((bucket for bucket in row_buckets if bucket >= rows), default=None)


def text_bucket(
    lengths: Iterable[int],
    *,
    has_mask: bool,
    unpadded_length: int | None,
    text_lengths: Sequence[int],
    can_mask: bool,
) -> tuple[int, bool] | None:
    """Text length and whether it is masked, for rows of these text lengths; None where none fits.

    Args:
        has_mask: whether the rows' own conditioning masks text.
        unpadded_length: the length that texts of this family have by themselves (no quoted text).
        text_lengths: what masked texts are padded up to.
        can_mask: whether padding and masking pays at this resolution.
    """
    lengths = set(lengths)
    if lengths == {unpadded_length} and not has_mask:
        return unpadded_length, False
    fitting = [length for length in text_lengths if length >= max(lengths)]
    return (min(fitting), True) if fitting and can_mask else None


def eager_ms(rows: int, costs: Mapping[int, Cost]) -> float:
    """What `rows` cost eagerly, from what was measured at the row buckets.

    Straight lines between measured buckets, in proportion below the smallest: eager forwards are
    rather taken for too cheap than too dear.
    """
    measured = sorted((bucket, cost.eager_ms) for bucket, cost in costs.items())
    for (low, low_ms), (high, high_ms) in pairwise(measured):
        if low <= rows <= high:
            return low_ms + (high_ms - low_ms) * (rows - low) / (high - low)
    nearest, nearest_ms = measured[0] if rows < measured[0][0] else measured[-1]
    return nearest_ms * rows / nearest


def cheapest_rows(rows: int, costs: Mapping[int, Cost], token_share: float = 1.0) -> int | None:
    """The captured row bucket that `rows` are padded up to, or None where eager is cheaper.

    Args:
        costs: of the captured buckets of one shape, by their rows.
        token_share: tokens of a row whose text is not padded, as a share of the shape's. Eager is
            taken for as much cheaper, which it is where arithmetic limits it.
    """
    bucket = row_bucket(rows, list(costs))
    if bucket is None or costs[bucket].replay_ms > token_share * eager_ms(rows, costs):
        return None
    return bucket
