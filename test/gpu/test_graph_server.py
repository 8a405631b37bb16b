"""A server with bucket graphs, from its start to its 500th request."""

import re
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
import pytest
import torch

from harness.graphs import graph_metric
from harness.processes import probe_environment
from harness.server import FP32_FLAGS, Server, pixels, pngs

pytestmark = pytest.mark.gpu

MB = 2**20
FLAGS = ("--guidance-buckets", "8", "--attention-backend", "torch_sdpa", *FP32_FLAGS)
SIZES = ["256x256", "128x256"]
QUOTES = ["", ' with a sign that says "open"']
CURVES = ["constant:2", "front:3:1@0.5", "constant:1", "interval:4@0.3-0.7"]
IDLE_CAPTURE_SECONDS = 60
PROMPTS = 16  # GLM-Image's AR model takes far longer than the DiT: each runs it once


@pytest.fixture(scope="module")
def server(glm, tmp_path_factory):
    with Server(
        glm,
        *(*FLAGS, "--enable-metrics", "--bucket-graphs", "full"),
        *("--bucket-graph-resolutions", *SIZES),
        *("--bucket-graph-rows", "1", "2", "4", "8", "--bucket-graph-text-lengths", "32"),
        env=probe_environment(PROBE_KEEP_PRIOR=str(tmp_path_factory.mktemp("priors"))),
    ) as started:
        yield started


def lazy_captures(server) -> int:
    return len(re.findall(r"Bucket graph .* captured in", server.log.read_text()))


def requests(count: int, sizes=SIZES, steps: int = 4) -> list[dict]:
    return [
        dict(
            prompt=f"picture {i % PROMPTS}{QUOTES[i // len(sizes) % len(QUOTES)]}",
            size=sizes[i % len(sizes)],
            guidance_curve=CURVES[i // 4 % len(CURVES)],
            num_inference_steps=steps,
            seed=i % PROMPTS,
        )
        for i in range(count)
    ]


def test_ready_means_captured(server):
    """No request was sent yet."""
    # 2 resolutions x (text 1, text up to 32) x 4 row buckets
    assert len(graph_metric(server, "capture_seconds")) == 16
    assert not sum(graph_metric(server, "replays").values())
    assert "16 bucket graphs, " in server.log.read_text()


def test_pictures_equal_those_without_graphs(server, glm):
    bodies = requests(8)
    with Server(glm, *FLAGS, "--bucket-graphs", "off") as eager:
        wanted = [eager.generate(**body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        got = list(pool.map(lambda body: server.generate(**body), bodies))
    for one, other in zip(got, wanted, strict=True):
        assert one["guidance"] == other["guidance"]
        difference = np.abs(pixels(pngs(one)[0]) - pixels(pngs(other)[0]))
        assert difference.max() <= 2 and difference.mean() < 0.1
    assert sum(graph_metric(server, "replays").values()) > 0


def test_text_longer_than_every_bucket(server):
    before = graph_metric(server, "misses").get("text length", 0)
    server.generate(prompt=f'a sign that says "{"word " * 12}"', size=SIZES[0])
    assert graph_metric(server, "misses")["text length"] == before + 6


def test_another_size_runs_eagerly_and_is_captured_when_idle(server):
    """Captures wait until nothing waits; what they make then replays."""
    bodies = requests(16, sizes=["192x320"], steps=8)
    assert not graph_metric(server, "misses").get("not captured")
    captures = lazy_captures(server)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [pool.submit(server.generate, **body) for body in bodies]
        assert all(answer.result()["data"] for answer in answers)
    misses = graph_metric(server, "misses")["not captured"]
    assert misses >= 8
    deadline = time.monotonic() + IDLE_CAPTURE_SECONDS
    while lazy_captures(server) == captures:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    time.sleep(5)  # others
    replays = sum(graph_metric(server, "replays").values())
    for answer in (server.generate(**body) for body in bodies[:4]):
        assert answer["data"]
    assert sum(graph_metric(server, "replays").values()) > replays


def test_nothing_is_captured_while_a_request_waits(server):
    """Seen from the log: between two answers of a burst no capture was made."""
    bodies = requests(16, sizes=["320x192"], steps=8)
    captures = lazy_captures(server)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [pool.submit(server.generate, **body) for body in bodies]
        for left, answer in zip(range(len(bodies) - 1, 0, -1), as_completed(answers)):
            assert answer.result()["data"]
            assert lazy_captures(server) == captures, f"with {left} requests left"


def test_memory_after_500_requests(server):
    def used() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    def send(body: dict) -> None:
        assert server.generate(**body)["data"]

    bodies = requests(500, steps=3)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, bodies[:100]))
        before = used()
        list(pool.map(send, bodies[100:]))
    assert used() - before <= 64 * MB
    assert sum(graph_metric(server, "replays").values()) > 500
