"""Continuous batching when something goes wrong: nothing hangs, nothing is lost, one bad request
is one error."""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from harness.batching import (
    CURVES,
    abandoned,
    assert_same_pictures,
    disconnect_after,
    mixed_requests,
    steps_run,
    together,
    trace_events,
)
from harness.processes import probe_environment, wait_until
from harness.server import FP32_FLAGS, HTTPFailure, Server

GOOD = dict(guidance_curve="constant:2", seed=3, num_inference_steps=8)
PLACES = ("prepare", "row", "decode")


@pytest.fixture(scope="module")
def ranks(glm):
    with Server(
        glm,
        *("--guidance-buckets", "8", "--num-gpus", "2", "--tp-size", "2", *FP32_FLAGS),
        env=probe_environment(PROBE_FAIL="1"),
    ) as started:
        yield started


def metric(server, name: str) -> float:
    return sum(
        float(value)
        for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", server.get("/metrics"), re.M)
    )


@pytest.mark.parametrize("where", PLACES)
def test_one_bad_row_fails_alone(probed, server, where):
    wanted = server.generate(**GOOD)
    bodies = [GOOD, dict(GOOD, prompt=f"fail in {where}"), GOOD]
    first, failed, last = together(probed, bodies)
    assert_same_pictures([first, last], [wanted, wanted])
    assert failed.status == 500
    assert f"probe failed in {where}" in probed.log.read_text()


def test_a_shared_step_that_fails_is_not_shared_again(probed):
    wanted = [probed.generate(**dict(GOOD, prompt="fail when shared", seed=i)) for i in range(3)]
    logged = len(probed.log.read_text())
    bodies = [dict(GOOD, prompt="fail when shared", seed=i) for i in range(3)]
    assert_same_pictures(together(probed, bodies), wanted)
    assert probed.log.read_text()[logged:].count("A step of 2 samples failed") == 1


def test_control_requests_between_the_steps(probed, server):
    """A control request that only reads is answered while others run; one that writes waits."""
    steps = 25
    long = dict(GOOD, prompt="slow step", num_inference_steps=steps)
    wanted = server.generate(**long)
    before = steps_run(probed.trace)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(probed.generate, **long)
        wait_until(lambda: steps_run(probed.trace) > before)
        probed.get("/v1/list_loras")
        assert json.loads(probed.get("/stats"))["status"] == "ok"
        assert steps_run(probed.trace) < before + steps
        assert probed.post("/get_weights_checksum", {})
        assert steps_run(probed.trace) == before + steps
        assert_same_pictures([running.result()], [wanted])


def test_a_client_that_goes_away_gives_its_rows_back(probed):
    body = dict(prompt="gone at a slow step", size="64x64", num_inference_steps=5000)
    before, logged = steps_run(probed.trace), len(probed.log.read_text())
    with abandoned(probed, body):
        wait_until(lambda: steps_run(probed.trace) > before)
    wait_until(lambda: "was aborted: its client is gone" in probed.log.read_text()[logged:])
    seen = len(trace_events(probed.trace))
    probed.generate(num_inference_steps=4)
    steps = [event for event in trace_events(probed.trace)[seen:] if event["name"] == "step"]
    assert [event["args"]["samples"] for event in steps] == [1] * 4
    new = probed.log.read_text()[logged:]
    assert new.count("its client is gone") == 1 and "Traceback" not in new
    counts = re.findall(r'diffusion_requests_total{.*status="(\w+)"} (\S+)', probed.get("/metrics"))
    assert dict(counts)["aborted"] == "1.0"


def memory(server) -> int:
    """Bytes resident in the server's processes."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return sum(child.memory_info().rss for child in children)


def many_requests(server, count: int, seed: int) -> None:
    """So many with random shapes, and one cancelled request to every three of them."""
    choice = random.Random(seed)
    bodies = [
        dict(
            size=choice.choice(["64x64", "96x64", "64x96"]),
            num_inference_steps=choice.randint(1, 8),
            guidance_curve=choice.choice(CURVES),
            seed=i,
        )
        for i in range(count)
    ]
    with ThreadPoolExecutor(count * 2) as pool:
        gone = [
            pool.submit(disconnect_after, server, dict(bodies[0], prompt="gone"), seconds)
            for seconds in [choice.uniform(0, 4) for _ in range(count // 3)]
        ]
        answers = list(pool.map(lambda body: server.generate(**body), bodies))
        for future in gone:
            future.result()
    assert len({answer["id"] for answer in answers}) == count
    for body, answer in zip(bodies, answers):
        steps = body["num_inference_steps"]
        assert answer["guidance"]["buckets"][-1]["steps"][1] == steps - 1


def test_many_requests_and_cancels(probed):
    """Every request is answered once; cancelled ones leave nothing behind, nor does any other."""
    many_requests(probed, 12, seed=1)  # every shape once
    before = memory(probed)
    many_requests(probed, 50, seed=2)
    assert memory(probed) < before + 64 * 2**20
    left = ("sglang:diffusion_running_samples", "sglang:diffusion_waiting_items")
    wait_until(lambda: not any(metric(probed, name) for name in left))


def test_metrics_and_log(probed):
    names = ("shared_steps_total", "admission_wait_seconds_count", "step_rows_total")
    before = {name: metric(probed, f"sglang:diffusion_{name}") for name in names}
    answer = probed.generate(num_inference_steps=6, guidance_curve="front:3:1@0.5")
    after = {name: metric(probed, f"sglang:diffusion_{name}") for name in names}
    grown = [after[name] - before[name] for name in names]
    assert grown == [6, 1, sum(answer["guidance"]["forwards"].values())]

    def line() -> re.Match | None:
        """Written every few seconds where there were steps."""
        probed.generate(num_inference_steps=1)
        return re.search(r"Running \d+, waiting \d+; .* admission wait", probed.log.read_text())

    wait_until(line)


def test_each_picture_equals_its_solo_run_on_two_ranks(ranks, server):
    bodies = mixed_requests()
    wanted = [server.generate(**body) for body in bodies]
    assert_same_pictures(together(ranks, bodies, spread=1.0), wanted)


@pytest.mark.parametrize(
    "where", ["prepare", "row", "row on rank 1", "decode", "decode on rank 1"]
)
def test_failures_around_a_forward_are_agreed(ranks, server, where):
    wanted = server.generate(**GOOD)
    bodies = [GOOD, dict(GOOD, prompt=f"fail in {where}"), GOOD]
    first, failed, last = together(ranks, bodies)
    assert_same_pictures([first, last], [wanted, wanted])
    assert failed.status == 500


def test_a_killed_rank_answers_everybody(ranks):
    """Last: the server does not come back."""
    children = psutil.Process(ranks.process.pid).children(recursive=True)
    (worker,) = [child for child in children if child.name().endswith("scheduler_TP1")]
    bodies = [dict(GOOD, num_inference_steps=10_000, seed=i) for i in range(4)]
    with ThreadPoolExecutor(5) as pool:
        answers = pool.submit(together, ranks, bodies)
        time.sleep(4.0)
        assert not answers.done()
        worker.kill()
        failures = answers.result(timeout=60)
    assert all(isinstance(one, HTTPFailure) and one.status >= 500 for one in failures)
    with pytest.raises(HTTPFailure) as unhealthy:
        ranks.get("/health")
    assert unhealthy.value.status == 503
    assert "exited" in json.loads(unhealthy.value.body)["error"]
    with pytest.raises(HTTPFailure) as refused:
        ranks.generate()
    assert refused.value.status == 503
