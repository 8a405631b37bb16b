# SPDX-License-Identifier: Apache-2.0
"""Prints the tables of docs/curves.md from what benchmark/eval_guidance.py measured.

python benchmark/curve_markdown.py docs/data/curves.csv
"""

import csv
import sys
from collections.abc import Callable

from common import markdown_table

Row = dict[str, str]


def main() -> None:
    with open(sys.argv[1]) as file:
        groups: dict[str, list[Row]] = {}
        for row in csv.DictReader(file):
            groups.setdefault(row["group"], []).append(row)
    for title, table in tables(groups).items():
        print(f"## {title}\n\n{table}\n")


def tables(groups: dict[str, list[Row]]) -> dict[str, str]:
    matched = sorted(groups["matched mean"], key=lambda row: -float(row["change"]))
    buckets = {name: rows for name, rows in groups.items() if name.startswith("buckets ")}
    return {
        "constant scales": table(
            groups["constant"],
            {
                "constant scale": lambda row: row["label"],
                "everything right": share,
                **{name: number(name, 3) for name in ("scene", "color", "shape", "place", "word")},
                "Fréchet": number("frechet", 2),
                "chroma": number("saturation", 3),
            },
        ),
        "the same mean scale": table(
            matched,
            {
                "curve": lambda row: f"`{row['curve']}`",
                "change, pictures in 100": change,
                "Fréchet": number("frechet", 2),
                "chroma": number("saturation", 3),
            },
        ),
        "buckets": table(
            sum(buckets.values(), []),
            {
                "curve": lambda row: row["group"].removeprefix("buckets "),
                "buckets": bucket_count,
                "change, pictures in 100": change,
                "Fréchet": number("frechet", 2),
                "drift": lambda row: number("drift", 2)(row) if row["drift"] else "0",
            },
        ),
        "intervals": intervals(groups["interval 1x"], groups["interval 1.5x"]),
        "fewer steps": table(
            groups["fewer steps"],
            {
                "steps": lambda row: row["steps"],
                "forwards": lambda row: row["forwards"],
                "change, pictures in 100": change,
                "Fréchet": number("frechet", 2),
            },
        ),
    }


def intervals(plain: list[Row], raised: list[Row]) -> str:
    """A line an interval: at the scale, and at one raised by half."""
    header = ["guided from-to", "forwards", "change", "Fréchet", "raised: change", "Fréchet"]
    cells = [change, number("frechet", 2)]
    rows = [
        [a["label"], a["forwards"], *(cell(row) for row in (a, b) for cell in cells)]
        for a, b in zip(plain, raised, strict=True)
    ]
    return markdown_table(header, rows)


def table(rows: list[Row], columns: dict[str, Callable[[Row], str]]) -> str:
    return markdown_table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def number(name: str, digits: int) -> Callable[[Row], str]:
    return lambda row: f"{float(row[name]):.{digits}f}"


def share(row: Row) -> str:
    value, low, high = (float(row[f"all_right{end}"]) for end in ("", "_low", "_high"))
    return f"{value:.3f} ({low:.3f}–{high:.3f})"


def change(row: Row) -> str:
    value, low, high = (100 * float(row[f"change{end}"]) for end in ("", "_low", "_high"))
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})".replace("-", "−")


def bucket_count(row: Row) -> str:
    if row["buckets"] == "0":
        return f"{row['steps']}, one a step"
    return row["buckets"] + (", mode `linear`" if row["mode"] == "linear" else "")


if __name__ == "__main__":
    main()
