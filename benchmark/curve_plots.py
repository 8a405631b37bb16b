# SPDX-License-Identifier: Apache-2.0
"""Table and plots of what benchmark/eval_guidance.py measured. Bars and bands are 95% intervals.

    python benchmark/curve_plots.py outputs/curves
"""

import csv
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from curve_table import write_table
from matplotlib.axes import Axes

NAMES = {
    "all_right": "everything right",
    "change": "change in everything right, pictures in 100",
    "scene": "objects right",
    "word": "word readable",
    "frechet": "Fréchet distance (lower is better)",
    "saturation": "chroma, drawn pictures = 1",
    "drift": "RMS change from one bucket a step, of 255",
}
BLUE, RED, GREEN, GRAY, FRAME = "#1f6fb4", "#d1495b", "#3a8f5c", "#9aa1ad", "#6b7280"
INKS = (RED, BLUE, GREEN, "#8a5fb0", "#c98a1b", "#4b5563")


class Row(dict):
    """A line of the table; numbers as numbers, changes in pictures in 100."""

    def number(self, name: str) -> float:
        return float(self[name]) * (100 if name.startswith("change") else 1)

    def error(self, name: str) -> list[list[float]]:
        value, low, high = (self.number(name + end) for end in ("", "_low", "_high"))
        return [[max(0.0, value - low)], [max(0.0, high - value)]]


def draw_plots(folder: Path) -> None:
    with (folder / "settings.csv").open() as file:
        rows = [Row(line) for line in csv.DictReader(file)]
    plt.switch_backend("agg")
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    plots = {
        "constant": lambda: draw_constant(groups["constant"]),
        "matched_mean": lambda: draw_matched_mean(groups["matched mean"], _base(groups)),
        "intervals": lambda: draw_intervals(groups),
        "buckets": lambda: draw_buckets(groups),
    }
    for name, draw in plots.items():
        try:
            figure = draw()
        except KeyError as missing:  # an --only run
            print(f"no plot {name}: the table has no group {missing}")
            continue
        figure.savefig(folder / f"{name}.png", dpi=110, facecolor="white")
        plt.close(figure)
        print(folder / f"{name}.png")


def _base(groups: dict[str, list[Row]]) -> Row:
    """Constant guidance at the scale that all the others are built around."""
    mean = groups["matched mean"][0].number("mean_scale")
    return min(groups["constant"], key=lambda row: abs(row.number("mean_scale") - mean))


def draw_constant(rows: list[Row]):
    figure, (shares, distance, color) = plt.subplots(1, 3, figsize=(13, 3.8))
    x = [row.number("mean_scale") for row in rows]
    for name, ink in (("all_right", BLUE), ("scene", GREEN), ("word", RED)):
        _line(shares, x, rows, name, ink)
    _line(distance, x, rows, "frechet", BLUE)
    _line(color, x, rows, "saturation", BLUE)
    shares.set(ylabel="share of pictures")
    shares.legend(frameon=False, fontsize=9)
    distance.set(ylabel=NAMES["frechet"])
    color.set(ylabel=NAMES["saturation"])
    for axes in (shares, distance, color):
        axes.set(xlabel="constant scale", xscale="log")
        axes.set_xticks(x, [f"{value:g}" for value in x], fontsize=8)
        axes.minorticks_off()
        _clean(axes)
    figure.tight_layout()
    return figure


def draw_matched_mean(rows: list[Row], base: Row):
    """One line a curve, the constant's interval behind."""
    rows = sorted(rows, key=lambda row: row.number("frechet"))
    figure, panels = plt.subplots(1, 3, figsize=(13, 0.24 * len(rows) + 1.4), sharey=True)
    places = range(len(rows))
    for axes, name in zip(panels, ("change", "frechet", "saturation")):
        axes.axvspan(
            base.number(f"{name}_low"), base.number(f"{name}_high"), color=GRAY, alpha=0.35, lw=0
        )
        for place, row in zip(places, rows):
            axes.errorbar(
                row.number(name), place, xerr=row.error(name), fmt="o", ms=4, color=BLUE, lw=1.2
            )
        axes.set(xlabel=NAMES[name])
        axes.grid(axis="y", color="#eceef1")
        _clean(axes)
    panels[0].set_yticks(list(places), [row["label"] for row in rows], fontsize=8.5)
    panels[0].invert_yaxis()
    figure.suptitle(
        f"same mean scale {base.number('mean_scale'):g}; grey: constant", fontsize=10, x=0.5
    )
    figure.tight_layout()
    return figure


def draw_intervals(groups: dict[str, list[Row]]):
    """Above at the scale of the constant, below raised by half; a line a start, a point an end."""
    figure, panels = plt.subplots(2, 2, figsize=(12, 7.6), sharex=True, sharey="col")
    for pair, group in zip(panels, ("interval 1x", "interval 1.5x")):
        lines: dict[str, list[Row]] = {"plain CFG in fewer steps": groups["fewer steps"]}
        for row in groups[group]:
            lines.setdefault(f"guided from {row['label'].split('-')[0]}", []).append(row)
        for axes, name in zip(pair, ("change", "frechet")):
            for index, (label, rows) in enumerate(lines.items()):
                x = [row.number("forwards") + 0.18 * index - 0.45 for row in rows]  # side by side
                y = [row.number(name) for row in rows]
                ink = INKS[index]
                if name == "change":
                    errors = np.hstack([row.error(name) for row in rows])
                    axes.errorbar(x, y, yerr=errors, fmt="none", ecolor=ink, elinewidth=0.9)
                axes.plot(x, y, marker="s" if index == 0 else "o", ms=4, lw=1, color=ink,
                          label=label)
                if index:
                    for row, *place in zip(rows, x, y):
                        axes.annotate(f"to {row['label'].split('-')[1]}", place, (3, 3),
                                      textcoords="offset points", fontsize=6.5, color=FRAME)
            axes.axhline(_base(groups).number(name), color=GRAY, lw=1, zorder=0)
            axes.set(ylabel=NAMES[name], title=group.replace("1x", "at the constant's scale")
                     .replace("1.5x", "at 1.5 times the constant's scale"))
            axes.title.set_fontsize(9)
            _clean(axes)
    half = _base(groups).error("frechet")
    panels[0, 1].text(0.99, 0.02, f"95% of each value: -{half[0][0]:.2f}, +{half[1][0]:.2f}",
                      transform=panels[0, 1].transAxes, ha="right", fontsize=8, color=FRAME)
    for axes in panels[1]:
        axes.set(xlabel="forwards an image; the line: constant")
    panels[0, 0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.tight_layout()
    return figure


def draw_buckets(groups: dict[str, list[Row]]):
    chosen = {name: rows for name, rows in groups.items() if name.startswith("buckets ")}
    if not chosen:
        raise KeyError("buckets")
    figure, panels = plt.subplots(1, 3, figsize=(13, 4))
    counts = sorted({int(row["label"]) for row in sum(chosen.values(), []) if _constant(row)})
    for (group, rows), ink in zip(chosen.items(), (BLUE, RED, GREEN, INKS[3])):
        rows = sorted(filter(_constant, rows), key=lambda row: int(row["label"]))
        for axes, name in zip(panels, ("change", "frechet", "drift")):
            kept = [row for row in rows if row[name]]
            x = [counts.index(int(row["label"])) for row in kept]
            _line(axes, x, kept, name, ink, label=group.removeprefix("buckets "))
            axes.set(xlabel="buckets (the last: one a step)", ylabel=NAMES[name])
            axes.set_xticks(range(len(counts)), counts)
            _clean(axes)
    panels[0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    return figure


def _constant(row: Row) -> bool:
    return row["mode"] == "constant"


def _line(axes: Axes, x, rows: list[Row], name: str, ink: str, label: str | None = None) -> None:
    axes.plot(x, [r.number(name) for r in rows], color=ink, marker="o", ms=3.5, lw=1.4,
              label=label or NAMES[name])
    low, high = ([r.number(name + end) for r in rows] for end in ("_low", "_high"))
    axes.fill_between(x, low, high, color=ink, alpha=0.18, lw=0)


def _clean(axes: Axes) -> None:
    axes.tick_params(colors=FRAME, labelsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    write_table(Path(sys.argv[1]))
    draw_plots(Path(sys.argv[1]))
