# SPDX-License-Identifier: Apache-2.0
"""Trains the vision encoder and the codebook whose codes are the prior tokens.

Throw-away heads learn to tell colour and shape from the encoder's output, so that it has something
to say, and from each code alone, so that a code stands for one colour and one shape. A throw-away
decoder must tell from the codes what the picture looks like, with a bar in place of
the word, and, cell by cell, which colour and which shape of object covers it. So codes know where a
word stands but not how it is spelt: that is the glyph encoder's part. Codes follow their vectors
by moving averages; codes that nobody uses are moved to where vectors are.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from draw import draw, object_covers
from parts import CODES, GRID, PREVIEW_GRID, VISION_PATCH, make_ar_model, make_tokenizer
from scenes import COLORS, SHAPES, Scenes, sample_scenes
from torch import nn
from training import DEVICE, Clock, Trainer, autocast, parse_args, save

UNQUANTIZED_STEPS = 500  # before the codebook starts, so that it starts from good vectors
GRIDS = {GRID: 1.0, PREVIEW_GRID: 0.125}  # tokens a side: share of the batch that has them
# of pixels, colours and shapes by the decoder, way to the nearest code, heads on encoder and code
WEIGHTS = (1.0, 1.0, 2.0, 0.25, 1.0, 2.0)
CLASSES = (len(COLORS), len(SHAPES))
EMPTY_CELL = 0.2  # the weight of a cell without an object, of which there are ten times as many
CODE_HEAD_GAIN = 4.0  # code vectors are of length 1
LEAST_COVER = 0.04  # of a cell, for an object to count as being there


def main() -> None:
    args = parse_args(__doc__, ["output"], seconds=240.0, scenes=60_000, batch=512, seed=2)
    model = make_ar_model(make_tokenizer()).model.to(DEVICE)
    vision, quant_conv = model.visual, model.vqmodel.quant_conv
    code_vectors = model.vqmodel.quantize.embedding.weight.data
    decoder = CodeDecoder(code_vectors.shape[1]).to(DEVICE)
    book = Codebook(code_vectors)
    pools = make_pools(args.scenes, args.seed)
    heads = class_heads(quant_conv.in_channels)
    code_heads = class_heads(code_vectors.shape[1])
    trainer = Trainer([vision, quant_conv, heads, code_heads, decoder], peak=2e-3)
    weights = torch.tensor(WEIGHTS, device=DEVICE)
    for rate in (clock := Clock("codebook", args.seconds, trainer)):
        losses = []
        for grid, share in GRIDS.items():
            pool = pools[grid]
            pick = torch.randint(args.scenes, (round(args.batch * share),), device=DEVICE)
            labels = [part[pick].long().flatten() for part in (pool.color, pool.shape)]
            with autocast():
                hidden = features(vision, _signed(pool.seen[pick]), grid)
                vector = project(quant_conv, hidden)
                told = class_losses(heads, hidden, labels)
            quantized, drift = book.quantize(vector, learn=trainer.steps >= UNQUANTIZED_STEPS)
            with autocast():
                pixels, colors, shapes = decoder(quantized, grid)
                code_told = class_losses(code_heads, quantized * CODE_HEAD_GAIN, labels)
            wanted = F.unfold(_signed(pool.wanted[pick]), VISION_PATCH, stride=VISION_PATCH)
            error = pixels.float() - wanted.transpose(1, 2)
            pixel_loss = error.abs().mean() + 2 * error.square().mean()
            color_loss, shape_loss = map(class_loss, (colors, shapes), labels)
            losses.append(
                torch.stack([pixel_loss, color_loss, shape_loss, drift, told, code_told])
            )
        loss = torch.stack(losses)
        trainer.step((loss * weights).sum(), rate)
        clock.note(*loss.flatten())  # in the order of WEIGHTS, of either grid
    print(f"codebook: {book.in_use()} of {CODES} codes in use", flush=True)
    # the live weights, not averaged ones: the codebook has followed them
    save({"visual": vision.state_dict(), "vqmodel": model.vqmodel.state_dict()}, args.output)


@dataclass
class Pool:
    """Scenes as one grid sees them: pictures [N, 3, side, side] in 8 bits, labels a cell each."""

    seen: torch.Tensor
    wanted: torch.Tensor
    color: torch.Tensor
    shape: torch.Tensor


def make_pools(count: int, seed: int) -> dict[int, Pool]:
    scenes = sample_scenes(count, torch.Generator().manual_seed(seed))
    columns: dict[int, list[list[torch.Tensor]]] = {grid: [[], [], [], []] for grid in GRIDS}
    for start in range(0, count, 256):
        part = scenes[start : start + 256].to(DEVICE)
        pictures = [draw(part, letters=letters) for letters in (True, False)]
        for grid, parts in columns.items():
            small = [in_8_bits(shrink(picture, grid)) for picture in pictures]
            labels = [label.char() for label in cell_labels(part, grid)]
            for column, values in zip(parts, small + labels):
                column.append(values)
    return {grid: Pool(*map(torch.cat, parts)) for grid, parts in columns.items()}


def in_8_bits(picture: torch.Tensor) -> torch.Tensor:
    return ((picture + 1) * 127.5).round().byte()


def _signed(picture: torch.Tensor) -> torch.Tensor:
    return picture.float() / 127.5 - 1


def shrink(picture_NCHW: torch.Tensor, grid: int) -> torch.Tensor:
    """The picture as the vision encoder sees it for `grid` tokens a side: in -1..1."""
    side = grid * VISION_PATCH
    small = F.interpolate(picture_NCHW, (side, side), mode="bicubic", antialias=True)
    return small.clamp(0, 1) * 2 - 1


def class_heads(width: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, 1 + count) for count in CLASSES).to(DEVICE)


def class_losses(heads, hidden: torch.Tensor, labels: list[torch.Tensor]) -> torch.Tensor:
    return sum(class_loss(head(hidden), label) for head, label in zip(heads, labels))


def class_loss(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(logits.shape[-1], device=logits.device)
    weight[0] = EMPTY_CELL
    return F.cross_entropy(logits.float().flatten(0, 1), label, weight)


def features(vision, picture_NCHW: torch.Tensor, grid: int) -> torch.Tensor:
    """[N, grid * grid, width]: the encoder's own layers, many pictures at once.

    GlmImageVisionModel's forward takes pictures of mixed sizes and loops over them.
    """
    hidden = vision.patch_embed.proj(picture_NCHW)
    places = vision.embeddings.position_embedding.weight
    side = round(places.shape[0] ** 0.5)
    place = places.T.reshape(1, -1, side, side)
    hidden = hidden + F.interpolate(place, (grid, grid), mode="bilinear", align_corners=False)
    hidden = hidden.flatten(2).transpose(1, 2)
    for block in vision.blocks:
        attn = block.attn
        qkv = attn.qkv(block.norm1(hidden)).unflatten(2, (3, attn.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        hidden = hidden + attn.proj(mixed)
        hidden = hidden + block.mlp(block.norm2(hidden))
    return hidden


def project(quant_conv, hidden: torch.Tensor) -> torch.Tensor:
    """[N, grid * grid, embed_dim], of unit length."""
    vector = F.linear(hidden, quant_conv.weight[:, :, 0, 0], quant_conv.bias)
    return F.normalize(vector.float(), dim=2)


def nearest_codes(vector: torch.Tensor, code_vectors: torch.Tensor) -> torch.Tensor:
    return (vector @ F.normalize(code_vectors, dim=1).T).argmax(-1)


@torch.no_grad()
def encode(model, picture_NCHW: torch.Tensor, grid: int) -> torch.Tensor:
    """The prior tokens of pictures in 0..1: [N, grid * grid]. `model`: a GlmImageModel."""
    return encode_small(model, shrink(picture_NCHW, grid), grid)


@torch.no_grad()
def encode_small(model, picture_NCHW: torch.Tensor, grid: int, batch: int = 1024) -> torch.Tensor:
    """The same of pictures that `shrink` made, also in 8 bits."""
    codes = []
    for part in picture_NCHW.split(batch):
        if part.dtype == torch.uint8:
            part = _signed(part)
        vector = project(model.vqmodel.quant_conv, features(model.visual, part, grid))
        codes.append(nearest_codes(vector, model.vqmodel.quantize.embedding.weight))
    return torch.cat(codes)


def load_codebook(model, path: Path) -> None:
    """Into a GlmImageModel."""
    trained = torch.load(path, map_location="cpu")
    model.visual.load_state_dict(trained["visual"])
    model.vqmodel.load_state_dict(trained["vqmodel"])


class Codebook:
    """Unit vectors that follow the vectors quantized to them."""

    def __init__(self, code_vectors: torch.Tensor, keep: float = 0.99):
        self.code_vectors, self.keep = code_vectors, keep
        self.uses: torch.Tensor | None = None
        self.steps = 0

    def quantize(self, vector: torch.Tensor, *, learn: bool):
        """The nearest code's vector in each vector's place, straight through, and the distance."""
        if not learn:
            return vector, vector.new_zeros(())
        flat = vector.detach().flatten(0, 1)
        if self.uses is None:
            self._start(flat[torch.randint(len(flat), (CODES,), device=flat.device)])
        code = nearest_codes(flat, self.code_vectors)
        chosen = self.code_vectors[code].view_as(vector)
        drift = (vector - chosen).square().sum(-1).mean()
        uses = torch.zeros_like(self.uses).index_add_(0, code, torch.ones_like(flat[:, 0]))
        sums = torch.zeros_like(self.sums).index_add_(0, code, flat)
        self.uses.lerp_(uses, 1 - self.keep)
        self.sums.lerp_(sums, 1 - self.keep)
        self.steps += 1
        if self.steps % 50 == 0:
            self._revive(flat)
        self.code_vectors.copy_(F.normalize(self.sums, dim=1))
        return vector + (chosen - vector).detach(), drift

    def _start(self, code_vectors: torch.Tensor) -> None:
        self.code_vectors.copy_(code_vectors)
        self.uses = torch.ones(CODES, device=code_vectors.device)
        self.sums = code_vectors.clone()

    def _revive(self, flat: torch.Tensor) -> None:
        dead = self.uses < 0.5
        pick = flat[torch.randint(len(flat), (CODES,), device=flat.device)]
        self.sums = torch.where(dead[:, None], pick, self.sums)
        self.uses = torch.where(dead, 1.0, self.uses)

    def in_use(self) -> int:
        return 0 if self.uses is None else int((self.uses >= 0.5).sum())


class CodeDecoder(nn.Module):
    def __init__(self, code_width: int, width: int = 128):
        super().__init__()
        self.enter = nn.Linear(code_width, width)
        self.place = nn.Parameter(torch.randn(1, width, PREVIEW_GRID, PREVIEW_GRID) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(3)
        )
        self.pixels = nn.Linear(width, 3 * VISION_PATCH**2)
        self.colors = nn.Linear(width, 1 + len(COLORS))
        self.shapes = nn.Linear(width, 1 + len(SHAPES))

    def forward(self, code_vector: torch.Tensor, grid: int):
        place = F.interpolate(self.place, (grid, grid), mode="bilinear", align_corners=False)
        hidden = self.enter(code_vector) + place.flatten(2).transpose(1, 2)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.pixels(hidden), self.colors(hidden), self.shapes(hidden)


def cell_labels(scenes: Scenes, grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Colour and shape of the object that covers most of each cell, from 1; 0 where none does."""
    covers = torch.stack(object_covers(scenes), dim=1)
    cover, which = F.adaptive_avg_pool2d(covers, grid).flatten(2).max(1)
    there = cover > LEAST_COVER
    color = torch.where(there, scenes.color.gather(1, which) + 1, 0)
    return color, torch.where(there, scenes.shape.gather(1, which) + 1, 0)


if __name__ == "__main__":
    main()
