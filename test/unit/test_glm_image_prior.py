"""The AR client's decisions, one by one, and the client against a server that fails on purpose."""

import pickle
import struct
import time
import zlib

import orjson
import pytest

from harness.faulty_ar import CODEBOOK, FaultyAR
from sglang.multimodal_gen.configs.glm_image_prior import (
    PriorConfig,
    PriorError,
    make_prior_config,
    marked_status,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages import (
    glm_image_prior,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image_prior import (  # noqa: E501
    answer,
    cache,
    request,
    retry,
    watch,
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
        body([1, 2, 3, 4, 5, 99], prompt_tokens=7, completion_tokens=6), WANTED
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


# --- the client ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processor(glm):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(glm / "processor")


@pytest.fixture(scope="module")
def ar():
    with FaultyAR() as server:
        yield server


def settings(ar, **changes):
    return PriorConfig(
        url=ar.url,
        **{"connect_timeout_s": 0.5, "read_timeout_s": 0.6, "total_timeout_s": 1.5, **changes},
    )


class Service:
    """A `PriorService` that takes plain requests."""

    def __init__(self, ar, processor, **changes):
        config = settings(ar, **changes)
        expected = glm_image_prior.Expected.of(processor, CODEBOOK)
        self.service = glm_image_prior.PriorService(
            config,
            processor=processor,
            codebook=CODEBOOK,
            facts=glm_image_prior.ServerFacts(honours_seeds=True, context=1000, model=ar.model),
            check=lambda: glm_image_prior.check_server(config, expected),
        )

    def ask(self, prompt="a cat", seed=1, size=(32, 32)):
        width, height = size
        return self.service.ask(
            glm_image_prior.PriorRequest(
                prompt=prompt, height=height, width=width, seeds=(seed,), sources=()
            )
        )

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self.service.close()


@pytest.fixture
def service(ar, processor):
    ar.reset()
    with Service(ar, processor) as started:
        yield started


@pytest.mark.parametrize(
    "faults",
    [
        *[["reset"], ["half"], ["half unnoticed"], ["502"], ["503"], ["504"]],
        ["reset", "half", "503"],
    ],
    ids=", ".join,
)
def test_what_may_pass_is_tried_again_with_the_same_tokens(service, ar, faults):
    wanted = service.ask(seed=5).result().token_ids_BL
    ar.reset()
    ar.faults = list(faults)
    got = service.ask(prompt="another", seed=5).result().token_ids_BL
    assert got.tolist() == wanted.tolist()
    assert len(ar.requests) == len(faults) + 1


@pytest.mark.parametrize(
    ("fault", "status", "cause"),
    [
        ("html", 502, "not JSON"),
        ("list", 502, "no output_ids"),
        ("no ids", 502, "no output_ids"),
        ("too few ids", 502, "9 ids, wanted 257"),
        ("id out of range", 502, "id 128 is outside the codebook of 128"),
        ("id that is no number", 502, "id 'a' is outside"),
        ("aborted", 502, "aborted: oom"),
        ("400", 502, "answered 400: .*status 400"),
        ("404", 502, "answered 404"),
        ("500", 502, "answered 500"),
        ("silent", 504, "silent for 0.6 s"),
    ],
)
def test_what_would_only_repeat_is_not_tried_again(service, ar, fault, status, cause):
    ar.faults = [fault]
    with pytest.raises(PriorError, match=f"AR server {ar.url}: .*{cause}") as error:
        service.ask().result()
    assert error.value.status == status
    assert len(ar.requests) == 1
    service.ask().result()  # the next one is fine


@pytest.mark.parametrize(
    ("fault", "status", "cause"),
    [
        ("reset", 502, "reset|disconnected"),
        ("half", 502, "ends half-way"),
        ("503", 502, "answered 503"),
        ("504", 504, "answered 504"),
        ("trickle", 504, "no answer within 1.5 s in all"),
    ],
)
def test_all_attempts_end_at_the_total_deadline(service, ar, fault, status, cause):
    ar.always = fault
    start = time.monotonic()
    with pytest.raises(PriorError, match=cause) as error:
        service.ask().result()
    assert error.value.status == status
    assert 0.5 < time.monotonic() - start < 2.0


def test_a_dead_server(processor):
    with FaultyAR() as gone:
        pass
    with Service(gone, processor) as service, pytest.raises(PriorError) as error:
        service.ask().result()
    assert error.value.status == 502
    assert gone.url in str(error.value)


def test_slow_is_not_a_fault(service, ar):
    ar.faults = ["slow"]
    service.ask().result()
    assert len(ar.requests) == 1


def test_one_fault_is_one_requests(service, ar):
    ar.seconds = 0.05
    ar.faults = ["too few ids"]
    futures = [service.ask(seed=seed) for seed in range(8)]
    failed = [future.exception() for future in futures if future.exception()]
    assert len(failed) == 1
    assert len({str(future.result().token_ids_BL) for future in futures if not future.exception()})


def test_a_bound_on_requests_in_flight_and_order(ar, processor):
    ar.reset()
    ar.seconds = 0.05
    with Service(ar, processor, max_inflight=2) as service:
        for future in [service.ask(seed=seed) for seed in range(9)]:
            future.result()
    assert ar.most_waiting == 2
    seeds = [sent["sampling_params"]["sampling_seed"] for sent in ar.requests]
    assert [seed // 2 for seed in seeds] == [seed // 2 for seed in range(9)]  # two race


def test_cancelling_hangs_up(service, ar):
    ar.faults = ["silent"]
    future = service.ask()
    while not ar.requests:
        time.sleep(0.01)
    future.cancel()
    deadline = time.monotonic() + 0.4
    while not ar.gone and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ar.gone == 1


def test_the_cache_asks_once(ar, processor):
    ar.reset()
    with Service(ar, processor, cache_size=2) as service:
        first = service.ask(seed=1).result()
        again = service.ask(seed=1).result()
        assert again.token_ids_BL.tolist() == first.token_ids_BL.tolist()
        assert len(ar.requests) == 1
        for other in (dict(seed=2), dict(prompt="b"), dict(size=(64, 32)), dict(seed=1)):
            service.ask(**other).result()
        assert len(ar.requests) == 5  # the first one was pushed out
        assert (service.service._metrics.hits, service.service._metrics.misses) == (1, 5)


@pytest.mark.parametrize(("cache_size", "seed"), [(0, 1), (2, None)])
def test_not_cached(ar, processor, cache_size, seed):
    ar.reset()
    with Service(ar, processor, cache_size=cache_size) as service:
        for _ in range(2):
            service.ask(seed=seed).result()
    assert len(ar.requests) == 2


def test_a_failed_request_is_not_cached(service, ar):
    ar.faults = ["html"]
    assert service.ask().exception()
    assert service.ask().exception() is None


def test_large_seeds_fit_what_srt_takes(service, ar):
    service.ask(seed=2**64 - 1).result()
    assert ar.requests[0]["sampling_params"]["sampling_seed"] == 2**63 - 1


def test_more_tokens_than_the_model_has(service, ar):
    with pytest.raises(PriorError, match="size 1024x1024: takes 13.. tokens, .* has 1000") as error:
        service.ask(size=(1024, 1024)).result()
    assert error.value.status == 400
    assert not ar.requests


def test_closing_ends_what_is_in_flight(ar, processor):
    ar.reset()
    ar.always = "silent"
    service = Service(ar, processor)
    future = service.ask()
    while not ar.requests:
        time.sleep(0.01)
    service.service.close()
    assert future.cancelled() or future.exception()


# --- start-up ------------------------------------------------------------------------------------


def test_start_waits_for_the_server(ar):
    ar.reset()
    ar.healthy = False
    with pytest.raises(glm_image_prior.ARServerUnfit, match="not up after 0.2 s.*answered 503"):
        glm_image_prior.wait_for_server(settings(ar, start_timeout_s=0.2))
    ar.healthy = True
    glm_image_prior.wait_for_server(settings(ar))


def test_another_model_is_refused(processor):
    with FaultyAR(architecture="LlamaForCausalLM") as other:
        with pytest.raises(glm_image_prior.ARServerUnfit, match="some_model, not GLM-Image"):
            glm_image_prior.build_service(
                settings(other), processor=processor, codebook=CODEBOOK, server_metrics=None
            )


def test_a_larger_codebook_is_refused(ar, processor):
    ar.reset()
    with pytest.raises(glm_image_prior.ARServerUnfit, match="outside the codebook of 16"):
        glm_image_prior.check_server(settings(ar), glm_image_prior.Expected.of(processor, 16))


@pytest.mark.parametrize("honours_seeds", [True, False])
def test_seeds_are_tried(ar, processor, honours_seeds):
    ar.reset()
    ar.honours_seeds = honours_seeds
    try:
        facts = glm_image_prior.check_server(
            settings(ar), glm_image_prior.Expected.of(processor, CODEBOOK)
        )
        assert facts == glm_image_prior.ServerFacts(
            honours_seeds=honours_seeds, context=None, model=ar.model
        )
    finally:
        ar.honours_seeds = True


# --- another server behind the same url ----------------------------------------------------------


def codes(service, **request):
    return service.ask(**request).result().token_ids_BL.tolist()


def test_another_model_behind_the_url(service, ar):
    """It answers with ids that could be right."""
    wanted = codes(service)
    ar.replace("LlamaForCausalLM")
    asked = len(ar.requests)
    for attempts in (1, 0):  # what is known to be another model is not asked
        with pytest.raises(PriorError, match=f"{ar.url}: serves some_model, not GLM") as error:
            service.ask(prompt="a dog").result()
        assert error.value.status == 502
        assert len(ar.requests) - asked == attempts
        asked = len(ar.requests)
    assert codes(service) == wanted  # of the right model, from the cache
    ar.replace()
    assert codes(service, prompt="a dog") == wanted  # the seed's


def test_another_model_in_mid_request(service, ar):
    ar.seconds = 0.3
    future = service.ask()
    while not ar.requests:
        time.sleep(0.01)
    ar.replace("LlamaForCausalLM")
    with pytest.raises(PriorError, match="serves some_model, not GLM"):
        future.result()


def test_a_codebook_that_does_not_fit_any_more(service, ar):
    codes(service)
    ar.replace(model_path="/nowhere/larger")
    ar.probe_fault = "id out of range"
    for _ in range(2):
        with pytest.raises(PriorError, match="failed a request of 16 tokens: id 128 is outside"):
            service.ask(prompt="a dog").result()
    ar.probe_fault = None
    codes(service, prompt="a dog")


def test_the_cache_keeps_models_apart(service, ar, monkeypatch):
    monkeypatch.setattr(watch, "_FRESH_S", 0.0)
    first = codes(service)
    ar.replace(model_path="/nowhere/other")
    other = codes(service)
    assert other != first
    ar.weight_version = "2"  # updated in place: no connection tells
    updated = codes(service)
    assert updated not in (first, other)
    ar.replace()
    asked = len(ar.requests)
    assert codes(service) == first
    assert len(ar.requests) == asked


def test_an_update_of_weights_is_told_by_the_answer(service, ar):
    first = codes(service)
    ar.weight_version = "2"
    assert codes(service, prompt="a dog") != first  # the answer says so: the server is looked at
    assert codes(service) != first


def test_a_server_that_was_started_again_is_tried_again(processor):
    with FaultyAR() as old:
        with Service(old, processor) as service:
            assert service.ask(seed=1).result().warning is None
            old.hang_up()
            old.close()
            future = service.ask(seed=2)
            time.sleep(0.2)
            with FaultyAR(old.port) as again:
                again.honours_seeds = False
                assert "ignores seeds" in future.result().warning


def test_a_restart_that_nobody_saw(service, ar, monkeypatch):
    """It was idle meanwhile, and the same model came back."""
    monkeypatch.setattr(watch, "_RESTART_S", 0.0)
    assert service.ask(seed=1).result().warning is None
    ar.hang_up()
    ar.honours_seeds = False
    assert "ignores seeds" in service.ask(seed=2).result().warning
    asked = len(ar.requests)
    service.ask(seed=1).result()  # what a server that honours it wrote is kept apart
    assert len(ar.requests) == asked + 1


def test_a_look_that_fails_is_made_again(service, ar):
    """As through a router, one of whose servers has just died."""
    ar.failing_looks = 2
    codes(service)
    assert len(ar.requests) == 1


def test_no_look_for_each_request(service, ar, monkeypatch):
    codes(service)
    looks = []
    monkeypatch.setattr(watch, "model_info", lambda config: looks.append(config))
    for seed in range(20):
        codes(service, seed=seed)
    assert not looks


def test_a_password_is_not_shown():
    config = PriorConfig(url="http://user:secret@ar:30000")
    assert config.shown_url == "http://ar:30000"
    assert PriorConfig(url="http://ar:1/x@y").shown_url == "http://ar:1/x@y"


def test_a_huge_source_image_is_refused_by_its_header():
    """One row of ones and zeros is enough of it."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 9000, 9000, 8, 2, 0, 0, 0)
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    png = header + struct.pack(">I", zlib.crc32(chunk)) + struct.pack(">I", 0) + b"IDAT"
    with pytest.raises(PriorError, match="source image 1: not an image: more than") as failure:
        request.decode(png, 1)
    assert failure.value.status == 400
