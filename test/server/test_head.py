"""AR server, head and two denoisers, all real."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness.batching import abandoned, steps_run, trace_events
from harness.processes import wait_until
from harness.server import FP32_FLAGS, HTTPFailure, Server, pixels, pngs, source_image
from harness.topology import Topology

GUIDANCE = ("--guidance-buckets", "8")


@pytest.fixture(scope="module")
def started(glm, ar_server):
    """The topology, and one server for all but the AR model; they start side by side."""
    flags = (*GUIDANCE, "--srt-encoder-url", ar_server.url)
    alone = Server(glm, *flags, *FP32_FLAGS, waits=False)
    try:
        with Topology(glm, ar_server.url, 2, *GUIDANCE) as topology:
            alone.wait()
            yield topology, alone
    finally:
        alone.close()


@pytest.fixture(scope="module")
def topology(started):
    return started[0]


@pytest.fixture(scope="module")
def alone(started):
    return started[1]


def test_options_travel_and_the_report_comes_back(topology):
    answer = topology.head.generate(guidance_curve="front:3:1@0.5", seed=11)
    assert answer["guidance"]["curve"] == "front:3:1@0.5"
    assert answer["guidance"]["forwards"] == {"cond": 6, "uncond": 3}
    assert answer["usage"]["completion_tokens"] == 261


def test_a_wrong_option_is_refused_at_the_head(topology):
    with pytest.raises(HTTPFailure) as failure:
        topology.head.generate(guidance_curve="front:3")
    assert failure.value.status == 400


def test_the_picture_of_one_server(topology, alone):
    request = dict(guidance_curve="peak", seed=12, size="96x64")
    (got,), (wanted,) = pngs(topology.head.generate(**request)), pngs(alone.generate(**request))
    assert np.abs(pixels(got) - pixels(wanted)).max() <= 1


@pytest.mark.parametrize("sources", [1, 2])
def test_image_to_image_through_the_head(topology, alone, sources):
    images = [source_image(32 + 64 * i) for i in range(sources)]
    request = dict(size="64x64", seed=13)
    (got,) = pngs(topology.head.edit(images, **request))
    (wanted,) = pngs(alone.edit(images, **request))
    assert np.abs(pixels(got) - pixels(wanted)).max() <= 1


def test_three_sizes_at_once(topology, alone):
    requests = [
        dict(prompt=f"cat {i}", seed=i, size=("64x64", "96x64", "128x64")[i % 3]) for i in range(6)
    ]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda request: topology.head.generate(**request), requests))
    for answer, request in zip(got, requests):
        (wanted,) = pngs(alone.generate(**request))
        assert np.abs(pixels(pngs(answer)[0]) - pixels(wanted)).max() <= 1


def test_a_denoiser_runs_several_samples_at_once(topology):
    requests = [dict(prompt=f"cat {i}", seed=i, num_inference_steps=1000) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda request: topology.head.generate(**request), requests))
    for trace in topology.traces:
        steps = [event for event in trace_events(trace) if event["name"] == "step"]
        assert max(event["args"]["samples"] for event in steps) > 1


def test_one_fault_is_one_requests(topology):
    with ThreadPoolExecutor(3) as pool:
        large = pool.submit(topology.head.generate, size="4096x4096")
        others = [pool.submit(topology.head.generate, prompt=f"other {i}") for i in range(2)]
    assert large.exception().status == 400
    assert all(len(other.result()["data"]) == 1 for other in others)


def test_seeds_that_fit_no_images_are_refused_at_the_head(topology):
    for seed in ([1, 2, 3], [1]):
        with pytest.raises(HTTPFailure, match="seed: got .*, wanted 2 in a list") as failure:
            topology.head.generate(n=2, seed=seed)
        assert failure.value.status == 400
    assert len(topology.head.generate(n=2, seed=[1, 2])["data"]) == 2


@pytest.mark.parametrize("where", ["head", "alone"])
def test_an_abandoned_request_leaves_the_ar_server(topology, alone, ar_server, where):
    server = topology.head if where == "head" else alone

    def begun() -> int:
        return ar_server.log.read_text().count("Prefill batch")

    before = begun()
    with abandoned(server, dict(prompt="nobody waits", size="2048x2048")):  # some 5000 tokens
        wait_until(lambda: begun() > before)
    wait_until(lambda: "aborted: its client is gone" in server.log.read_text())


def test_a_killed_denoiser_hands_its_request_on(topology):
    """The head deals requests out in turn; the other denoiser answers them all."""
    second = topology.traces[1]
    before = steps_run(second)
    while steps_run(second) == before:  # after it the first is next, then it again
        topology.head.generate()
    # held back, so that it has not done with its own before it is killed
    topology.denoisers[1].pause()
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(topology.head.generate, prompt=f"cat {i}") for i in range(3)]
        # two done by the first: the one between them was dealt to the second
        wait_until(lambda: sum(future.done() for future in futures) == 2)
        topology.denoisers[1].kill()
        answers = [future.result() for future in futures]
    assert all(len(answer["data"]) == 1 for answer in answers)
    log = topology.head.log.read_text()
    assert "GLM denoiser[1] disconnected; requeued 1 request(s)" in log
    assert topology.head.generate(prompt="after")["data"]
