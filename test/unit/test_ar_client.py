"""The AR client against a server that fails on purpose, or turns into another one."""

import pytest

from harness.faulty_ar import CODEBOOK, FaultyAR
from harness.processes import wait_until
from sglang.multimodal_gen.configs.glm_image_prior import (
    PriorConfig,
    PriorError,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages import (
    glm_image_prior,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image_prior import (  # noqa: E501
    client,
    watch,
)

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
    """Long timeouts, so that a busy machine is no fault."""
    patient = {"connect_timeout_s": 30, "read_timeout_s": 30, "total_timeout_s": 60}
    return PriorConfig(url=ar.url, **{**patient, **changes})


class Service:
    """A `PriorService` that takes plain requests."""

    def __init__(self, ar, processor, **changes):
        config = settings(ar, **changes)
        expected = glm_image_prior.Expected.of(processor, CODEBOOK)
        self.service = glm_image_prior.PriorService(
            config,
            processor=processor,
            codebook=CODEBOOK,
            sampling={"temperature": 0.9, "top_p": 0.75, "top_k": -1},
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


def three_attempts(monkeypatch):
    """For a fourth one the total deadline leaves no time, however fast the machine is."""
    monkeypatch.setattr(client, "delay_s", lambda attempt, _jitter: 0 if attempt < 3 else 3600)


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
    ],
)
def test_what_would_only_repeat_is_not_tried_again(service, ar, fault, status, cause):
    ar.faults = [fault]
    with pytest.raises(PriorError, match=f"AR server {ar.url}: .*{cause}") as error:
        service.ask().result()
    assert error.value.status == status
    assert len(ar.requests) == 1
    service.ask().result()  # the next one is fine


def test_silence_is_not_tried_again(ar, processor):
    ar.reset()
    ar.faults = ["silent"]
    with Service(ar, processor, read_timeout_s=4) as service:
        with pytest.raises(PriorError, match=f"AR server {ar.url}: silent for 4 s") as error:
            service.ask().result()
        assert error.value.status == 504
        assert len(ar.requests) == 1
        service.ask().result()  # the next one is fine


@pytest.mark.parametrize(
    ("fault", "status", "cause"),
    [
        ("reset", 502, "reset|disconnected"),
        ("half", 502, "ends half-way"),
        ("503", 502, "answered 503"),
        ("504", 504, "answered 504"),
    ],
)
def test_no_attempt_begins_after_the_total_deadline(
    service, ar, monkeypatch, fault, status, cause
):
    three_attempts(monkeypatch)
    ar.always = fault
    with pytest.raises(PriorError, match=f"AR server {ar.url}: .*({cause}).*, 3 at") as error:
        service.ask().result(timeout=300)
    assert error.value.status == status
    assert len(ar.requests) == 3


@pytest.mark.parametrize(
    ("faults", "before"),
    [
        ([], ""),
        (["503"], "; before that: answered 503: .*status 503.*"),
        (["half", "503"], "; before that: answered 503: .*status 503.*, 2 attempts"),
    ],
    ids=["first", "second", "third"],
)
def test_an_attempt_ends_at_the_total_deadline(ar, processor, monkeypatch, faults, before):
    """Though something always arrives; what ended the attempts before is told."""
    monkeypatch.setattr(client, "delay_s", lambda _attempt, _jitter: 0)
    ar.reset()
    ar.faults, ar.always = list(faults), "trickle"
    message = f"AR server {ar.url}: no answer within 5 s in all{before} .HTTP"
    with Service(ar, processor, total_timeout_s=5) as service:
        with pytest.raises(PriorError, match=message) as error:
            service.ask().result()
    assert error.value.status == 504


def test_a_dead_server(processor, monkeypatch):
    three_attempts(monkeypatch)
    with FaultyAR() as gone:
        pass
    with Service(gone, processor) as service:
        with pytest.raises(PriorError, match=f"AR server {gone.url}: .*, 3 attempts") as error:
            service.ask().result()
    assert error.value.status == 502


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


def test_a_bound_on_requests_in_flight_and_order(ar, processor, monkeypatch):
    never_stale(monkeypatch)  # a request that looks at the server first lets others by
    ar.reset()
    ar.seconds = 0.2
    with Service(ar, processor, max_inflight=2) as service:
        for future in [service.ask(seed=seed) for seed in range(9)]:
            future.result()
    assert ar.most_waiting == 2
    seeds = [sent["sampling_params"]["sampling_seed"] for sent in ar.requests]
    assert sorted(seeds) == list(range(9))
    assert all(abs(seed - turn) <= 1 for turn, seed in enumerate(seeds))  # two race


def test_cancelling_hangs_up(service, ar):
    ar.faults = ["silent"]
    future = service.ask()
    wait_until(lambda: ar.requests)
    future.cancel()
    wait_until(lambda: ar.gone, seconds=20)  # sooner than its timeout
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


def test_ids_are_drawn_as_the_checkpoint_says(service, ar):
    service.ask().result()
    (sent,) = ar.requests
    assert sent["sampling_params"].items() >= dict(temperature=0.9, top_p=0.75, top_k=-1).items()


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
    wait_until(lambda: ar.requests)
    service.service.close()
    assert future.cancelled()


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
                settings(other),
                processor=processor,
                codebook=CODEBOOK,
                sampling={},
                server_metrics=None,
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


def test_another_model_behind_the_url(service, ar, monkeypatch):
    """It answers with ids that could be right."""
    monkeypatch.setattr(watch, "_FRESH_S", 60.0)  # only the new connection tells
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
    ar.may_answer.clear()
    future = service.ask()
    wait_until(lambda: ar.requests)
    ar.replace("LlamaForCausalLM")
    ar.may_answer.set()
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
            # the first attempt may meet the old connection, the second meets nobody
            wait_until(lambda: service.service._metrics.retries >= 2)
            with FaultyAR(old.port, honours_seeds=False):
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


def test_a_router_that_cannot_tell_the_model(service, ar, monkeypatch):
    """It asks the server that has died until it counts it out; the others write."""
    never_stale(monkeypatch)
    ar.failing_looks = 1000
    codes(service)
    assert len(ar.requests) == 1  # what was written is used, once
    looks = ar.failing_looks
    codes(service, prompt="a dog")
    assert ar.failing_looks == looks  # and the next request waits for no look


def test_a_router_whose_asked_server_is_stuck(service, ar, monkeypatch):
    """That one says nothing; the others write."""
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.1)
    ar.silent_looks = True
    codes(service)
    assert len(ar.requests) == 1


@pytest.mark.parametrize("fault", ["500", "silent"])
def test_a_router_with_a_server_that_writes_no_more(service, ar, monkeypatch, fault):
    """The model is told, but the short request that tries it out goes to that server."""
    monkeypatch.setattr(watch, "_RESTART_S", 0.0)
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.1)
    ar.probe_fault = fault
    codes(service)
    assert len(ar.requests) == 1


def test_another_model_that_cannot_be_tried(service, ar, monkeypatch):
    three_attempts(monkeypatch)
    ar.replace(model_path="/nowhere/larger")
    ar.probe_fault = "500"
    with pytest.raises(PriorError, match="16 tokens: answered 500, 3 attempts"):
        service.ask().result()


def test_tokens_of_the_cache_wait_for_no_silent_server(ar, processor, monkeypatch):
    ar.reset()
    with Service(ar, processor, read_timeout_s=20.0, total_timeout_s=30.0) as service:
        first = codes(service)
        monkeypatch.setattr(watch, "_FRESH_S", 0.0)
        monkeypatch.setattr(watch, "_PATIENCE_S", 0.1)
        ar.silent_looks = True
        try:
            assert service.ask().result(timeout=8).token_ids_BL.tolist() == first
        finally:
            ar.hang_up()
    assert len(ar.requests) == 1


@pytest.mark.parametrize(
    "told",
    [{"architectures": 1}, {"architectures": None}, {"model_path": ["a"]}, {"weight_version": {}}],
    ids=str,
)
def test_a_server_that_tells_nonsense(service, ar, told):
    ar.told = told
    with pytest.raises(PriorError, match=f"AR server {ar.url}: ") as error:
        service.ask().result()
    assert error.value.status == 502
    ar.told = {}
    codes(service)


@pytest.mark.parametrize("data", [["a"], [{"max_model_len": "all"}], [[]], []], ids=str)
def test_a_context_that_cannot_be_read(service, ar, monkeypatch, data):
    monkeypatch.setattr(watch, "_RESTART_S", 0.0)
    ar.told = {"data": data}  # of /v1/models
    codes(service)
    codes(service, seed=2)


def never_stale(monkeypatch):
    """However slowly a test's requests come, nothing is looked at or connected to again."""
    monkeypatch.setattr(client, "_KEEP_ALIVE_S", 3600.0)
    for name in ("_FRESH_S", "_LOOK_EVERY_S"):
        monkeypatch.setattr(watch, name, 3600.0)


def test_no_look_for_each_request(service, ar, monkeypatch):
    never_stale(monkeypatch)
    codes(service)
    looks = []
    monkeypatch.setattr(watch, "model_info", lambda config: looks.append(config))
    for seed in range(20):
        codes(service, seed=seed)
    assert not looks
