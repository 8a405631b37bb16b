# SPDX-License-Identifier: Apache-2.0
"""The demo's contact sheet: a column a curve, its plot on top; a row a prompt."""

import io
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image

from sglang.multimodal_gen.tools.guidance_curve_plot import plot_curve

FRAME = "#6b7280"


def save_sheet(pictures, prompts: list[str], curves: list[str], path: Path, *, scale: float):
    """Draw `pictures` (of `demo.Picture`) to `path`."""
    plt.switch_backend("agg")
    by_place = {(picture.prompt, picture.curve): picture for picture in pictures}
    columns = len(curves)
    figure = plt.figure(figsize=(1.7 + 1.9 * columns, 2.1 + 1.95 * len(prompts)))
    grid = figure.add_gridspec(
        1 + len(prompts),
        1 + columns,
        width_ratios=[0.85] + [1] * columns,
        height_ratios=[0.8] + [1] * len(prompts),
        left=0.01,
        right=0.99,
        top=0.93,
        bottom=0.01,
        wspace=0.06,
        hspace=0.06,
    )
    plots = []
    for column, curve in enumerate(curves, start=1):
        answers = [by_place[prompt, curve] for prompt in prompts]
        axes = figure.add_subplot(grid[0, column])
        plot_curve(axes, answers[0].guidance, scale=scale)
        forwards = answers[0].guidance["forwards"]
        axes.set_title(curve, loc="left", fontsize=9, weight="bold", pad=15)
        axes.texts[-1].set(text=f"{sum(forwards.values())} forwards", fontsize=8)
        axes.tick_params(labelsize=6, pad=1)
        plots.append(axes)
        for row, answer in enumerate(answers, start=1):
            axes = figure.add_subplot(grid[row, column])
            axes.imshow(Image.open(io.BytesIO(answer.png)))
            axes.axis("off")
    low = min(axes.get_ylim()[0] for axes in plots)
    high = max(axes.get_ylim()[1] for axes in plots)
    for axes in plots:
        axes.set_ylim(low, high)
        axes.set_yticks([] if axes is not plots[0] else axes.get_yticks())
        axes.set_ylim(low, high)
    for row, prompt in enumerate(prompts, start=1):
        axes = figure.add_subplot(grid[row, 0])
        axes.axis("off")
        axes.text(0, 0.5, textwrap.fill(prompt, 20), fontsize=8, va="center", color=FRAME)
    figure.savefig(path, dpi=100, facecolor="white")
    plt.close(figure)
