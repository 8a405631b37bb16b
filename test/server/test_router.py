"""Two AR servers behind sglang-router: one dies in mid-request, and nothing is lost."""

import importlib.util
import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness.processes import wait_until
from harness.server import FP32_FLAGS, Server, ar_command, pixels, pngs
from harness.topology import router_command

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None,
    reason="sglang-router is not installed: pip install '.[test]'",
)


@pytest.fixture(scope="module")
def second_ar(glm):
    with Server(glm, command=ar_command(glm)) as started:
        yield started


@pytest.fixture(scope="module")
def router(glm, ar_server, second_ar):
    """One that asks the server for its model that is going to die: by chance, at its start."""

    def asked() -> int:
        return second_ar.log.read_text().count("GET /get_model_info")

    for _ in range(20):
        with Server(glm, command=router_command([ar_server.url, second_ar.url])) as it:
            wait_until(lambda: json.loads(it.get("/workers"))["total"] == 2)
            before = asked()
            it.get("/get_model_info")
            if asked() > before:
                yield it
                return
    raise AssertionError("none of 20 routers asked the second server")


@pytest.fixture(scope="module")
def server(glm, router):
    flags = ("--guidance-buckets", "8", "--srt-encoder-url", router.url, "--prior-cache-size", "0")
    with Server(glm, *flags, *FP32_FLAGS) as started:
        yield started


def test_both_give_the_same_tokens_for_a_seed(server, ar_server, second_ar):
    def written() -> list[int]:
        return [ar.log.read_text().count('POST /generate HTTP/1.1" 200') for ar in both]

    both, request = (ar_server, second_ar), dict(prompt="routed", seed=4)
    before = written()
    first = pngs(server.generate(**request))
    for _ in range(3):  # round robin, and the cache is off
        assert pngs(server.generate(**request)) == first
    assert all(now > then for now, then in zip(written(), before))


def test_one_of_two_dies_and_nothing_is_lost(server, second_ar):
    requests = [dict(prompt=f"routed {i}", seed=i, size="128x128") for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(server.generate, **request) for request in requests]
        time.sleep(0.7)
        second_ar.kill()
        answers = [future.result() for future in futures]
    assert all(len(answer["data"]) == 1 for answer in answers)
    for request, answer in zip(requests, answers):
        (solo,) = pngs(server.generate(**request))  # by the one that is left
        assert np.abs(pixels(pngs(answer)[0]) - pixels(solo)).max() <= 1
    time.sleep(5)  # until the connections are closed: behind new ones may be another model
    start = time.monotonic()
    assert server.generate(prompt="after")["data"]
    assert time.monotonic() - start < 100  # the router takes minutes to count the dead one out
