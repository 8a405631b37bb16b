# SPDX-License-Identifier: Apache-2.0
"""Looks at pictures and says what is in them, by image analysis alone: no trained model.

Objects are connected patches of object-coloured pixels; a patch's colour is its commonest, its
shape the outline that overlaps it best, its place its centre of mass. Letters are cells of ink,
each compared with the font.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from draw import INK, STRIPE_SHADE, distances
from font import HEIGHT, WIDTH, glyphs
from scenes import (
    BACKGROUNDS,
    COLORS,
    LETTER_SCALE,
    MAX_LETTERS,
    PITCH,
    RADIUS,
    SHAPES,
    SIZE,
    STRIP,
    Scenes,
)

MAX_OBJECTS = 3  # one more than any caption asks for, so that a stray one shows
MIN_AREA = 150  # pixels; the smallest object, a small star, has 690
MIN_COLOR_SHARE = 0.7  # of an object's pixels
MIN_OVERLAP = 0.72  # intersection over union with the shape's own outline
MIN_LETTER_MATCH = 0.6  # correlation with the letter's cells
GRID = 48  # pixels a side of the outlines that shapes are compared in


@dataclass
class Verdict:
    """What was right, [N] bool each; `word` means something only where `worded`."""

    color: torch.Tensor
    shape: torch.Tensor
    place: torch.Tensor
    size: torch.Tensor
    background: torch.Tensor
    word: torch.Tensor
    worded: torch.Tensor
    letters: torch.Tensor  # [N] share of the word's letters that are right

    @property
    def scene(self) -> torch.Tensor:
        """Colour, shape and place are all right, of every object, and there is no other object."""
        return self.color & self.shape & self.place


def judge(picture_NCHW: torch.Tensor, scenes: Scenes) -> Verdict:
    """Judge pictures (0..1) against the scenes that were asked for, on the pictures' device."""
    scenes = scenes.to(picture_NCHW.device)
    found = find_objects(picture_NCHW, scenes)
    wanted_count = 1 + scenes.pair.long()
    count_is_right = (found.area > MIN_AREA).sum(1) == wanted_count

    # two found objects go to the two wanted ones the way round that fits better
    straight, crossed = _fits(found, scenes, (0, 1)), _fits(found, scenes, (1, 0))
    swap = scenes.pair & (_score(crossed) > _score(straight))
    color, shape, size = (torch.where(swap[:, None], b, a) for a, b in zip(straight, crossed))
    ignore_second = torch.stack([torch.zeros_like(scenes.pair), ~scenes.pair], dim=1)
    color, shape, size = ((part | ignore_second).all(1) for part in (color, shape, size))

    order = torch.stack([swap.long(), 1 - swap.long()], dim=1)
    center = torch.gather(found.center[:, :2], 1, order[:, :, None].expand(-1, -1, 2))
    place = torch.where(scenes.pair, _relation_holds(center, scenes), _is_at(center[:, 0], scenes))
    word, letters = read_words(picture_NCHW, scenes)
    return Verdict(
        color=color & count_is_right,
        shape=shape & count_is_right,
        place=place & count_is_right,
        size=size & count_is_right,
        background=_background(picture_NCHW) == scenes.background,
        word=word,
        worded=scenes.num_letters > 0,
        letters=letters,
    )


# --- objects ------------------------------------------------------------------------------------


@dataclass
class Found:
    """The MAX_OBJECTS largest objects, largest first: [N, MAX_OBJECTS] each."""

    area: torch.Tensor  # 0 where there are fewer
    color: torch.Tensor  # -1 where no colour has its share
    shape: torch.Tensor  # -1 where no outline fits
    radius: torch.Tensor  # of a circle with the same area
    center: torch.Tensor  # [..., 2] as (x, y), pixels


def find_objects(picture_NCHW: torch.Tensor, scenes: Scenes) -> Found:
    color_NHW = _object_colors(picture_NCHW)
    top, rows = scenes.free_area()
    row = torch.arange(SIZE, device=picture_NCHW.device)[None]
    free = (row >= top[:, None]) & (row < (top + rows)[:, None])
    is_object = (color_NHW >= 0) & free[:, :, None]
    is_object = _opened(is_object)
    label_NHW = _labels(is_object)
    area_of_label = torch.zeros(len(scenes), SIZE * SIZE + 1, device=picture_NCHW.device)
    area_of_label.scatter_add_(1, label_NHW.flatten(1), is_object.flatten(1).float())
    area_of_label[:, 0] = 0
    area, label = area_of_label.topk(MAX_OBJECTS, dim=1)

    colors, shapes, centers = [], [], []
    for k in range(MAX_OBJECTS):
        mask = is_object & (label_NHW == label[:, k, None, None])
        pixels = mask.sum((1, 2)).clamp(min=1)
        counts = torch.stack(
            [(mask & (color_NHW == c)).sum((1, 2)) for c in range(len(COLORS))], dim=1
        )
        share, color = (counts / pixels[:, None]).max(1)
        colors.append(torch.where(share >= MIN_COLOR_SHARE, color, -1))
        x = (mask.sum(1) * (row + 0.5)).sum(1) / pixels
        y = (mask.sum(2) * (row + 0.5)).sum(1) / pixels
        centers.append(torch.stack([x, y], dim=1))
        shapes.append(_shape_of(mask))
    return Found(
        area=area,
        color=torch.stack(colors, 1),
        shape=torch.stack(shapes, 1),
        radius=(area / torch.pi).sqrt(),
        center=torch.stack(centers, 1),
    )


def _object_colors(picture_NCHW: torch.Tensor) -> torch.Tensor:
    """[N, H, W]: the nearest object colour, -1 where a background or the ink is nearer."""
    device = picture_NCHW.device
    grounds = [torch.tensor(rgb) / 255 for rgb in BACKGROUNDS.values()]
    grounds += [ground * STRIPE_SHADE for ground in grounds] + [torch.tensor(INK) / 255]
    objects = [torch.tensor(rgb) / 255 for rgb in COLORS.values()]
    table = torch.stack(objects + grounds).to(device)
    distance = torch.cdist(picture_NCHW.permute(0, 2, 3, 1).reshape(-1, 3), table)
    nearest = distance.argmin(1).view(len(picture_NCHW), SIZE, SIZE)
    return torch.where(nearest < len(objects), nearest, -1)


def _opened(mask_NHW: torch.Tensor) -> torch.Tensor:
    """Without threads thinner than three pixels, such as the soft edges of letters."""
    mask = mask_NHW[:, None].float()
    eroded = -F.max_pool2d(-mask, 3, stride=1, padding=1)
    return (F.max_pool2d(eroded, 3, stride=1, padding=1) * mask)[:, 0] > 0


def _labels(mask_NHW: torch.Tensor) -> torch.Tensor:
    """[N, H, W] from 1: equal inside a connected patch, different between patches; 0 outside."""
    mask = mask_NHW.float()
    number = torch.arange(1, SIZE * SIZE + 1, device=mask.device, dtype=torch.float32)
    label = number.view(1, SIZE, SIZE) * mask
    while True:
        before = label
        for _ in range(16):  # the highest number spreads through its patch
            label = F.max_pool2d(label[:, None], 3, stride=1, padding=1)[:, 0] * mask
        if torch.equal(before, label):
            return label.long()


def _shape_of(mask_NHW: torch.Tensor) -> torch.Tensor:
    """[N]: the shape whose outline overlaps the mask best when both fill their bounding box."""
    outlines = _outlines(mask_NHW.device)
    box = torch.stack([*_extent(mask_NHW.any(1)), *_extent(mask_NHW.any(2))], dim=1).float()
    left, right, top, bottom = box.unbind(1)  # inclusive
    grid = (torch.arange(GRID, device=mask_NHW.device) + 0.5) / GRID
    x = left[:, None] + grid * (right - left + 1)[:, None]
    y = top[:, None] + grid * (bottom - top + 1)[:, None]
    crop = _crop(mask_NHW.float(), x, y) > 0.5
    both = (crop[:, None] & outlines[None]).sum((2, 3))
    either = (crop[:, None] | outlines[None]).sum((2, 3))
    # a bounding box far from square is none of these shapes
    ratio = (right - left + 1) / (bottom - top + 1)
    overlap, shape = (both / either).max(1)
    return torch.where((overlap >= MIN_OVERLAP) & (ratio > 0.75) & (ratio < 1.33), shape, -1)


def _outlines(device) -> torch.Tensor:
    """[SHAPES, GRID, GRID] bool: each shape filling its bounding box."""
    half = 96
    places = torch.arange(-half, half, device=device) + 0.5
    shape = torch.arange(len(SHAPES), device=device)
    radius = torch.full((len(SHAPES), 1, 1), 64.0, device=device)
    inside = distances(places[None, None, :], places[None, :, None], radius, shape) < 0
    left, right = _extent(inside.any(1))
    top, bottom = _extent(inside.any(2))
    grid = (torch.arange(GRID, device=device) + 0.5) / GRID
    x = left[:, None] + grid * (right - left + 1)[:, None]
    y = top[:, None] + grid * (bottom - top + 1)[:, None]
    return _crop(inside.float(), x, y) > 0.5


def _extent(line_NL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last place that is True; 0 and 0 where none is."""
    length = line_NL.shape[1]
    first = line_NL.float().argmax(1)
    last = length - 1 - line_NL.flip(1).float().argmax(1)
    return first, torch.where(line_NL.any(1), last, first)


def _crop(image_NHW: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Values at the pixel positions x ([N, W]) by y ([N, H]), bilinear."""
    height, width = image_NHW.shape[-2:]
    x = (2 * x / width - 1)[:, None, :].expand(-1, y.shape[1], -1)
    y = (2 * y / height - 1)[:, :, None].expand(-1, -1, x.shape[2])
    return F.grid_sample(image_NHW[:, None], torch.stack([x, y], -1), align_corners=False)[:, 0]


def _fits(found: Found, scenes: Scenes, order: tuple[int, int]):
    """Colour, shape and size of found objects `order` against the wanted ones: [N, 2] each."""
    order = list(order)
    is_large = found.radius[:, order] > _size_bounds(scenes.shape)
    return (
        found.color[:, order] == scenes.color,
        found.shape[:, order] == scenes.shape,
        is_large.long() == scenes.size,
    )


def _score(fits) -> torch.Tensor:
    color, shape, size = fits
    return (3 * color.long() + 3 * shape.long() + size.long()).sum(1)


def _size_bounds(shape: torch.Tensor) -> torch.Tensor:
    """The radius, of a circle with the same area, half way from small to large."""
    outlines = _outlines(shape.device)
    half = 96
    places = torch.arange(-half, half, device=shape.device) + 0.5
    index = torch.arange(len(SHAPES), device=shape.device)
    radius = torch.full((len(outlines), 1, 1), sum(RADIUS) / 2, device=shape.device)
    inside = distances(places[None, None, :], places[None, :, None], radius, index) < 0
    return (inside.sum((1, 2)) / torch.pi).sqrt()[shape]


def _relation_holds(center_N22: torch.Tensor, scenes: Scenes) -> torch.Tensor:
    dx, dy = (center_N22[:, 0] - center_N22[:, 1]).unbind(1)
    ahead = torch.stack([-dx, dx, -dy, dy], dim=1)  # in the order of RELATIONS
    aside = torch.stack([dy, dy, dx, dx], dim=1).abs()
    pick = scenes.relation[:, None]
    ahead, aside = ahead.gather(1, pick)[:, 0], aside.gather(1, pick)[:, 0]
    return ahead > aside


def _is_at(center_N2: torch.Tensor, scenes: Scenes) -> torch.Tensor:
    top, rows = scenes.free_area()
    column = (center_N2[:, 0] * 3 / SIZE).long().clamp(0, 2)
    row = ((center_N2[:, 1] - top) * 3 / rows).long().clamp(0, 2)
    return row * 3 + column == scenes.position


def _background(picture_NCHW: torch.Tensor) -> torch.Tensor:
    """[N]: the background whose two shades most pixels are nearest to."""
    base = torch.tensor(list(BACKGROUNDS.values()), device=picture_NCHW.device) / 255
    table = torch.cat([base, base * STRIPE_SHADE])
    distance = torch.cdist(picture_NCHW[:, :, ::4, ::4].permute(0, 2, 3, 1).flatten(1, 2), table)
    nearest = distance.argmin(2) % len(base)
    return torch.stack([(nearest == b).sum(1) for b in range(len(base))], dim=1).argmax(1)


# --- words --------------------------------------------------------------------------------------


def read_words(picture_NCHW: torch.Tensor, scenes: Scenes) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] bool whether the word reads as asked, and [N] the share of its letters that do.

    The word's corner is the ink's; how many letters there are follows from the ink's width.
    """
    n, device = len(picture_NCHW), picture_NCHW.device
    top = torch.where(scenes.place == 0, 0, SIZE - STRIP)
    row = top[:, None] + torch.arange(STRIP, device=device)
    strip = picture_NCHW.mean(1).gather(1, row[:, :, None].expand(-1, -1, SIZE))
    ink = (0.45 - strip).clamp(min=0) > 0
    # a line with under two cells' worth of ink is a speck
    left, right = _extent(ink.sum(1) >= LETTER_SCALE - 1)
    first, last = _extent(ink.sum(2) >= LETTER_SCALE - 1)
    width, height = (right - left + 1).float(), (last - first + 1).float()
    count = ((width + LETTER_SCALE) / PITCH).round().long()
    count_is_right = (count == scenes.num_letters) & ((height - HEIGHT * LETTER_SCALE).abs() < 6)

    # an I or a J at the end leaves its outer cells free: the pitch is the font's, not the ink's
    cell_x = torch.arange(WIDTH, device=device) * LETTER_SCALE + LETTER_SCALE / 2
    cell_y = torch.arange(HEIGHT, device=device) * LETTER_SCALE + LETTER_SCALE / 2
    letter = torch.arange(MAX_LETTERS, device=device) * PITCH
    font = F.normalize((glyphs().to(device) - 0.5).flatten(1), dim=1)
    blurred = F.avg_pool2d(ink.float()[:, None], 3, stride=1, padding=1)[:, 0]
    best = torch.full((n, MAX_LETTERS), -1.0, device=device)
    read = torch.full((n, MAX_LETTERS), -1, device=device)
    total = torch.full((n,), -1.0, device=device)
    shown = torch.arange(MAX_LETTERS, device=device) < scenes.num_letters[:, None]
    for dx in range(-4, 5, 2):
        for dy in range(-4, 5, 2):
            x = left[:, None] + dx + (letter[:, None] + cell_x).flatten()
            y = first[:, None] + dy + cell_y
            cells = _crop(blurred, x, y).view(n, HEIGHT, MAX_LETTERS, WIDTH)
            cells = F.normalize(cells.permute(0, 2, 1, 3).flatten(2) - 0.5, dim=2)
            match, letters = (cells @ font.T).max(2)
            mean = (match * shown).sum(1) / shown.sum(1).clamp(min=1)
            better = mean > total
            total = torch.where(better, mean, total)
            best = torch.where(better[:, None], match, best)
            read = torch.where(better[:, None], letters, read)
    right_letters = (read == scenes.letters) & (best >= MIN_LETTER_MATCH) & shown
    share = right_letters.sum(1) / shown.sum(1).clamp(min=1)
    return (right_letters | ~shown).all(1) & count_is_right & (scenes.num_letters > 0), share
