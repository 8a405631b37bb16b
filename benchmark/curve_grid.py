# SPDX-License-Identifier: Apache-2.0
"""Which curves and bucket counts are compared, and what each is matched with."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sglang.multimodal_gen.configs.guidance import GuidanceOptions
from sglang.multimodal_gen.configs.guidance_curves import GuidanceSchedule

EACH_STEP = 0  # as a bucket count: one bucket a step
BUCKET_COUNTS = (EACH_STEP, 1, 2, 4, 6, 8, 16)
SCALES = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7)


@dataclass(frozen=True)
class Setting:
    """One thing to measure.

    Attributes:
        group: what it is compared within.
        label: how plots call it.
        curve: as a user writes it.
        steps: denoising steps.
        buckets: 1 or more, or `EACH_STEP`.
        mode: inside a bucket.
    """

    group: str
    label: str
    curve: str
    steps: int
    buckets: int = EACH_STEP
    mode: str = "constant"

    @property
    def key(self) -> str:
        """A file name; settings that run the same share it."""
        text = f"{self.curve}_{self.steps}steps_{self.buckets or 'each'}{self.mode[0]}"
        return "".join(c if c.isalnum() or c in ".-_" else "+" for c in text)

    def schedule(self) -> GuidanceSchedule:
        options = GuidanceOptions(
            curve=self.curve,
            buckets=self.buckets or self.steps,
            bucket_mode=self.mode,
            scale=1.0,
        )
        return options.schedule(self.steps)


def settings(scale: float, steps: int) -> Iterator[Setting]:
    """All settings around constant guidance at `scale`, its best."""
    for value in SCALES:
        yield Setting("constant", f"{value:g}", f"constant:{value:g}", steps)
    yield from _matched_mean(scale, steps)
    yield from _bucket_counts(scale, steps)
    yield from _fewer_steps(scale, steps)
    yield from _intervals(scale, steps)


def _fewer_steps(scale: float, steps: int) -> Iterator[Setting]:
    """Plain CFG with as many forwards as an interval or a front needs: fewer steps."""
    for share in (0.5, 0.6, 0.7, 0.75, 0.8, 0.9):
        fewer = round(steps * share)
        yield Setting("fewer steps", f"{fewer} steps", f"constant:{_n(scale)}", fewer)


def _matched_mean(scale: float, steps: int) -> Iterator[Setting]:
    """Curves whose mean over the steps is `scale`: as much guidance, at other times."""
    for spread in (0.33, 0.67):
        high, low = scale * (1 + spread), scale * (1 - spread)
        for name in ("linear", "cosine"):
            for direction, (start, end) in (("down", (high, low)), ("up", (low, high))):
                yield _shifted(
                    f"{name} {direction} {spread:g}", name, start, end, "", scale, steps
                )
        for at in ("@0.25", "@0.5", "@0.75"):
            yield _shifted(f"peak {spread:g}{at}", "peak", low, high, at, scale, steps)
        yield _shifted(f"valley {spread:g}@0.5", "peak", high, low, "@0.5", scale, steps)
    for times, until in ((1.5, 0.125), (2, 0.125), (3, 0.125), (1.33, 0.2), (1.5, 0.4)):
        yield _shifted(
            f"front {times:g}x@{until:g}", "front", scale * times, scale, f"@{until}", scale, steps
        )


def _shifted(
    label: str, name: str, start: float, end: float, at: str, mean: float, steps: int
) -> Setting:
    """The curve moved (a front: its rest moved) so that its mean over the steps is `mean`."""
    if name == "front":
        until = float(at[1:])
        count = sum(1 for i in range(steps) if i < until * steps - 1e-9)
        end = (mean * steps - start * count) / (steps - count)
    else:
        trial = Setting("", "", f"{name}:{_n(start)}:{_n(end)}{at}", steps).schedule()
        move = mean - math.fsum(trial.scales) / steps  # alike in every Python
        start, end = start + move, end + move
    return Setting(
        "matched mean", label, f"{name}:{_n(max(start, 0))}:{_n(max(end, 0))}{at}", steps
    )


def _intervals(scale: float, steps: int) -> Iterator[Setting]:
    """Guided from LO to HI only: at the same scale, and at a scale raised by half."""
    for times in (1, 1.5):
        for low in (0, 0.1, 0.2, 0.4, 0.6):
            for high in (0.2, 0.4, 0.6, 0.8, 1):
                if high - low < 0.15:
                    continue
                curve = f"interval:{_n(scale * times)}@{low}-{high}"
                yield Setting(f"interval {times:g}x", f"{low:g}-{high:g}", curve, steps)


def _bucket_counts(scale: float, steps: int) -> Iterator[Setting]:
    """The same curve in ever fewer buckets, for curves that move a lot."""
    curves = {
        "linear down": f"linear:{_n(scale * 1.8)}:{_n(scale * 0.2)}",
        "peak": f"peak:{_n(scale * 0.2)}:{_n(scale * 1.8)}@0.5",
        "front": f"front:{_n(scale * 2)}:{_n(scale * 0.75)}@0.2",
    }
    for label, curve in curves.items():
        for buckets in BUCKET_COUNTS:
            yield Setting(f"buckets {label}", str(buckets or steps), curve, steps, buckets)
            if label != "front" and buckets in (2, 4):
                yield Setting(
                    f"buckets {label}", f"{buckets} linear", curve, steps, buckets, "linear"
                )


def _n(number: float) -> str:
    return f"{number:.4g}"
