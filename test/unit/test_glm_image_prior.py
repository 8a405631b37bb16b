"""The AR client's decisions, one by one: plain data, no server."""

import io
import itertools
import pickle
import struct
import zlib

import numpy as np
import orjson
import pytest
from PIL import Image
from transformers.models.glm_image.image_processing_pil_glm_image import (
    GlmImageImageProcessorPil,
)

from sglang.multimodal_gen.configs.glm_image_prior import (
    PriorConfig,
    PriorError,
    make_prior_config,
    marked_status,
)
from sglang.multimodal_gen.configs.glm_image_sources import source_size
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image_prior import (  # noqa: E501
    answer,
    cache,
    request,
    retry,
    sampling,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image_prior.retry import (  # noqa: E501
    AttemptFailure,
    Kind,
)

# --- retry ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "is_retried", "status"),
    [
        (Kind.UNREACHABLE, True, 502),
        (Kind.CONNECT_TIMEOUT, True, 504),
        (Kind.BUSY, True, 502),
        (Kind.GATEWAY_TIMEOUT, True, 504),
        (Kind.TRUNCATED, True, 502),
        (Kind.READ_TIMEOUT, False, 504),
        (Kind.WRONG, False, 502),
    ],
)
def test_which_failures_are_tried_again(kind, is_retried, status):
    assert (kind.is_retried, kind.status) == (is_retried, status)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *[(400, Kind.WRONG), (404, Kind.WRONG), (500, Kind.WRONG), (501, Kind.WRONG)],
        *[(502, Kind.BUSY), (503, Kind.BUSY), (504, Kind.GATEWAY_TIMEOUT)],
    ],
)
def test_http_statuses(status, kind):
    assert retry.kind_of_status(status) is kind


def test_delays_double_up_to_a_limit():
    assert [retry.delay_s(attempt, 1) for attempt in (1, 2, 3, 4)] == [0.1, 0.2, 0.4, 0.8]
    assert retry.delay_s(1, 0) == 0.05
    assert retry.delay_s(50, 1) == 5


# --- answers -------------------------------------------------------------------------------------

WANTED = answer.Wanted(skipped=2, tokens=3, source_tokens=(), codebook=10)
WITH_SOURCES = answer.Wanted(skipped=0, tokens=1, source_tokens=(2, 1), codebook=10)


def body(ids, **meta):
    return orjson.dumps({"output_ids": ids, "meta_info": meta})


def test_the_preview_is_skipped_and_the_end_is_ignored():
    tokens = answer.read_answer(
        body([99, 2, 3, 4, 5, 99], prompt_tokens=7, completion_tokens=6), WANTED
    )
    assert tokens.codes == (3, 4, 5)
    assert tokens.usage["total_tokens"] == 13


@pytest.mark.parametrize("sources", [[[[1, 2], [3]]], [[[1, 2], [3]], None, None]])
def test_source_tokens(sources):
    tokens = answer.read_answer(body([5], glm_image_source_tokens=sources), WITH_SOURCES)
    assert tokens.source_codes == ((1, 2), (3,))


@pytest.mark.parametrize(
    ("text", "wanted", "cause"),
    [
        (b"", WANTED, "not JSON"),
        (b"<html>", WANTED, "not JSON but '<html>'"),
        (b"null", WANTED, "no output_ids"),
        (b"[]", WANTED, "no output_ids"),
        (b"{}", WANTED, "no output_ids"),
        (orjson.dumps({"output_ids": "12345"}), WANTED, "no output_ids"),
        (body([1, 2, 3, 4]), WANTED, "4 ids, wanted 5"),
        (body([1, 2, 3, 10, 5]), WANTED, "id 10 is outside the codebook of 10"),
        (body([1, 2, 3, -1, 5]), WANTED, "id -1 is outside"),
        (body([1, 2, 3, True, 5]), WANTED, "id True is outside"),
        (body([1, 2, 3, 4.0, 5]), WANTED, "id 4.0 is outside"),
        (body([], finish_reason={"type": "abort", "message": "oom"}), WANTED, "aborted: oom"),
        (body([5]), WITH_SOURCES, "no source-image tokens"),
        (body([5], glm_image_source_tokens=[]), WITH_SOURCES, "no source-image tokens"),
        (body([5], glm_image_source_tokens=[[[1, 2]]]), WITH_SOURCES, r"wanted \(2, 1\)"),
        (body([5], glm_image_source_tokens=[[[1, 10], [3]]]), WITH_SOURCES, "id 10 is outside"),
    ],
)
def test_wrong_answers(text, wanted, cause):
    with pytest.raises(AttemptFailure, match=cause) as failure:
        answer.read_answer(text, wanted)
    assert failure.value.kind is Kind.WRONG


def test_an_answer_that_ends_half_way_is_truncated():
    with pytest.raises(AttemptFailure) as failure:
        answer.read_answer(body([1, 2, 3, 4, 5])[:-9], WANTED)
    assert failure.value.kind is Kind.TRUNCATED


# --- cache, errors, settings ---------------------------------------------------------------------


def test_the_least_recently_used_answer_goes_first():
    held = cache.BoundedCache(2)
    held.put("a", 1)
    held.put("b", 2)
    assert held.get("a") == 1
    held.put("c", 3)
    assert [held.get(key) for key in "abc"] == [1, None, 3]
    assert len(held) == 2


def test_size_0_holds_nothing():
    held = cache.BoundedCache(0)
    held.put("a", 1)
    assert held.get("a") is None


@pytest.mark.parametrize("status", [400, 502, 504])
def test_a_status_survives_as_text(status):
    error = PriorError(status, "AR server http://a:1", "9 ids, wanted\n 261")
    text = f"Model generation failed. Error executing request 1: {error}"
    assert marked_status(text) == (status, "AR server http://a:1: 9 ids, wanted\n 261")


def test_ranks_tell_each_other():
    error = PriorError(504, "AR server http://a:1", "silent")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.status) == (str(error), 504)


def test_other_errors_have_no_status():
    assert marked_status("CUDA error: out of memory (HTTP 502)") is None


class Args:
    srt_encoder_url = "http://a:1/"
    srt_encoder_connect_timeout = 3.05
    srt_encoder_timeout = 100
    batching_max_size = 1


def test_settings_are_upstreams_and_ours():
    config = make_prior_config(Args, {"srt_encoder_max_inflight": 3, "prior_cache_size": 0})
    assert config == PriorConfig(url="http://a:1", max_inflight=3, cache_size=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"srt_encoder_max_inflight": 0}, "--srt-encoder-max-inflight: got 0, wanted 1 or more"),
        ({"srt_encoder_total_timeout": -1.0}, "--srt-encoder-total-timeout: got -1.0"),
        ({"srt_encoder_start_timeout": float("nan")}, "--srt-encoder-start-timeout"),
        ({"prior_cache_size": -1}, "--prior-cache-size: got -1, wanted 0 or more"),
    ],
)
def test_wrong_settings(given, message):
    with pytest.raises(ValueError, match=message):
        make_prior_config(Args, given)


def test_a_flag_without_an_ar_server_is_refused():
    class NoServer(Args):
        srt_encoder_url = None

    with pytest.raises(ValueError, match="--srt-encoder-max-inflight: .* --srt-encoder-url"):
        make_prior_config(NoServer, {"srt_encoder_max_inflight": 3})


def test_groups_are_refused():
    """Upstream's dynamic batching: its requests would wait for each other, and fail together."""

    class Merging(Args):
        batching_max_size = 4

    with pytest.raises(ValueError, match="--batching-max-size: got 4, wanted 1 beside --srt-"):
        make_prior_config(Merging, {})


def test_a_password_is_not_shown():
    config = PriorConfig(url="http://user:secret@ar:30000")
    assert config.shown_url == "http://ar:30000"
    assert PriorConfig(url="http://ar:1/x@y").shown_url == "http://ar:1/x@y"


# --- source images -------------------------------------------------------------------------------

# limits and patches of the published checkpoint's
PUBLISHED = GlmImageImageProcessorPil(
    size={"shortest_edge": 512 * 512, "longest_edge": 2048 * 2048}, patch_size=16, merge_size=1
)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((512, 512), (512, 512)),
        ((1000, 700), (1024, 704)),
        ((64, 64), (512, 512)),
        ((400, 300), (672, 512)),
        ((4032, 3024), (2048, 1536)),
        ((512, 2048), (512, 2048)),
        ((4096, 1024), (2048, 512)),
    ],
)
def test_source_sizes(size, wanted):
    assert source_size(size, PUBLISHED) == wanted


def test_every_source_size_is_what_the_ar_model_takes():
    for width, height in itertools.product(range(33, 9000, 397), repeat=2):
        try:
            fitted = source_size((width, height), PUBLISHED)
        except ValueError:
            assert max(width, height) > 3.8 * min(width, height)
            continue
        assert source_size(fitted, PUBLISHED) == fitted
        assert max(fitted) <= 2048 and min(fitted) >= 480
    assert PUBLISHED.get_number_of_image_patches(768, 512, {}) == 24 * 16


def test_a_huge_source_image_is_refused_by_its_header():
    """One row of ones and zeros is enough of it."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 9000, 9000, 8, 2, 0, 0, 0)
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    png = header + struct.pack(">I", zlib.crc32(chunk)) + struct.pack(">I", 0) + b"IDAT"
    with pytest.raises(PriorError, match="source image 1: not an image: more than") as failure:
        request.decode(png, 1)
    assert failure.value.status == 400


def test_a_damaged_source_image():
    """Pillow raises a SyntaxError for it."""
    data = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (40, 48, 3), np.uint8)
    Image.fromarray(noise).save(data, "PNG")
    png = bytearray(data.getvalue())
    length = slice(png.index(b"IDAT") - 4, png.index(b"IDAT"))
    png[length] = (200).to_bytes(4, "big")  # the next chunk begins in the middle of its data
    with pytest.raises(PriorError, match="source image 0: not an image: broken PNG") as failure:
        request.decode(bytes(png), 0)
    assert failure.value.status == 400


# --- how ids are drawn ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (None, {"temperature": 1, "top_p": 1, "top_k": 50}),
        ({"do_sample": True, "top_p": 0.8}, {"temperature": 1, "top_p": 0.8, "top_k": 50}),
        (
            {"temperature": 0.9, "top_p": 0.75, "top_k": 0, "min_p": 0.1},  # no seeds with min-p
            {"temperature": 0.9, "top_p": 0.75, "top_k": -1},
        ),
    ],
)
def test_sampling_of_a_checkpoint(tmp_path, told, wanted):
    if told is not None:
        (tmp_path / "vision_language_encoder").mkdir()
        path = tmp_path / "vision_language_encoder" / "generation_config.json"
        path.write_bytes(orjson.dumps(told))
    assert sampling.sampling_of(str(tmp_path)) == wanted
