# SPDX-License-Identifier: Apache-2.0
"""Puts the trained parts together as a checkpoint in diffusers' layout, weights in 16 bits."""

import json
from pathlib import Path

import diffusers
import torch
from parts import (
    make_ar_model,
    make_dit,
    make_glyph_encoder,
    make_glyph_tokenizer,
    make_processor,
    make_scheduler,
    make_tokenizer,
)


def export(vae: Path, ar: Path, dit: Path, output: Path) -> None:
    """Write `output` from what train_vae, train_ar and train_dit left."""
    tokenizer = make_tokenizer()
    language = make_ar_model(tokenizer)
    language.load_state_dict(torch.load(ar, map_location="cpu"))
    transformer, glyph_encoder = make_dit(), make_glyph_encoder()
    trained = torch.load(dit, map_location="cpu")
    transformer.load_state_dict(trained["dit"])
    glyph_encoder.load_state_dict(trained["glyph"])
    components = {
        "processor": make_processor(tokenizer),
        "vision_language_encoder": language,
        "tokenizer": make_glyph_tokenizer(),
        "text_encoder": glyph_encoder,
        "transformer": transformer,
        "vae": diffusers.AutoencoderKL.from_pretrained(vae),
        "scheduler": make_scheduler(),
    }
    index = {
        "_class_name": "GlmImagePipeline",
        "_diffusers_version": diffusers.__version__,
    }
    for name, component in sorted(components.items()):
        if isinstance(component, torch.nn.Module):
            component = component.half()
        component.save_pretrained(output / name)
        library = type(component).__module__.partition(".")[0]
        index[name] = [library, type(component).__name__]
    (output / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name in ("vision_language_encoder", "text_encoder"):
        # the file's width is not the width to compute in: transformers would take it for that
        _say_fp32(output / name / "config.json")
    config = output / "vae" / "config.json"
    kept = json.loads(config.read_text())
    del kept["_name_or_path"]  # the folder of the part
    config.write_text(json.dumps(kept, indent=2) + "\n")


def _say_fp32(config: Path) -> None:
    text = config.read_text().replace('"float16"', '"float32"')
    config.write_text(text)
