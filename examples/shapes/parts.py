# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's own classes at the sizes that shapes need: about 8M parameters in all."""

import json
import re

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, GlmImageTransformer2DModel
from scenes import MAX_LETTERS, SIZE, captions, sample_scenes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    ByT5Tokenizer,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageProcessor,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from transformers.models.glm_image.image_processing_glm_image import GlmImageImageProcessor

CODES = 1024
IMAGE_START, IMAGE_END = CODES, CODES + 1
FIRST_TEXT_ID = CODES + 32

# Tokens a side, at 32 pixels a token: the picture's own, and those of the preview that GLM-Image's
# AR model writes first, which is always 16 x 16 for a square picture.
GRID = SIZE // 32
PREVIEW_GRID = 16
VISION_PATCH = 16  # the image processor halves a picture first
TEXT_WIDTH = 96
TOP_P = 0.8  # a rare code in the preview misleads all that follow
MAX_GLYPHS = MAX_LETTERS + 1  # bytes of a word and the end token

PAD, IMAGE, GRID_START, GRID_END = "<|endoftext|>", "<|image|>", "<sop>", "<eop>"
SPECIAL = (
    *(PAD, "[gMASK]", GRID_START, GRID_END, "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", IMAGE),
)


def image_token(code: int) -> str:
    return f"<|dit_token_{code}|>"


CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    + image_token(IMAGE_START)
    + IMAGE
    + image_token(IMAGE_END)
    + "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Ids in the real order: image codes, image start and end, spares, text, special tokens.

    Text is byte-level BPE learnt from captions without their quoted words, so a caption's words
    are one token each and a quoted word is one token a letter.
    """
    texts = captions(sample_scenes(4000, torch.Generator().manual_seed(0)))
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.train_from_iterator(
        (re.sub(r'"\w+"', '""', text) for text in texts),
        trainers.BpeTrainer(
            vocab_size=2000,
            min_frequency=20,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    learnt = json.loads(learner.to_str())["model"]
    text_words = sorted(learnt["vocab"], key=learnt["vocab"].get)
    image_tokens = [image_token(code) for code in range(FIRST_TEXT_ID)]
    words = image_tokens + text_words + list(SPECIAL)
    bpe = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[tuple(pair) for pair in learnt["merges"]],
        )
    )
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in image_tokens + list(SPECIAL)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=image_token(IMAGE_START),
        eos_token=image_token(IMAGE_END),
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
        extra_special_tokens={
            "image_token": IMAGE,
            "grid_bos_token": GRID_START,
            "grid_eos_token": GRID_END,
        },
    )


def make_processor(tokenizer: PreTrainedTokenizerFast) -> GlmImageProcessor:
    image_processor = GlmImageImageProcessor(
        patch_size=VISION_PATCH,
        temporal_patch_size=1,
        merge_size=1,
        size={"shortest_edge": 64 * 64, "longest_edge": 2048 * 2048},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return GlmImageProcessor(
        image_processor=image_processor, tokenizer=tokenizer, chat_template=CHAT_TEMPLATE
    )


def make_ar_model(tokenizer: PreTrainedTokenizerFast) -> GlmImageForConditionalGeneration:
    pad = tokenizer.pad_token_id
    model = GlmImageForConditionalGeneration(
        GlmImageConfig(
            text_config=dict(
                vocab_size=len(tokenizer),
                hidden_size=192,
                intermediate_size=384,
                num_hidden_layers=4,
                num_attention_heads=6,
                num_key_value_heads=2,
                max_position_embeddings=8192,
                vision_vocab_size=CODES,
                pad_token_id=pad,
                eos_token_id=IMAGE_END,
                rope_parameters=dict(
                    rope_type="default",
                    rope_theta=10000.0,
                    partial_rotary_factor=0.5,
                    mrope_section=[2, 3, 3],
                ),
            ),
            vision_config=dict(
                depth=3,
                hidden_size=96,
                num_heads=4,
                intermediate_size=192,
                image_size=PREVIEW_GRID * VISION_PATCH,
                patch_size=VISION_PATCH,
            ),
            vq_config=dict(embed_dim=16, num_embeddings=CODES, latent_channels=96),
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            image_start_token_id=IMAGE_START,
            image_end_token_id=IMAGE_END,
        )
    )
    model.generation_config.do_sample = True
    model.generation_config.top_p = TOP_P
    model.generation_config.eos_token_id = IMAGE_END
    model.generation_config.pad_token_id = pad
    return model


def make_glyph_tokenizer() -> ByT5Tokenizer:
    return ByT5Tokenizer()


def make_glyph_encoder() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=384,
            d_model=TEXT_WIDTH,
            d_kv=16,
            d_ff=192,
            num_layers=2,
            num_heads=6,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )


def make_dit() -> GlmImageTransformer2DModel:
    return GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=8,
        attention_head_dim=32,
        num_attention_heads=6,
        text_embed_dim=TEXT_WIDTH,
        time_embed_dim=48,
        condition_dim=16,
        prior_vq_quantizer_codebook_size=CODES,
    )


def make_vae(**settings) -> AutoencoderKL:
    """The 8x, 16-channel KL autoencoder of GLM-Image; settings: the latents' mean and deviation."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=16,
        layers_per_block=1,
        block_out_channels=(16, 32, 48, 48),
        norm_num_groups=8,
        sample_size=SIZE,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        force_upcast=False,
        scaling_factor=1.0,
        shift_factor=None,
        **settings,
    )


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """GLM-Image's sampler with a shift of 1, whatever the size: sigma is the progress left."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=1.0,
        max_shift=0.0,
        base_image_seq_len=256,
        max_image_seq_len=4096,
        time_shift_type="linear",
    )
