# SPDX-License-Identifier: Apache-2.0
"""Draws guidance curves with their buckets, as a server would run them. Needs matplotlib."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

if __package__:
    from sglang.multimodal_gen.configs.guidance_curves import branches_of, parse_curve
    from sglang.multimodal_gen.tools.guidance_curve import describe, forwards_text, step_scales
else:  # beside guidance_curve.py run by its path
    from guidance_curve import describe, forwards_text, step_scales
    from guidance_curves import branches_of, parse_curve

GALLERY = (
    "constant:1.5",
    "linear:2:1.2",
    "cosine:2:1.2",
    "front:2:1@0.4",
    "peak:1.2:2@0.5",
    "interval:2@0.1-0.8",
    "points:0=1.2,0.3=2,0.6=1",
)

BUCKET, EXACT, UNGUIDED, FRAME = "#1f6fb4", "#d1495b", "#e4e6ea", "#6b7280"
FINE = 600  # points of the exact curve


def plot_curve(axes: Axes, guidance: dict[str, Any], *, scale: float = 1.5) -> None:
    """Draw a ``guidance`` object: the curve itself, its buckets, the steps without guidance.

    Args:
        axes: to draw on.
        guidance: from a response, or from `describe`.
        scale: the request's own scale, which a curve without numbers follows.
    """
    scales = step_scales(guidance)
    steps = len(scales)
    exact = _exact(guidance["curve"], steps, scale)

    for run in guidance["buckets"]:
        first, end = run["steps"][0], run["steps"][1] + 1
        edges = [float(step) for step in range(first, end + 1)]
        run_scales = scales[first:end]
        branches = branches_of(run_scales[0])
        if len(branches) == 1:
            axes.axvspan(first, end, color=UNGUIDED, lw=0)
        else:
            axes.stairs(run_scales, edges, baseline=1, fill=True, color=BUCKET, alpha=0.18, lw=0)
        axes.stairs(run_scales, edges, baseline=None, color=BUCKET, lw=2.4)
        if first:
            axes.axvline(first, color="white", lw=1.2)
    axes.axhline(1, color=FRAME, lw=0.8, ls=(0, (4, 3)), zorder=0.9)
    axes.plot(*exact, color=EXACT, lw=1.1)

    low, high = min([1, *scales, *exact[1]]), max([1, *scales, *exact[1]])
    room = max(0.1, 0.12 * (high - low))
    axes.set(xlim=(0, steps), ylim=(low - room, high + room))
    axes.tick_params(colors=FRAME, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(_short(guidance["curve"]), loc="left", fontsize=11.5, weight="bold", pad=22)
    axes.text(
        0,
        1.035,
        forwards_text(guidance["forwards"]),
        transform=axes.transAxes,
        fontsize=9.5,
        color=FRAME,
    )


def legend_handles() -> list[Any]:
    return [
        Line2D([], [], color=EXACT, lw=1.1, label="the curve"),
        Patch(
            facecolor="#d2e2f0", edgecolor=BUCKET, lw=2, label="a bucket's scale, both branches run"
        ),
        Patch(facecolor=UNGUIDED, label="scale 1 or 0, one branch runs"),
        Line2D([], [], color=FRAME, lw=0.8, ls=(0, (4, 3)), label="scale 1: no guidance"),
    ]


def save_curve(guidance: dict[str, Any], path: Path, *, scale: float = 1.5) -> None:
    """One curve in a picture of its own."""
    plt.switch_backend("agg")
    figure, axes = plt.subplots(figsize=(8, 4.6))
    plot_curve(axes, guidance, scale=scale)
    axes.set_xlabel("denoising step", color=FRAME)
    axes.set_ylabel("guidance scale", color=FRAME)
    figure.legend(
        handles=legend_handles(), ncols=2, loc="lower center", frameon=False, fontsize=9.5
    )
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    _save(figure, path)


def save_gallery(path: Path, *, steps: int, buckets: int, mode: str) -> None:
    """Every shape side by side, on one scale axis."""
    plt.switch_backend("agg")
    figure, grid = plt.subplots(2, 4, figsize=(13, 6), sharey=True)
    cells = list(grid.flat)
    for axes, curve in zip(cells, GALLERY):
        plot_curve(axes, describe(curve, steps=steps, buckets=buckets, mode=mode))
        axes.set_ylim(0.88, 2.12)
    for axes in grid[:, 0]:
        axes.set_ylabel("guidance scale", color=FRAME)
    for axes in cells[3 : len(GALLERY)]:
        axes.set_xlabel("denoising step", color=FRAME)
    for axes in cells[len(GALLERY) :]:
        axes.axis("off")
    legend = cells[-1].legend(
        handles=legend_handles(),
        title=f"{steps} steps in {buckets} buckets",
        loc="center",
        frameon=False,
        fontsize=9.5,
        labelspacing=1,
    )
    legend.set_alignment("left")
    legend.get_title().set(fontsize=11.5, weight="bold")
    figure.tight_layout(h_pad=2, w_pad=1.5)
    _save(figure, path)


def _exact(curve: str | list[float], steps: int, scale: float) -> tuple[list[float], list[float]]:
    """Steps and scales of the curve before it was cut into buckets."""
    parsed = parse_curve(curve)
    if isinstance(parsed.spec, list):  # a list: each number holds for its whole step
        edges = [edge for step in range(steps) for edge in (step, step + 1)]
        return edges, [number for number in parsed.spec for _ in range(2)]
    request_scale = Fraction(repr(float(scale)))
    return (
        [point * steps / FINE for point in range(FINE + 1)],
        [float(parsed.scale_at(point, FINE, request_scale)) for point in range(FINE + 1)],
    )


def _short(curve: str | list[float]) -> str:
    text = curve if isinstance(curve, str) else f"a list of {len(curve)} scales"
    return text if len(text) <= 60 else text[:57] + "..."


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)
