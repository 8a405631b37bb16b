# SPDX-License-Identifier: Apache-2.0
"""Trains the AR model to write prior tokens: a caption in, the preview's and the picture's out."""

import torch
import torch.nn.functional as F
from draw import draw
from parts import (
    GRID,
    IMAGE_START,
    PREVIEW_GRID,
    image_token,
    make_ar_model,
    make_processor,
    make_tokenizer,
)
from scenes import captions, sample_scenes
from train_codebook import encode, load_codebook
from training import DEVICE, Clock, Trainer, autocast, parse_args, save, wait_for

PREVIEW, PICTURE = PREVIEW_GRID**2, GRID**2


def main() -> None:
    args = parse_args(
        __doc__,
        ["codebook", "output"],
        **dict(seconds=620.0, scenes=200_000, batch=256, peak=1.5e-3, seed=3),
    )
    tokenizer = make_tokenizer()
    model = make_model(tokenizer).to(DEVICE)
    language, head = model.model.language_model, model.lm_head
    text, pictures = make_data(tokenizer, args.scenes, args.seed)
    compile_layers(language, head, tokenizer.pad_token_id, text)
    load_codebook(model.model, wait_for(args.codebook))
    with autocast():
        codes = torch.cat([written(model.model, part) for part in pictures.split(256)])
    del pictures
    trainer = Trainer([language, head], peak=args.peak)
    clock = Clock("ar", args.seconds, trainer, state=args.output.with_suffix(".state"))
    for rate in clock:
        pick = torch.randint(len(text), (args.batch,), device=DEVICE)
        loss = code_loss(language, head, tokenizer.pad_token_id, text[pick], codes[pick].long())
        trainer.step(loss.mean(), rate)
        clock.note(loss[:, :PREVIEW].mean(), loss[:, PREVIEW:].mean())
    trainer.use_average()
    save(model.state_dict(), args.output)
    clock.forget()


def compile_layers(language, head, pad: int, text) -> None:
    """Compiled layers where that works."""
    if DEVICE.type != "cuda":
        return
    for layer in language.layers:
        layer.compile()
    try:
        codes = torch.zeros(256, PREVIEW + PICTURE, dtype=torch.long, device=DEVICE)
        code_loss(language, head, pad, text[:256], codes).mean().backward()
    except Exception as error:  # no C compiler, no Triton
        print(f"ar: not compiled: {type(error).__name__}: {str(error)[:300]}", flush=True)
        for layer in language.layers:
            layer._compiled_call_impl = None


def make_model(tokenizer):
    model = make_ar_model(tokenizer)
    # small at first, as language models start
    for parameter in [*model.model.language_model.parameters(), model.lm_head.weight]:
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.04)
    return model


def make_data(tokenizer, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of the prompts, padded on the left, and pictures in 8 bits."""
    generator = torch.Generator().manual_seed(seed)
    scenes = sample_scenes(count, generator)
    processor = make_processor(tokenizer)
    rows = tokenizer.backend_tokenizer.encode_batch(
        [prompt_text(processor, caption) for caption in captions(scenes)], add_special_tokens=False
    )
    longest = max(len(row.ids) for row in rows)
    pad = tokenizer.pad_token_id
    text = torch.tensor([[pad] * (longest - len(row.ids)) + row.ids for row in rows])
    pictures = [
        (draw(scenes[start : start + 256].to(DEVICE)) * 255).round().byte()
        for start in range(0, count, 256)
    ]
    print(f"ar: {count} scenes, prompts of up to {longest} tokens", flush=True)
    return text.to(DEVICE), torch.cat(pictures)


def written(model, picture_NCHW: torch.Tensor) -> torch.Tensor:
    """[N, tokens]: what the AR model should write, the preview's codes and the picture's."""
    picture_NCHW = picture_NCHW.float() / 255
    codes = [encode(model, picture_NCHW, grid) for grid in (PREVIEW_GRID, GRID)]
    return torch.cat(codes, dim=1).short()


def prompt_text(processor, caption: str) -> str:
    """What GlmImageProcessor makes of a caption, as text."""
    return (
        f"[gMASK]<sop><|user|>\n{caption}<sop>{GRID} {GRID}<eop>"
        f"<sop>{PREVIEW_GRID} {PREVIEW_GRID}<eop>{image_token(IMAGE_START)}"
    )


def code_loss(language, head, pad: int, text: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """[N, tokens] cross entropy of each code after the prompt and the codes before it."""
    shown = text != pad
    tokens = torch.cat([text, codes[:, :-1]], dim=1)
    mask = torch.cat([shown, torch.ones_like(codes[:, :-1], dtype=torch.bool)], dim=1)
    with autocast():
        hidden = language(
            inputs_embeds=language.embed_tokens(tokens),
            attention_mask=mask,
            position_ids=positions(shown)[:, :, : tokens.shape[1]],
            use_cache=False,
        ).last_hidden_state
        logits = head(hidden[:, text.shape[1] - 1 :])
    loss = F.cross_entropy(logits.float().flatten(0, 1), codes.flatten(), reduction="none")
    return loss.view_as(codes)


def positions(shown: torch.Tensor) -> torch.Tensor:
    """[3, N, tokens] as GlmImageModel counts them: text in a line, codes in their grids."""
    line = (shown.long().cumsum(1) - 1).masked_fill(~shown, 1)
    length = shown.sum(1)[:, None]
    parts = [line[None].expand(3, -1, -1)]
    base = length
    for grid in (PREVIEW_GRID, GRID):
        cell = torch.arange(grid, device=shown.device)
        down, across = cell.repeat_interleave(grid)[None], cell.repeat(grid)[None]
        parts.append(torch.stack([(base + 0 * down), base + down, base + across]))
        base = base + grid
    return torch.cat(parts, dim=2)

if __name__ == "__main__":
    main()
