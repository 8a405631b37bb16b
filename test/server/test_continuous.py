"""Continuous batching: each picture equals its solo run, whoever else ran; nothing is lost."""

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness.processes import probe_environment
from harness.server import FP32_FLAGS, HTTPFailure, Server, pixels, pngs

BATCHING = ("--guidance-buckets", "8", "--max-running-samples", "8", "--enable-metrics")
CURVES = [
    *("constant:2", "front:3:1@0.5", "interval:4@0.3-0.7", "constant:1"),
    *("linear:4:1.2", "peak:1:3@0.5", "constant:0", "front:5:1@0.2"),
]
LAYOUTS = {
    "one rank": (),
    "tp2": ("--num-gpus", "2", "--tp-size", "2"),
    "cfg2": ("--num-gpus", "2", "--enable-cfg-parallel"),
}


def requests() -> list[dict]:
    """Different prompts, curves, steps, seeds and quoted texts."""
    quotes = ["", ' "a"', ' "two words"', ' "x" and "y"']
    return [
        dict(
            prompt=f"picture {i}{quotes[i % 4]}",
            guidance_curve=curve,
            num_inference_steps=4 + i,
            seed=100 + i,
        )
        for i, curve in enumerate(CURVES)
    ]


def together(server, bodies: list[dict], spread: float = 0.0) -> list:
    """Answers (or failures) in order; each request starts at a random time within `spread` s."""
    starts = random.Random(1)
    delays = [starts.uniform(0, spread) for _ in bodies]

    def send(body, delay):
        time.sleep(delay)
        try:
            return server.generate(**body)
        except HTTPFailure as failure:
            return failure

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(send, bodies, delays))


def assert_same_pictures(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        difference = np.abs(pixels(pngs(one)[0]) - pixels(pngs(other)[0]))
        assert difference.max() <= 1
        assert one["guidance"] == other["guidance"]


@pytest.fixture(scope="module", params=LAYOUTS)
def batching(request, glm):
    with Server(glm, *BATCHING, *LAYOUTS[request.param], *FP32_FLAGS) as started:
        yield started


@pytest.fixture(scope="module")
def solo(server):
    """What a server without continuous batching answers."""
    return [server.generate(**body) for body in requests()]


def test_each_picture_equals_its_solo_run(batching, solo):
    bodies = requests()
    assert_same_pictures(together(batching, bodies), solo)
    assert_same_pictures(together(batching, bodies[::-1], spread=2.0), solo[::-1])


@pytest.fixture(scope="module")
def plain(glm, tmp_path_factory):
    """One rank, with a trace and a probe that fails marked requests."""
    trace = tmp_path_factory.mktemp("trace") / "trace.json"
    environment = probe_environment(PROBE_FAIL="1")
    with Server(
        glm, *BATCHING, "--schedule-trace", str(trace), *FP32_FLAGS, env=environment
    ) as started:
        started.trace = trace
        yield started


def test_join_at_every_step(plain, server):
    """A short request joins a long one at each of its steps, and leaves it again."""
    long = dict(guidance_curve="front:3:1@0.5", num_inference_steps=12, seed=1, prompt="long")
    short = dict(guidance_curve="constant:2", num_inference_steps=1, seed=2, prompt="short")
    wanted = [server.generate(**long), server.generate(**short)]
    for _ in range(3):
        bodies = [long] + [short] * 5
        got = together(plain, bodies, spread=1.5)
        assert_same_pictures(got, [wanted[0]] + [wanted[1]] * 5)


def test_sizes_that_cannot_share(plain, server):
    bodies = [dict(size="64x64", seed=i) for i in range(3)] + [
        dict(size="96x64", seed=i, n=2) for i in range(2)
    ]
    wanted = [server.generate(**body) for body in bodies]
    assert_same_pictures(together(plain, bodies), wanted)


def test_one_bad_row_fails_alone(plain, server):
    good = dict(guidance_curve="constant:2", seed=3, num_inference_steps=8)
    wanted = server.generate(**good)
    for where in ("prepare", "row", "decode"):
        bodies = [good, dict(good, prompt=f"probe: fail in {where}"), good]
        first, failed, last = together(plain, bodies)
        assert_same_pictures([first, last], [wanted, wanted])
        assert failed.status == 500
        assert f"probe failed in {where}" in plain.log.read_text()


def disconnect_after(server, body: dict, seconds: float) -> None:
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        time.sleep(seconds)


def test_a_client_that_goes_away_gives_its_rows_back(plain):
    body = dict(prompt="gone", size="64x64", num_inference_steps=5000, response_format="b64_json")
    disconnect_after(plain, body, 3.0)
    start = time.monotonic()
    plain.generate(num_inference_steps=4)
    assert time.monotonic() - start < 20  # 5000 steps would take far longer
    deadline = time.monotonic() + 20
    while "was aborted: its client is gone" not in plain.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_many_requests_and_cancels(plain):
    """Every request is answered once; cancelled ones leave nothing behind."""
    choice = random.Random(2)
    bodies = [
        dict(
            size=choice.choice(["64x64", "96x64"]),
            num_inference_steps=choice.randint(1, 8),
            guidance_curve=choice.choice(CURVES),
            seed=i,
        )
        for i in range(30)
    ]
    cancelled = [choice.uniform(0, 3) for _ in range(8)]
    with ThreadPoolExecutor(40) as pool:
        gone = [
            pool.submit(disconnect_after, plain, dict(bodies[0], prompt="gone"), seconds)
            for seconds in cancelled
        ]
        answers = list(pool.map(lambda body: plain.generate(**body), bodies))
        for future in gone:
            future.result()
    assert len({answer["id"] for answer in answers}) == len(bodies)
    for body, answer in zip(bodies, answers):
        steps = body["num_inference_steps"]
        assert answer["guidance"]["buckets"][-1]["steps"][1] == steps - 1


def test_trace(plain):
    """The trace says which samples shared which step."""
    together(plain, requests())
    events = json.loads(plain.trace.read_text().rstrip().rstrip(",") + "]")
    steps = [event for event in events if event["name"] == "step"]
    assert max(event["args"]["samples"] for event in steps) >= 3
    assert all(event["args"]["rows"] <= 16 for event in steps)
    lanes = {event["tid"] for event in events if event["name"] == "decode"}
    assert len(lanes) >= 8
