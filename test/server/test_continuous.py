"""Continuous batching: each picture equals its solo run, whoever else ran beside it."""

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from harness.batching import (
    assert_same_pictures,
    mixed_requests,
    steps_run,
    together,
    trace_events,
)
from harness.processes import probe_environment, wait_until
from harness.server import FP32_FLAGS, Server, pixels, pngs

ALONE = ("--guidance-buckets", "8", "--max-running-samples", "0")
CFG_PARALLEL = ("--guidance-buckets", "8", "--num-gpus", "2", "--enable-cfg-parallel")


@pytest.fixture(scope="module")
def solo_server(glm):
    """Requests run one after the other, in upstream's loop."""
    with Server(glm, *ALONE, *FP32_FLAGS) as started:
        yield started


@pytest.fixture(scope="module")
def solo(solo_server):
    return [solo_server.generate(**body) for body in mixed_requests()]


@pytest.fixture(scope="module")
def cfg_parallel(glm):
    environment = probe_environment(PROBE_FAIL="1")
    with Server(glm, *CFG_PARALLEL, *FP32_FLAGS, env=environment) as started:
        yield started


@pytest.mark.parametrize("layout", ["server", "cfg_parallel"])
def test_each_picture_equals_its_solo_run(request, layout, solo):
    server = request.getfixturevalue(layout)
    bodies = mixed_requests()
    assert_same_pictures(together(server, bodies), solo)
    assert_same_pictures(together(server, bodies[::-1], spread=2.0), solo[::-1])


def test_one_rank_decodes_and_fails(cfg_parallel, solo):
    """Under CFG parallel the other rank waits while the first decodes."""
    bodies = mixed_requests()[:2] + [dict(prompt="fail in decode", num_inference_steps=4)]
    *got, failed = together(cfg_parallel, bodies)
    assert_same_pictures(got, solo[:2])
    assert failed.status == 500


def test_join_and_leave_at_every_step(probed, solo_server):
    """One-step requests join a long one at each of its steps, and leave it again."""
    long = dict(
        guidance_curve="front:3:1@0.5", num_inference_steps=12, seed=1, prompt="slow step"
    )
    shorts = [
        dict(guidance_curve="constant:2", num_inference_steps=1, seed=i, prompt=f"short {quote}")
        for i, quote in enumerate(["", '"a"', '"b"', '"c d"'])
    ]
    wanted_long, *wanted = [solo_server.generate(**body) for body in (long, *shorts)]
    joined: set[int] = set()
    for _ in range(6):  # when a request joins depends on the machine's other work
        seen = len(trace_events(probed.trace))
        # sooner than the steps of the long one: one waits at each of them, and one is let in
        got = together(probed, [long] + shorts * 4, every=0.2)
        assert_same_pictures(got, [wanted_long] + wanted * 4)
        joined |= steps_joined(trace_events(probed.trace)[seen:])
        if joined >= set(range(1, 12)):
            return
    raise AssertionError(f"only steps {sorted(joined)} were joined")


def steps_joined(events: list[dict]) -> set[int]:
    """Steps of the longest request that another one shared."""
    events = [event for event in events if event["name"].startswith("bucket")]
    lane = max(events, key=lambda event: event["args"]["step"])["tid"]
    at = {event["ts"]: event["args"]["step"] for event in events if event["tid"] == lane}
    return {at[event["ts"]] for event in events if event["tid"] != lane and event["ts"] in at}


def test_decoding_leaves_the_loop(probed, solo_server):
    """Another request is taken and stepped while one is being decoded."""
    held = dict(prompt="held decode", num_inference_steps=1)
    other = dict(prompt="other", num_inference_steps=20)
    wanted = [solo_server.generate(**body) for body in (held, other)]
    before = steps_run(probed.trace)
    with ThreadPoolExecutor(2) as pool:
        try:
            decoded = pool.submit(probed.generate, **held)
            wait_until(lambda: steps_run(probed.trace) == before + 1)
            stepped = pool.submit(probed.generate, **other)
            wait_until(lambda: steps_run(probed.trace) == before + 21)
            assert not decoded.done()
        finally:
            probed.let_go.touch()
    assert_same_pictures([decoded.result(), stepped.result()], wanted)


def test_shared_steps_keep_the_row_budget(probed):
    *others, last = mixed_requests()
    slow = dict(last, prompt="slow step")
    together(probed, [slow, *others], every=0.1)  # the others come while it runs
    events = trace_events(probed.trace)
    steps = [event for event in events if event["name"] == "step"]
    assert max(event["args"]["samples"] for event in steps) >= 3
    assert all(event["args"]["rows"] <= 16 for event in steps)


def test_sizes_that_cannot_share(server, solo_server):
    bodies = [dict(size="64x64", seed=i) for i in range(3)] + [
        dict(size="96x64", seed=i, n=2) for i in range(2)
    ]
    wanted = [solo_server.generate(**body) for body in bodies]
    assert_same_pictures(together(server, bodies), wanted)


def source_image() -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.indices((64, 64, 3)).sum(0).astype(np.uint8) * 2).save(data, "PNG")
    return data.getvalue()


def edit(server, seed: int) -> dict:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    response = client.images.edit(
        model="any",
        image=("source.png", source_image()),
        prompt="make it blue",
        size="64x64",
        response_format="b64_json",
        extra_body=dict(
            num_inference_steps=8, seed=seed, guidance_curve="front:3:1@0.5", output_format="png"
        ),
    )
    return {"data": [{"b64_json": response.data[0].b64_json}], "guidance": response.guidance}


def test_image_to_image_between_the_others(server, solo_server):
    """Samples with a key/value cache of their own run alone, between the others' steps."""
    seeds, bodies = range(3), mixed_requests()[:4]
    wanted_edits = [edit(solo_server, seed) for seed in seeds]
    wanted = [solo_server.generate(**body) for body in bodies]
    with ThreadPoolExecutor(3) as pool:
        edits = pool.map(lambda seed: edit(server, seed), seeds)
        assert_same_pictures(together(server, bodies), wanted)
        assert_same_pictures(list(edits), wanted_edits)


def test_the_state_of_a_second_order_sampler_stays_with_its_sample(checkpoints):
    flags = (*FP32_FLAGS, "--text-encoder-precisions", "fp32")
    bodies = [
        dict(prompt=f"picture {i}", guidance_curve=curve, num_inference_steps=4 + 2 * i, seed=i)
        for i, curve in enumerate(["constant:3", "front:4:1@0.5", "constant:1", "linear:5:1"])
    ]
    with Server(checkpoints["sana"], "--guidance-buckets", "8", *flags) as sana:
        wanted = [sana.generate(**body) for body in bodies]
        for spread in (0.0, 0.3):
            assert_same_pictures(together(sana, bodies, spread=spread), wanted)
    pictures = [pixels(pngs(one)[0]) for one in wanted]
    assert all(np.abs(one - pictures[0]).max() > 1 for one in pictures[1:])
