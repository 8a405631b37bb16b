"""Draws a part of a --schedule-trace file: a timeline of samples, rows and buckets.

    python benchmark/plot_schedule.py trace.json schedule.svg --start 12.0 --seconds 1
"""

import argparse
import sys
from pathlib import Path

import matplotlib

sys.path.insert(0, str(Path(__file__).parent.parent / "test"))
matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from harness.batching import trace_events  # noqa: E402

COLORS = {"prepare": "#8c8c8c", "guided": "#1f6fb4", "unguided": "#f0a202", "decode": "#5aa469"}


def main() -> None:
    args = parse_args()
    first, last = args.start * 1e6, (args.start + args.seconds) * 1e6
    events = [
        event
        for event in trace_events(args.trace)
        if event["ts"] < last and event["ts"] + event["dur"] > first
    ]
    lanes = sorted({event["tid"] for event in events} - {0})
    place = {lane: index for index, lane in enumerate(lanes)}
    figure, (rows, samples) = plt.subplots(
        2, 1, sharex=True, figsize=(10, 1.6 + 0.28 * len(lanes)), height_ratios=[1, 3]
    )
    for event in events:
        left, width = (event["ts"] - first) / 1e3, event["dur"] / 1e3
        if event["name"] == "step":
            rows.bar(left, event["args"]["rows"], width, align="edge", color="#444444")
            continue
        kind = event["name"]
        if kind.startswith("bucket"):
            kind = "guided" if event["args"]["scale"] not in (0, 1) else "unguided"
        samples.barh(
            place[event["tid"]], width * 0.94, left=left, height=0.8, color=COLORS[kind]
        )
        if event["name"].startswith("bucket") and width > args.seconds * 20:
            samples.text(
                left + width / 2,
                place[event["tid"]],
                event["name"].removeprefix("bucket "),
                ha="center",
                va="center",
                color="white",
                fontsize=7,
            )
    rows.set_ylabel("rows")
    samples.set_yticks(range(len(lanes)), [f"sample {lane}" for lane in lanes], fontsize=7)
    samples.invert_yaxis()
    samples.set_xlabel("ms")
    samples.set_xlim(0, args.seconds * 1e3)
    for axes in (rows, samples):
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in COLORS.items()],
        loc="upper center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    figure.savefig(args.picture, bbox_inches="tight", dpi=90)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path, help="its name says the format: .svg, .png")
    parser.add_argument("--start", type=float, default=0.0, help="seconds into the trace")
    parser.add_argument("--seconds", type=float, default=1.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
