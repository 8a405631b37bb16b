"""Mixed requests for continuous batching, sent side by side."""

import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from harness.server import HTTPFailure, Server, pixels, pngs

CURVES = [
    *("constant:2", "front:3:1@0.5", "interval:4@0.3-0.7", "constant:1"),
    *("linear:4:1.2", "peak:1:3@0.5", "constant:0", "front:5:1@0.2"),
]


def mixed_requests() -> list[dict]:
    """Eight of them: different prompts, curves, steps (4 to 11), seeds and quoted texts."""
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


def together(
    server: Server, bodies: list[dict], *, spread: float = 0.0, every: float = 0.0
) -> list:
    """Answers (or failures) in order.

    Args:
        spread: each request starts at a random time within so many seconds.
        every: each request starts so many seconds after the one before it.
    """
    starts = random.Random(1)
    delays = [starts.uniform(0, spread) + i * every for i in range(len(bodies))]

    def send(body, delay):
        time.sleep(delay)
        try:
            return server.generate(**body)
        except HTTPFailure as failure:
            return failure

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(send, bodies, delays))


def assert_same_pictures(got: list[dict], wanted: list[dict]) -> None:
    """Every pixel within 1/255, and the same report of what was run."""
    for one, other in zip(got, wanted, strict=True):
        for mine, theirs in zip(pngs(one), pngs(other), strict=True):
            assert np.abs(pixels(mine) - pixels(theirs)).max() <= 1
        assert one["guidance"] == other["guidance"]


@contextmanager
def abandoned(server: Server, body: dict) -> Iterator[None]:
    """From a request's last byte until its client goes away without reading the answer."""
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        yield


def disconnect_after(server: Server, body: dict, seconds: float) -> None:
    """Send a request and go away without reading its answer."""
    with abandoned(server, body):
        time.sleep(seconds)


def steps_run(path: Path) -> int:
    """Shared steps in what `--schedule-trace` wrote so far."""
    return sum(event["name"] == "step" for event in trace_events(path))


def trace_events(path: Path) -> list[dict[str, Any]]:
    """What `--schedule-trace` wrote so far; a "decode" is written after its answer was sent."""
    lines, _, _unfinished = path.read_text().rpartition("\n")
    return json.loads(lines.rstrip(",") + "]")
