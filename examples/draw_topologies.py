"""Draws docs/images/topologies.svg: the four ways to run GLM-Image.

    python examples/draw_topologies.py docs/images/topologies.svg
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "topologies", "svg.fonttype": "none", "font.size": 8})

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

AR, DIT, ROUTE = "#dbe9f6", "#e2f0d9", "#f2f2f2"

# panel: title, boxes (name, x, y, colour), arrows (from, to, label)
PANELS = [
    (
        "(a) one process",
        [("AR + DiT", 1, 1, DIT)],
        [],
    ),
    (
        "(b) AR server + one diffusion server",
        [("AR server\nTP", 2, 1, AR), ("diffusion\nserver, SP", 0, 1, DIT)],
        [("diffusion\nserver, SP", "AR server\nTP", "prompt / tokens")],
    ),
    (
        "(c) AR server + head + denoisers",
        [
            ("AR server\nTP", 2, 1.6, AR),
            ("head", 0, 1.6, ROUTE),
            ("denoiser", 0, 0.2, DIT),
            ("denoiser ", 2, 0.2, DIT),
        ],
        [
            ("head", "AR server\nTP", "prompt / tokens"),
            ("head", "denoiser", "tokens"),
            ("head", "denoiser ", "tokens"),
        ],
    ),
    (
        "(d) AR servers behind a router",
        [
            ("diffusion\nserver", -0.3, 1, DIT),
            ("router", 1.1, 1, ROUTE),
            ("AR server", 2.5, 1.6, AR),
            ("AR server ", 2.5, 0.4, AR),
        ],
        [
            ("diffusion\nserver", "router", ""),
            ("router", "AR server", ""),
            ("router", "AR server ", ""),
        ],
    ),
]


def draw(axes, title, boxes, arrows) -> None:
    axes.set(xlim=(-1.0, 3.2), ylim=(-0.4, 2.3), title=title)
    axes.set_axis_off()
    places = {}
    for name, x, y, colour in boxes:
        places[name] = (x, y)
        box = FancyBboxPatch(
            (x - 0.45, y - 0.25), 0.9, 0.5, boxstyle="round,pad=0.05", fc=colour, ec="#555555"
        )
        axes.add_patch(box)
        axes.text(x, y, name.strip(), ha="center", va="center")
    for start, end, label in arrows:
        (x0, y0), (x1, y1) = places[start], places[end]
        dx, dy = (0.52 if x1 > x0 else 0), (-0.32 if y1 < y0 and x1 == x0 else 0)
        style = dict(arrowstyle="<->", color="#555555")
        axes.annotate("", (x1 - dx, y1 - dy), (x0 + dx, y0 + dy), arrowprops=style)
        if label:
            axes.text((x0 + x1) / 2, (y0 + y1) / 2 + 0.08, label, ha="center", fontsize=6.5)


def main() -> None:
    figure, grid = plt.subplots(2, 2, figsize=(7.5, 4.4))
    for axes, panel in zip(grid.flat, PANELS):
        draw(axes, *panel)
    figure.tight_layout()
    figure.savefig(Path(sys.argv[1]), metadata={"Date": None})


if __name__ == "__main__":
    main()
