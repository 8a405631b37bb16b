# SPDX-License-Identifier: Apache-2.0
"""Draws scenes, anti-aliased, many at a time on whatever device they lie on."""

import math

import torch
from font import HEIGHT, glyphs
from scenes import (
    BACKGROUNDS,
    COLORS,
    LETTER_SCALE,
    MAX_LETTERS,
    PITCH,
    SHAPES,
    SIZE,
    STRIPE_PERIOD,
    Scenes,
)

INK = (25, 25, 30)
STRIPE_SHADE = 0.86
STAR_WAIST = 0.45  # inner radius of the star over its outer radius


def draw(scenes: Scenes, *, letters: bool = True) -> torch.Tensor:
    """The pictures of N scenes as [N, 3, SIZE, SIZE] in 0..1.

    Without `letters` a gray bar stands where the word would.
    """
    device = scenes.center.device
    x = torch.arange(SIZE, device=device)[None, None, :] + 0.5  # [1, 1, W]
    background = _palette(BACKGROUNDS, device)[scenes.background]
    picture_NCHW = background[:, :, None, None].expand(-1, -1, SIZE, SIZE)
    offset = torch.remainder(x - scenes.stripe_phase[:, None, None], STRIPE_PERIOD)
    # a stripe is half a period wide; its two edges are a pixel soft
    stripe = _soft((offset - STRIPE_PERIOD * 0.75).abs() - STRIPE_PERIOD * 0.25)
    shade = 1 - (1 - STRIPE_SHADE) * stripe * scenes.pattern[:, None, None]
    picture_NCHW = picture_NCHW * shade[:, None]

    colors = _palette(COLORS, device)
    for k, cover in enumerate(object_covers(scenes)):
        color = colors[scenes.color[:, k]][:, :, None, None]
        picture_NCHW = picture_NCHW + (color - picture_NCHW) * cover[:, None]

    ink = torch.tensor(INK, device=device)[None, :, None, None] / 255
    amount = word_ink(scenes) if letters else word_bar(scenes) / 2
    return picture_NCHW + (ink - picture_NCHW) * amount[:, None]


def object_covers(scenes: Scenes) -> list[torch.Tensor]:
    """How much of each pixel either object covers: [N, SIZE, SIZE] in 0..1, twice."""
    places = torch.arange(SIZE, device=scenes.center.device) + 0.5
    covers = []
    for k in range(2):
        dx = places[None, None, :] - scenes.center[:, k, 0, None, None]
        dy = places[None, :, None] - scenes.center[:, k, 1, None, None]
        distance = distances(dx, dy, scenes.radius[:, k, None, None], scenes.shape[:, k])
        covers.append(_soft(distance) * (scenes.pair | (k == 0))[:, None, None])
    return covers


def distances(dx, dy, radius, shape) -> torch.Tensor:
    """Distance in pixels to the outline, below zero inside; y runs down. shape: [N] of SHAPES."""
    across, down = dx.abs(), dy.abs()
    corner = torch.maximum(across, down)
    fold = 2 * math.pi / 5
    angle = torch.remainder(torch.atan2(dx, -dy) + fold / 2, fold) - fold / 2
    from_center = torch.hypot(dx, dy)
    forms = {
        "circle": from_center - radius,
        "square": corner - 0.85 * radius,
        "triangle": torch.maximum(
            dy - 0.75 * radius, (across * 2 - dy - 1.05 * radius) / math.sqrt(5)
        ),
        "diamond": (across + down - 1.15 * radius) / math.sqrt(2),
        "cross": torch.maximum(corner - radius, torch.minimum(across, down) - 0.34 * radius),
        "star": _star(from_center, angle.abs(), radius * 1.12),
    }
    chosen = torch.zeros_like(from_center)
    for index, name in enumerate(SHAPES):
        chosen = torch.where((shape == index)[:, None, None], forms[name], chosen)
    return chosen


def _star(from_center, angle, radius):
    """Distance to the line from a tip to the waist beside it, in coordinates folded to one tip."""
    across, along = from_center * angle.sin(), from_center * angle.cos()
    tip_to_waist = (
        STAR_WAIST * math.sin(math.pi / 5),
        STAR_WAIST * math.cos(math.pi / 5) - 1,
    )
    length = math.hypot(*tip_to_waist)
    normal = (-tip_to_waist[1] / length, tip_to_waist[0] / length)
    return normal[0] * across + normal[1] * (along - radius)


def word_ink(scenes: Scenes) -> torch.Tensor:
    """How much ink the word leaves: [N, SIZE, SIZE] in 0..1."""
    device = scenes.center.device
    letter_NLHW = glyphs().to(device)[scenes.letters]
    letter_NLHW = letter_NLHW * (
        torch.arange(MAX_LETTERS, device=device) < scenes.num_letters[:, None]
    )[:, :, None, None].to(letter_NLHW)
    pixels = torch.arange(SIZE, device=device)[None]
    column = pixels - scenes.word_corner[:, :1].long()  # [N, W] from the first letter's left edge
    row = pixels - scenes.word_corner[:, 1:].long()
    letter, cell_x = column // PITCH, column % PITCH // LETTER_SCALE
    cell_y = row // LETTER_SCALE
    height, width = letter_NLHW.shape[-2:]
    inside = (
        ((letter >= 0) & (letter < MAX_LETTERS) & (cell_x < width))[:, None, :]
        & ((cell_y >= 0) & (cell_y < height))[:, :, None]
    )
    index_N = torch.arange(len(scenes), device=device)[:, None, None]
    ink = letter_NLHW[
        index_N,
        letter.clamp(0, MAX_LETTERS - 1)[:, None, :],
        cell_y.clamp(0, height - 1)[:, :, None],
        cell_x.clamp(0, width - 1)[:, None, :],
    ]
    return ink * inside


def word_bar(scenes: Scenes) -> torch.Tensor:
    """[N, SIZE, SIZE]: 1 from the word's first letter to its last."""
    pixels = torch.arange(SIZE, device=scenes.center.device)[None]
    left, top = scenes.word_corner[:, :1], scenes.word_corner[:, 1:]
    width = scenes.num_letters[:, None] * PITCH - LETTER_SCALE
    across = (pixels >= left) & (pixels < left + width)
    down = (pixels >= top) & (pixels < top + HEIGHT * LETTER_SCALE)
    return (down[:, :, None] & across[:, None, :]).float()


def _soft(distance: torch.Tensor) -> torch.Tensor:
    return (0.5 - distance).clamp(0, 1)


def _palette(table: dict[str, tuple[int, int, int]], device) -> torch.Tensor:
    return torch.tensor(list(table.values()), device=device) / 255
