# SPDX-License-Identifier: Apache-2.0
"""An AR server's answer, checked before anything is made of it. No torch."""

from dataclasses import dataclass
from typing import Any

import orjson

from sglang.multimodal_gen.configs.glm_image_prior import SOURCE_TOKENS_KEY

from .retry import AttemptFailure, Kind

_SHOWN = 120  # characters of a wrong answer that its error repeats


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What an answer must hold.

    Attributes:
        skipped: preview tokens before those that the DiT takes.
        tokens: those that it takes, one a 32 x 32 pixels.
        source_tokens: of each source image.
        codebook: ids are below it.
    """

    skipped: int
    tokens: int
    source_tokens: tuple[int, ...]
    codebook: int


@dataclass(frozen=True, kw_only=True)
class PriorTokens:
    """Of one image: codes a row after the other, those of its source images, and the usage.

    Attributes:
        weight_version: of the model that wrote them, where the server told it.
    """

    codes: tuple[int, ...]
    source_codes: tuple[tuple[int, ...], ...]
    usage: dict[str, int]
    weight_version: str | None


def read_answer(body: bytes, wanted: Wanted) -> PriorTokens:
    """The tokens in the body of a 200.

    Raises:
        AttemptFailure: `Kind.TRUNCATED` where JSON ends too early, else `Kind.WRONG`.
    """
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        text = body.strip()
        if text[:1] == b"{" and text[-1:] != b"}":
            raise AttemptFailure(Kind.TRUNCATED, "the answer ends half-way") from None
        raise _wrong(f"the answer is not JSON but {_shown(body)}") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("output_ids"), list):
        raise _wrong(f"the answer has no output_ids: {_shown(body)}")
    meta = answer.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise _wrong(f"the request was aborted: {reason.get('message')}")
    codes = answer["output_ids"]
    needed = wanted.skipped + wanted.tokens
    if len(codes) < needed:
        raise _wrong(f"{len(codes)} ids, wanted {needed}")
    # nobody uses the preview, and the AR model can draw ids there that are no codes
    codes = codes[wanted.skipped : needed]
    _check_codes(codes, wanted.codebook)
    return PriorTokens(
        codes=tuple(codes),
        source_codes=_source_codes(meta, wanted),
        usage=_usage(meta),
        weight_version=meta.get("weight_version"),
    )


def _source_codes(meta: dict[str, Any], wanted: Wanted) -> tuple[tuple[int, ...], ...]:
    if not wanted.source_tokens:
        return ()
    sources = meta.get(SOURCE_TOKENS_KEY)
    # one entry an output token, or one alone; the first has what was read with the prompt
    sources = sources[0] if isinstance(sources, list) and sources else None
    if not isinstance(sources, list):
        raise _wrong(
            "no source-image tokens in the answer: image-to-image needs an AR server with "
            "sglang-guidance-buckets installed"
        )
    if not all(isinstance(codes, list) for codes in sources):
        raise _wrong("source-image tokens that are no lists")
    counts = tuple(len(codes) for codes in sources)
    if counts != wanted.source_tokens:
        raise _wrong(f"source images of {counts} tokens, wanted {wanted.source_tokens}")
    for codes in sources:
        _check_codes(codes, wanted.codebook)
    return tuple(tuple(codes) for codes in sources)


def _check_codes(codes: list[Any], codebook: int) -> None:
    for code in codes:
        if type(code) is not int or not 0 <= code < codebook:
            raise _wrong(f"id {code!r} is outside the codebook of {codebook}")


def _usage(meta: dict[str, Any]) -> dict[str, int]:
    names = ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens")
    told = {name: meta.get(name) for name in names}
    usage = {name: count if type(count) is int else 0 for name, count in told.items()}
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    return usage


def _wrong(cause: str) -> AttemptFailure:
    return AttemptFailure(Kind.WRONG, cause)


def _shown(body: bytes) -> str:
    text = body[: _SHOWN + 1].decode(errors="replace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
