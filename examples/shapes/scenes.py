# SPDX-License-Identifier: Apache-2.0
"""What may stand in a picture, how a caption says it, and which captions training never sees."""

from dataclasses import dataclass, fields

import torch
from font import ALPHABET, WIDTH

SIZE = 192  # pixels a side
STRIP = 44  # pixels at the top or the bottom that belong to the word
LETTER_SCALE = 5  # pixels a cell of the font
PITCH = (WIDTH + 1) * LETTER_SCALE  # pixels from one letter to the next

SHAPES = ("circle", "square", "triangle", "diamond", "cross", "star")
SIZES = ("small", "large")
RADIUS = (22.0, 28.0)
COLORS = {
    "red": (214, 40, 40),
    "green": (38, 150, 70),
    "blue": (40, 80, 200),
    "yellow": (240, 195, 20),
    "purple": (130, 50, 160),
    "orange": (240, 115, 20),
}
BACKGROUNDS = {
    "white": (245, 245, 245),
    "gray": (200, 200, 206),
    "pink": (250, 205, 215),
    "mint": (195, 235, 215),
}
PATTERNS = ("plain", "striped")
POSITIONS = (
    *("top left", "top", "top right"),
    *("left", "center", "right"),
    *("bottom left", "bottom", "bottom right"),
)
RELATIONS = ("left of", "right of", "above", "below")
PLACES = ("top", "bottom")
MAX_LETTERS = 5
STRIPE_PERIOD = 24.0  # pixels
HELD_OUT_SHARE = 10  # one caption in ten


@dataclass
class Scenes:
    """N scenes. Integer fields index the tables above; floats are in pixels.

    Attributes:
        pair: [N] bool, two objects in a relation; else one object at a position.
        position: [N], of the only object.
        relation: [N], of the first object to the second.
        color, shape, size: [N, 2]; the second column counts only where `pair`.
        background, pattern: [N].
        letters: [N, MAX_LETTERS]; only the first `num_letters` count.
        num_letters: [N], 0 where there is no word.
        place: [N], of the word.
        center: [N, 2, 2] as (x, y); radius: [N, 2].
        word_corner: [N, 2] as (x, y), whole pixels; stripe_phase: [N].
    """

    pair: torch.Tensor
    position: torch.Tensor
    relation: torch.Tensor
    color: torch.Tensor
    shape: torch.Tensor
    size: torch.Tensor
    background: torch.Tensor
    pattern: torch.Tensor
    letters: torch.Tensor
    num_letters: torch.Tensor
    place: torch.Tensor
    center: torch.Tensor
    radius: torch.Tensor
    word_corner: torch.Tensor
    stripe_phase: torch.Tensor

    def __len__(self) -> int:
        return len(self.pair)

    def __getitem__(self, index) -> "Scenes":
        return Scenes(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def to(self, device) -> "Scenes":
        return Scenes(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    @staticmethod
    def cat(parts: list["Scenes"]) -> "Scenes":
        names = [f.name for f in fields(Scenes)]
        return Scenes(**{n: torch.cat([getattr(part, n) for part in parts]) for n in names})

    def free_area(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First row and number of rows ([N] each) that the word leaves to the objects."""
        worded = self.num_letters > 0
        top = torch.where(worded & (self.place == 0), STRIP, 0)
        return top, torch.where(worded, SIZE - STRIP, SIZE)

    def held_out(self) -> torch.Tensor:
        """[N] bool: the caption belongs to the tenth of scenes that training never sees."""
        where = torch.where(self.pair, 9 + self.relation, self.position)
        key = where * 8 + self.background * 2 + self.pattern
        for i in range(2):
            one = (self.color[:, i] * 6 + self.shape[:, i]) * 2 + self.size[:, i]
            key = key * 73 + torch.where(self.pair | (i == 0), one + 1, 0)
        return _bucket(key) == 0

    def held_out_word(self) -> torch.Tensor:
        """[N] bool: the same for words, split by themselves; False where there is none."""
        places = torch.arange(MAX_LETTERS)
        shown = places < self.num_letters[:, None]
        powers = 27**places
        key = torch.where(shown, (self.letters + 1) * powers, 0).sum(1)
        return (_bucket(key) == 0) & (self.num_letters > 0)


def _bucket(key: torch.Tensor) -> torch.Tensor:
    mixed = (key * 2654435761) % (1 << 32)
    return (mixed >> 13) % HELD_OUT_SHARE


def sample_scenes(count: int, generator: torch.Generator, *, held_out: bool = False) -> Scenes:
    """`count` random scenes, all from the training part or all from the held-out part."""
    parts, have = [], 0
    while have < count:
        scenes = _sample(max(1024, 100 * (count - have) if held_out else 2 * count), generator)
        out, word_out = scenes.held_out(), scenes.held_out_word()
        if held_out:  # as many without a word as training has
            thinned = torch.rand(len(scenes), generator=generator) < 1 / HELD_OUT_SHARE
            keep = out & (word_out | (scenes.num_letters == 0) & thinned)
        else:
            keep = ~out & ~word_out
        parts.append(scenes[keep])
        have += len(parts[-1])
    return Scenes.cat(parts)[:count]


def _sample(n: int, generator: torch.Generator) -> Scenes:
    def choice(high, *shape):
        return torch.randint(high, (n, *shape), generator=generator)

    def jitter(amount, *shape):
        return (torch.rand(n, *shape, generator=generator) * 2 - 1) * amount

    pair = choice(2).bool()
    num_letters = torch.where(choice(4) < 3, 3 + choice(MAX_LETTERS - 2), 0)
    size = choice(len(SIZES), 2)
    scenes = Scenes(
        pair=pair,
        position=choice(len(POSITIONS)),
        relation=choice(len(RELATIONS)),
        color=choice(len(COLORS), 2),
        shape=choice(len(SHAPES), 2),
        size=size,
        background=choice(len(BACKGROUNDS)),
        pattern=choice(len(PATTERNS)),
        letters=choice(len(ALPHABET), MAX_LETTERS),
        num_letters=num_letters,
        place=choice(len(PLACES)),
        center=torch.zeros(n, 2, 2),
        radius=torch.tensor(RADIUS)[size] + jitter(1.5, 2),
        word_corner=torch.zeros(n, 2),
        stripe_phase=torch.rand(n, generator=generator) * STRIPE_PERIOD,
    )
    scenes.center = _centers(scenes, jitter)
    width = num_letters * PITCH - LETTER_SCALE
    top = torch.where(scenes.place == 0, 0, SIZE - STRIP)
    scenes.word_corner = torch.stack(
        [((SIZE - width) / 2 + jitter(8)).round(), (top + 4.5 + jitter(2.4)).round()], dim=1
    )
    return scenes


def _centers(scenes: Scenes, jitter) -> torch.Tensor:
    top, rows = scenes.free_area()
    column, row = scenes.position % 3, scenes.position // 3
    alone_x = torch.tensor([40.0, 96.0, 152.0])[column] + jitter(5)
    alone_y = top + torch.tensor([0.225, 0.5, 0.775])[row] * rows + jitter(4)

    near, far = 0.25, 0.75  # of the axis that the relation runs along
    sideways = scenes.relation < 2
    first_is_near = (scenes.relation % 2 == 0)[:, None]
    along = torch.where(first_is_near, torch.tensor([near, far]), torch.tensor([far, near]))
    x = torch.where(sideways[:, None], along * SIZE + jitter(5, 2), SIZE / 2 + jitter(12, 2))
    middle = (rows * 0.5)[:, None] + jitter(10, 2)
    y = top[:, None] + torch.where(
        sideways[:, None], middle, along * rows[:, None] + jitter(3, 2)
    )
    pair = torch.stack([x, y], dim=2)
    alone = torch.stack([alone_x, alone_y], dim=1)[:, None].expand(-1, 2, -1)
    return torch.where(scenes.pair[:, None, None], pair, alone)


def captions(scenes: Scenes) -> list[str]:
    """What a user would type: `a small red circle left of a large blue star, ...`."""
    colors, backgrounds = list(COLORS), list(BACKGROUNDS)
    things = [
        [
            f"a {SIZES[size]} {colors[color]} {SHAPES[shape]}"
            for size, color, shape in zip(*(values[:, k].tolist() for values in looks))
        ]
        for looks in [(scenes.size, scenes.color, scenes.shape)]
        for k in range(2)
    ]
    columns = (
        *(scenes.pair, scenes.position, scenes.relation, scenes.background, scenes.pattern),
        *(scenes.num_letters, scenes.place),
    )
    texts = []
    for first, second, word, row in zip(
        *things, words(scenes), zip(*(column.tolist() for column in columns))
    ):
        pair, position, relation, background, pattern, num_letters, place = row
        where = f"{RELATIONS[relation]} {second}" if pair else f"at the {POSITIONS[position]}"
        text = f"{first} {where}, {PATTERNS[pattern]} {backgrounds[background]} background"
        if num_letters:
            text += f', the word "{word}" at the {PLACES[place]}'
        texts.append(text)
    return texts


def words(scenes: Scenes) -> list[str]:
    """The word of each scene, empty where there is none."""
    rows = zip(scenes.letters.tolist(), scenes.num_letters.tolist())
    return ["".join(ALPHABET[letter] for letter in letters[:count]) for letters, count in rows]
