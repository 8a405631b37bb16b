# SPDX-License-Identifier: Apache-2.0
"""Settings of bucket CUDA graphs: plain Python, no torch."""

import re
from dataclasses import dataclass

from sglang.multimodal_gen.configs.guidance_curves import GuidanceError

GRAPH_MODES = ("auto", "full", "breakable", "off")
DEFAULT_ROWS = (1, 2, 4, 8, 16)
DEFAULT_TEXT_LENGTHS = (64, 256)

# Row buckets that nobody named stop here: at 1024x1024 (4096 image tokens a row) that is 4 rows.
# More rows are limited by arithmetic, where a graph saves nothing.
DEFAULT_MAX_IMAGE_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True)
class BucketGraphConfig:
    """What graphs a server captures.

    Attributes:
        mode: ``--bucket-graphs``, one of `GRAPH_MODES`.
        rows: ``--bucket-graph-rows``; None is `DEFAULT_ROWS` up to `DEFAULT_MAX_IMAGE_TOKENS`.
        resolutions: ``--bucket-graph-resolutions``, each ``WxH`` in pixels; None is what the server
            warms up.
        text_lengths: ``--bucket-graph-text-lengths``, tokens that a masked text is padded up to.
        memory_gb: ``--bucket-graph-memory-gb``; None is a tenth of the device's memory.
    """

    mode: str = "auto"
    rows: tuple[int, ...] | None = None
    resolutions: tuple[str, ...] | None = None
    text_lengths: tuple[int, ...] = DEFAULT_TEXT_LENGTHS
    memory_gb: float | None = None

    def __post_init__(self):
        if self.mode not in GRAPH_MODES:
            raise GuidanceError("--bucket-graphs", self.mode, " or ".join(GRAPH_MODES))
        for flag, values in (
            ("--bucket-graph-rows", self.rows),
            ("--bucket-graph-text-lengths", self.text_lengths),
        ):
            if values is not None and not all(_is_count(value) for value in values):
                raise GuidanceError(flag, list(values), "whole numbers from 1")
        for resolution in self.resolutions or ():
            parse_resolution(resolution)
        if self.memory_gb is not None and not self.memory_gb > 0:
            raise GuidanceError("--bucket-graph-memory-gb", self.memory_gb, "a number above 0")

    def rows_for(self, image_tokens: int) -> tuple[int, ...]:
        """The row buckets of a resolution with `image_tokens` tokens a row, ascending."""
        if self.rows is not None:
            return tuple(sorted(set(self.rows)))
        fitting = [rows for rows in DEFAULT_ROWS if rows * image_tokens <= DEFAULT_MAX_IMAGE_TOKENS]
        return tuple(fitting) or DEFAULT_ROWS[:1]


def parse_resolution(text: str) -> tuple[int, int]:
    """``"1024x512"`` as (width, height) in pixels.

    Raises:
        GuidanceError: for any other form.
    """
    match = re.fullmatch(r"([1-9][0-9]*)[xX]([1-9][0-9]*)", str(text).strip())
    if match is None:
        raise GuidanceError("--bucket-graph-resolutions", text, "WIDTHxHEIGHT in pixels")
    return int(match[1]), int(match[2])


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
