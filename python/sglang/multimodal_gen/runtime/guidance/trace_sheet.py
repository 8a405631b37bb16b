# SPDX-License-Identifier: Apache-2.0
"""The contact sheet of a guidance trace: a column a step, a row each for what was and might be."""

from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

THUMBNAIL = 96  # pixels of the longer side
ROWS = {
    "latents": "latents",
    "guided": "guided",
    "cond": "cond alone",
    "uncond": "uncond alone",
}
# A guided prediction this far from what its branches combine to, in units of their difference, is
# wrong: rounding in bf16 stays below a third of it, swapped halves give at least 1.
ERROR_LIMIT = 0.5

_LABELS, _HEADER, _GAP = 92, 46, 3
_INK, _PAPER, _WRONG = (40, 44, 52), (255, 255, 255), (200, 30, 30)


@dataclass
class TracedStep:
    """A row of the trace's data and its pictures, ``[3, H, W]`` in 0..1 by the names of `ROWS`."""

    data: dict[str, Any]
    pictures: dict[str, torch.Tensor]

    @property
    def is_wrong(self) -> bool:
        error = self.data["error"]
        return error is not None and error > ERROR_LIMIT


def draw_sheet(steps: list[TracedStep], curve: Any) -> Image.Image:
    """Draw the sheet; a step whose prediction is not what its branches combine to stands in red."""
    thumbnails = [
        {name: _thumbnail(picture) for name, picture in step.pictures.items()} for step in steps
    ]
    width, height = thumbnails[0]["latents"].size
    cell_width = max(width, 72) + _GAP
    title = f"guidance trace   curve {curve}"[:160]
    sheet = Image.new(
        "RGB",
        (_LABELS + cell_width * len(steps), _HEADER + 18 + (height + _GAP) * len(ROWS)),
        _PAPER,
    )
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    pen.text((4, 2), title, _INK, font)
    for row, label in enumerate(ROWS.values()):
        top = _HEADER + 18 + row * (height + _GAP)
        pen.text((4, top + height // 2 - 6), label, _INK, font)
    for column, (step, pictures) in enumerate(zip(steps, thumbnails)):
        left = _LABELS + column * cell_width
        data, color = step.data, _WRONG if step.is_wrong else _INK
        pen.text((left, 18), f"step {data['step']}  b{data['bucket']}", color, font)
        pen.text((left, 32), f"scale {data['scale']:.4g}", color, font)
        if data["shown_scale"] is not None:
            pen.text((left, 46), f"shows {data['shown_scale']:.3g}", color, font)
        for row, name in enumerate(ROWS):
            if name in pictures:
                sheet.paste(pictures[name], (left, _HEADER + 18 + row * (height + _GAP)))
        if step.is_wrong:
            box = (left - 2, 16, left + cell_width - 3, sheet.height - 1)
            pen.rectangle(box, outline=_WRONG, width=2)
    return sheet


def _thumbnail(picture_CHW: torch.Tensor) -> Image.Image:
    pixels = (picture_CHW.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels)
    scale = THUMBNAIL / max(image.size)
    return image.resize([max(1, round(side * scale)) for side in image.size])
