# SPDX-License-Identifier: Apache-2.0
"""Guidance curves and the buckets they are cut into: plain Python, no torch.

A curve maps denoising progress to a guidance scale. Step ``i`` of ``N`` has progress ``i / N``
and lies in bucket ``i * B // N``. All arithmetic is rational, so that "the first 30% of 10 steps"
is exactly steps 0, 1 and 2.
"""

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MAX_BUCKETS = 64
MAX_SCALE = 100
# what a request may bring to where all requests are received: a curve is parsed and cut there
MAX_STEPS = 10_000
MAX_CURVE_TEXT = 10_000  # characters
BUCKET_MODES = ("constant", "linear")

_MAX_SHOWN = 200  # characters of a wrong value that its error repeats

UNGUIDED = Fraction(1)
COND_BRANCH = "cond"
UNCOND_BRANCH = "uncond"


class GuidanceError(ValueError):
    """A guidance field that cannot be honoured: its name, what was given, what is wanted."""

    def __init__(self, field: str, given: Any, wanted: str):
        super().__init__(f"{field}: got {_shown(given)}, wanted {wanted}")
        self.field = field


class _Described(str):
    """A `given` that is already a sentence part and must not be quoted."""


def _shown(given: Any) -> str:
    try:
        shown = given if isinstance(given, _Described) else repr(given)
    except (RecursionError, ValueError):  # brackets too deep, a number of too many digits
        return f"a {type(given).__name__}"
    return shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."


def branches_of(scale: float) -> tuple[str, ...]:
    """The branches whose prediction a step at `scale` uses, in row order: uncond, then cond."""
    if scale == 1:
        return (COND_BRANCH,)
    if scale == 0:
        return (UNCOND_BRANCH,)
    return (UNCOND_BRANCH, COND_BRANCH)


# --- curves -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A parsed curve.

    Attributes:
        spec: how it was written: text, or a list of numbers.
        scale_at: ``(step, num_steps, request_scale) -> scale``, exact.
        has_numbers: False where the curve follows the request's own scale.
        num_steps: the only step count that it fits (a list), or None for any.
    """

    spec: str | list[float]
    scale_at: Callable[[int, int, Fraction], Fraction]
    has_numbers: bool
    num_steps: int | None = None


def _constant(scale: Fraction):
    return lambda progress: scale


def _linear(start: Fraction, end: Fraction):
    return lambda progress: start + (end - start) * progress


def _cosine(start: Fraction, end: Fraction):
    def scale_at(progress):
        falling = Fraction((1 + math.cos(math.pi * progress)) / 2)
        return end + (start - end) * falling

    return scale_at


def _front(first: Fraction, rest: Fraction, until: Fraction):
    return lambda progress: first if progress < until else rest


def _peak(ends: Fraction, top: Fraction, center: Fraction):
    def scale_at(progress):
        if progress < center:
            return ends + (top - ends) * progress / center
        if center == 1:
            return top
        return top + (ends - top) * (progress - center) / (1 - center)

    return scale_at


def _interval(scale: Fraction, low: Fraction, high: Fraction):
    """Half open: guided where ``low <= progress < high``, unguided elsewhere."""
    return lambda progress: scale if low <= progress < high else UNGUIDED


def _points(points: list[tuple[Fraction, Fraction]]):
    places = [at for at, _ in points]

    def scale_at(progress):
        passed = bisect_right(places, progress)  # of points at the same place, all
        if passed == 0:
            return points[0][1]
        at, scale = points[passed - 1]
        if passed == len(points):
            return scale
        next_at, next_scale = points[passed]
        return scale + (next_scale - scale) * (progress - at) / (next_at - at)

    return scale_at


@dataclass(frozen=True)
class _Shape:
    """One way to write a curve.

    Attributes:
        form: as the user writes it, for messages.
        pattern: regular expression of what follows ``name:``; its groups are numbers.
        scales: how many of the groups are scales; the others are fractions of progress.
        build: from the numbers to a function of progress.
        relative: the numbers of the shape written without any: scales are multiples of the
            request's scale. None where the shape needs numbers.
    """

    form: str
    pattern: str
    scales: int
    build: Callable[..., Callable[[Fraction], Fraction]]
    relative: tuple[str, ...] | None = None


# What stands in the place of a number; _number says what is wrong with it. It has a limit, and
# decimals are matched in one way only: time must not grow with the square of a text's length.
_N = r"([^:@,=]{1,100}?)"
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# The numbers of shapes written alone are from docs/curves.md.
_SHAPES = {
    "constant": _Shape("constant:S", f"{_N}", 1, _constant, ("1",)),
    "linear": _Shape("linear:A:B", f"{_N}:{_N}", 2, _linear, ("1.33", "0.67")),
    "cosine": _Shape("cosine:A:B", f"{_N}:{_N}", 2, _cosine, ("1.33", "0.67")),
    "front": _Shape("front:A:B@F", f"{_N}:{_N}@{_N}", 2, _front, ("1.5", "0.67", "0.4")),
    "peak": _Shape("peak:A:B@C", f"{_N}:{_N}@{_N}", 2, _peak, ("0.67", "1.33", "0.25")),
    "interval": _Shape(
        # the minus sign of an exponent does not separate
        "interval:S@LO-HI", rf"{_N}@{_N}(?<![eE])-{_N}", 1, _interval, ("1", "0.1", "0.6")
    ),
    "points": _Shape("points:p=s,p=s,...", "", 0, _points),
}
CURVE_HELP = (
    "one of "
    + ", ".join(shape.form for shape in _SHAPES.values())
    + ", or one of "
    + ", ".join(name for name, shape in _SHAPES.items() if shape.relative)
    + " alone to follow the request's scale, or a list with one scale a step"
)


def parse_curve(spec: Any, *, field: str = "guidance_curve") -> Curve:
    """Parse a curve written as text, as a list of numbers, or as a JSON list in text.

    Raises:
        GuidanceError: naming `field`, for anything that is not a curve.
    """
    if isinstance(spec, Curve):
        return spec
    if isinstance(spec, (list, tuple)):
        return _list_curve(list(spec), field)
    if not isinstance(spec, str):
        raise GuidanceError(field, spec, "text or a list of numbers")
    text = spec.strip()
    if len(text) > MAX_CURVE_TEXT:
        raise GuidanceError(field, spec, f"at most {MAX_CURVE_TEXT} characters")
    if text.startswith("["):
        try:
            return _list_curve(json.loads(text), field)
        except (ValueError, RecursionError):  # also too many digits, too many brackets
            raise GuidanceError(field, spec, "a JSON list of numbers") from None
    name, colon, rest = text.partition(":")
    if name not in _SHAPES:
        raise GuidanceError(field, spec, CURVE_HELP)
    shape = _SHAPES[name]
    if name == "points":
        progress_curve = _points(_parse_points(rest, spec, field))
        return _absolute(text, progress_curve)
    if not colon and shape.relative is not None:
        return _relative(text, shape)
    match = re.fullmatch(shape.pattern, rest)
    if match is None:
        raise GuidanceError(field, spec, shape.form)
    groups = match.groups()
    scales = [_number(text, spec, field) for text in groups[: shape.scales]]
    fractions = [_number(text, spec, field, highest=1) for text in groups[shape.scales :]]
    if name == "interval" and fractions[0] >= fractions[1]:
        raise GuidanceError(field, spec, f"{shape.form} with LO < HI")
    return _absolute(text, shape.build(*scales, *fractions))


def _absolute(text: str, progress_curve) -> Curve:
    return Curve(
        text, lambda step, steps, _scale: progress_curve(Fraction(step, steps)), has_numbers=True
    )


def _relative(text: str, shape: _Shape) -> Curve:
    assert shape.relative is not None
    numbers = [Fraction(number) for number in shape.relative]

    def scale_at(step, num_steps, request_scale):
        scales = [factor * request_scale for factor in numbers[: shape.scales]]
        return shape.build(*scales, *numbers[shape.scales :])(Fraction(step, num_steps))

    return Curve(text, scale_at, has_numbers=False)


def _list_curve(values: Any, field: str) -> Curve:
    if not isinstance(values, list) or not values:
        raise GuidanceError(field, values, "one number for each denoising step")
    if len(values) > MAX_STEPS:
        given = _Described(f"a list of {len(values)} numbers")
        raise GuidanceError(field, given, f"at most {MAX_STEPS}")
    scales = [_number(value, values, field) for value in values]
    return Curve(
        values,
        lambda step, _steps, _scale: scales[step],
        has_numbers=True,
        num_steps=len(scales),
    )


def _parse_points(text: str, spec: str, field: str) -> list[tuple[Fraction, Fraction]]:
    points = []
    for item in text.split(","):
        at, equals, scale = item.partition("=")
        if not equals:
            raise GuidanceError(field, spec, _SHAPES["points"].form)
        points.append((_number(at, spec, field, highest=1), _number(scale, spec, field)))
    if any(left[0] > right[0] for left, right in zip(points, points[1:])):
        raise GuidanceError(field, spec, "points in order of progress")
    return points


def _number(value: Any, spec: Any, field: str, *, highest: int = MAX_SCALE) -> Fraction:
    """`value` as an exact decimal. A boolean is no number; text never is in a list."""
    wanted = f"a finite number from 0 to {highest} in place of {_shown(value)}"
    written = isinstance(value, str)
    if isinstance(value, bool) or (written and not isinstance(spec, str)):
        raise GuidanceError(field, spec, wanted)
    if written and not _DECIMAL.fullmatch(value.strip()):
        raise GuidanceError(field, spec, wanted)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise GuidanceError(field, spec, wanted) from None
    if not 0 <= number <= highest:  # a nan fails this too
        raise GuidanceError(field, spec, wanted)
    return Fraction(repr(number))


# --- buckets ------------------------------------------------------------------------------------


def check_buckets(value: Any, *, field: str = "guidance_buckets", lowest: int = 1) -> int:
    """A bucket count; raises `GuidanceError` for anything but a whole number in range."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not lowest <= value <= MAX_BUCKETS:
        raise GuidanceError(field, value, f"a whole number from {lowest} to {MAX_BUCKETS}")
    return value


def check_steps(value: int) -> None:
    """Raises `GuidanceError` where a schedule of so many steps would take too long to make."""
    if value > MAX_STEPS:
        raise GuidanceError("num_inference_steps", value, f"at most {MAX_STEPS}")


def check_bucket_mode(value: Any, *, field: str = "guidance_bucket_mode") -> str:
    if value not in BUCKET_MODES:
        raise GuidanceError(field, value, " or ".join(BUCKET_MODES))
    return value


@dataclass(frozen=True, kw_only=True)
class BucketRun:
    """Neighbouring steps of one bucket that run alike (``last_step`` is included)."""

    bucket: int
    first_step: int
    last_step: int
    first_scale: float
    last_scale: float

    def to_dict(self) -> dict[str, Any]:
        """As the response shows it; a scale that moves inside the run is a [first, last] pair."""
        moves = self.first_scale != self.last_scale
        return {
            "bucket": self.bucket,
            "steps": [self.first_step, self.last_step],
            "scale": [self.first_scale, self.last_scale] if moves else self.first_scale,
        }


@dataclass(frozen=True, kw_only=True)
class GuidanceSchedule:
    """Bucket and scale of every step of one request."""

    bucket_ids: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def num_steps(self) -> int:
        return len(self.scales)

    @property
    def forwards(self) -> dict[str, int]:
        """DiT rows that one image needs, by branch."""
        return {
            branch: sum(branch in branches_of(scale) for scale in self.scales)
            for branch in (COND_BRANCH, UNCOND_BRANCH)
        }

    def bucket_runs(self) -> Iterator[BucketRun]:
        """The schedule as runs: a bucket with unguided steps inside shows more than once."""
        first = 0
        for step in range(1, self.num_steps + 1):
            if step < self.num_steps and self._same_run(step - 1, step):
                continue
            yield BucketRun(
                bucket=self.bucket_ids[first],
                first_step=first,
                last_step=step - 1,
                first_scale=self.scales[first],
                last_scale=self.scales[step - 1],
            )
            first = step

    def _same_run(self, left: int, right: int) -> bool:
        if self.bucket_ids[left] != self.bucket_ids[right]:
            return False
        return branches_of(self.scales[left]) == branches_of(self.scales[right])


def make_schedule(
    curve: Curve, num_steps: int, *, buckets: int, mode: str, scale: float
) -> GuidanceSchedule:
    """Cut a curve into buckets.

    Args:
        mode: one of `BUCKET_MODES`.
        scale: the request's own, which a curve without numbers follows.

    Raises:
        GuidanceError: where the curve is a list of another length.
    """
    if curve.num_steps not in (None, num_steps):
        raise GuidanceError(
            "guidance_curve",
            _Described(f"a list of {curve.num_steps} numbers"),
            f"{num_steps} (one for each of num_inference_steps); a request that names no "
            "curve has the server's --guidance-curve",
        )
    request_scale = Fraction(repr(float(scale)))
    values = [curve.scale_at(step, num_steps, request_scale) for step in range(num_steps)]
    bucket_ids = tuple(step * buckets // num_steps for step in range(num_steps))
    guided: dict[int, list[int]] = {bucket: [] for bucket in bucket_ids}
    for step, bucket in enumerate(bucket_ids):
        if len(branches_of(values[step])) == 2:
            guided[bucket].append(step)
    scales = list(values)
    for steps in guided.values():
        _fill_bucket(scales, values, steps, mode)
    return GuidanceSchedule(bucket_ids=bucket_ids, scales=tuple(map(float, scales)))


def _fill_bucket(scales: list, values: list, guided: list[int], mode: str) -> None:
    """Write the scales of one bucket's guided steps; its other steps keep their own value."""
    if not guided:
        return
    first, last = guided[0], guided[-1]
    mean = sum(values[step] for step in guided) / len(guided)
    for step in guided:
        if mode == "constant" or first == last:
            scales[step] = mean
        else:
            slope = (values[last] - values[first]) / (last - first)
            scales[step] = values[first] + slope * (step - first)
