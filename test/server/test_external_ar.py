"""GLM-Image with its AR model on a real AR server of SRT, which honours seeds on a CPU host too."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from harness.batching import trace_events
from harness.faulty_ar import CODEBOOK
from harness.processes import probe_environment, wait_until
from harness.server import (
    FP32_FLAGS,
    HTTPFailure,
    Server,
    ar_command,
    pixels,
    pngs,
    source_image,
    start_script,
    wait_for_health,
)
from sglang.multimodal_gen.configs.glm_image_prior import PriorConfig
from sglang.multimodal_gen.configs.sample.glmimage import GlmImageSamplingParams
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages import (
    glm_image_prior,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image_prior.request import (  # noqa: E501
    PriorRequest,
    prepare,
)

THREE_SIZES = ("64x64", "96x64", "128x128")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("priors")


@pytest.fixture(scope="module")
def servers(glm, ar_server, kept, tmp_path_factory):
    """Beside the AR server, and with the AR model in its process; they start side by side."""
    trace = tmp_path_factory.mktemp("trace") / "trace.json"
    flags = (
        *("--guidance-buckets", "8", "--srt-encoder-url", ar_server.url, "--prior-cache-size", "4"),
        *("--srt-encoder-total-timeout", "600", "--schedule-trace", str(trace)),
        *("--warmup-mode", "server"),
    )
    probe = probe_environment(PROBE_KEEP_PRIOR=str(kept))
    with (
        Server(glm, *flags, *FP32_FLAGS, waits=False) as beside,
        Server(glm, **start_script("one_process.sh", glm, **probe), waits=False) as within,
    ):
        beside.trace = trace
        beside.wait()
        within.wait()
        yield beside, within


@pytest.fixture(scope="module")
def server(servers):
    """Warmed up as a user's server is, and with a cache that soon forgets."""
    return servers[0]


@pytest.fixture(scope="module")
def in_process(servers):
    """The AR model in the same process, except where `kept` has the tokens already."""
    return servers[1]


def test_warm_up_sends_nothing_that_the_ar_server_cannot_take(server, ar_server):
    log = server.log.read_text()
    assert "warmup req" in log
    assert "HTTP 502" not in log and "HTTP 400" not in log
    assert "Error executing" not in log
    assert 'POST /generate HTTP/1.1" 200' in ar_server.log.read_text()
    assert 'POST /generate HTTP/1.1" 4' not in ar_server.log.read_text()


def test_same_seed_same_picture(server):
    request = dict(guidance_curve="front:3:1@0.5", seed=11)
    first = server.generate(**request)
    assert first["guidance"]["forwards"] == {"cond": 6, "uncond": 3}
    assert "warnings" not in first
    assert pngs(server.generate(**request)) == pngs(first)
    assert pngs(server.generate(**request | {"seed": 12})) != pngs(first)


def test_several_images_are_the_single_ones(server):
    request = dict(guidance_curve="front:3:1@0.5", prompt="a pair")
    pair = server.generate(**request, seed=11, n=2)
    assert pair["guidance"]["forwards"] == {"cond": 6, "uncond": 3}
    singles = [pixels(pngs(server.generate(**request, seed=seed))[0]) for seed in (11, 12)]
    for image, single in zip(map(pixels, pngs(pair)), singles):
        assert np.abs(image - single).max() <= 1


def test_no_barrier_between_requests_of_three_sizes(server, ar_server):
    """First pictures leave before the last tokens are written, and each equals its solo run."""
    requests = [dict(prompt=f"cat {i}", size=THREE_SIZES[i % 3], seed=i) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        futures = []
        for request in requests:
            futures.append(pool.submit(server.generate, **request))
            time.sleep(0.15)
        answers = [future.result() for future in futures]
    ids = {answer["id"] for answer in answers}

    def spans(name: str) -> list[dict]:
        events = [event for event in trace_events(server.trace) if event["name"] == name]
        return [event for event in events if event["args"]["request"] in ids]

    wait_until(lambda: len(spans("decode")) == 12)
    # a request is prepared when its tokens are there
    last_tokens = max(span["ts"] for span in spans("prepare"))
    assert sum(span["ts"] + span["dur"] < last_tokens for span in spans("decode")) >= 3
    for answer, request in zip(answers, requests):
        (solo,) = pngs(server.generate(**request))  # the cache has forgotten most of them
        assert np.abs(pixels(pngs(answer)[0]) - pixels(solo)).max() <= 1


@pytest.mark.parametrize("size", ["500x500", "64x2048", "2048x64", "65x65"])
def test_the_picture_has_the_size_asked_for(server, size):
    width, height = map(int, size.split("x"))
    (png,) = pngs(server.generate(size=size, num_inference_steps=2))
    assert pixels(png).shape == (height, width, 3)


@pytest.mark.parametrize("where", ["server", "in_process"])
def test_a_size_over_the_limit(where, request):
    server = request.getfixturevalue(where)
    with pytest.raises(HTTPFailure) as failure:
        server.generate(size="4096x4096", num_inference_steps=2)
    assert failure.value.status == 400
    assert "4096x4096" in failure.value.body
    server.generate()


@pytest.mark.parametrize("sources", [1, 2])
def test_image_to_image(server, sources):
    """The first source image is smaller than the AR model takes."""
    images = [source_image(32 + 64 * i, 64, shade=2 + i) for i in range(sources)]
    first = pngs(server.edit(images, size="64x64", seed=3))
    assert pixels(first[0]).shape == (64, 64, 3)
    for seed in range(20, 25):  # until the cache has forgotten it
        server.generate(seed=seed)
    assert pngs(server.edit(images, size="64x64", seed=3)) == first
    other = [source_image(64 + 32 * i, 64, shade=3 + i) for i in range(sources)]
    assert pngs(server.edit(other, size="64x64", seed=3)) != first


@contextmanager
def service(glm, ar_server, **sampling):
    started = glm_image_prior.build_service(
        PriorConfig(url=ar_server.url),
        processor=AutoProcessor.from_pretrained(glm / "processor"),
        codebook=CODEBOOK,
        sampling=glm_image_prior.sampling_of(str(glm)) | sampling,
        server_metrics=None,
    )
    yield started
    started.close()


@pytest.fixture(scope="module")
def client(glm, ar_server):
    with service(glm, ar_server) as started:
        yield started


def test_ids_are_drawn_as_the_checkpoint_says(glm, ar_server, client):
    """With top_k 1 there is one picture, whatever the seed."""
    requests = [
        Req(sampling_params=GlmImageSamplingParams(prompt="one", width=64, height=64, seed=seed))
        for seed in (1, 2)
    ]
    with service(glm, ar_server, top_k=1) as greedy:
        first, second = [prior.token_ids_BL for prior in greedy.fetch(requests).result()]
    assert torch.equal(first, second)
    first, second = [prior.token_ids_BL for prior in client.fetch(requests).result()]
    assert not torch.equal(first, second)


@pytest.mark.parametrize("sources", [0, 1, 2])
def test_the_ar_model_in_the_same_process(server, in_process, client, kept, tmp_path, sources):
    """Source images have the same tokens there, and the same tokens make the same picture."""
    images = [source_image(32 + 64 * i, 64) for i in range(sources)]
    paths = [tmp_path / f"{i}.png" for i in range(sources)]
    for path, image in zip(paths, images):
        path.write_bytes(image)
    asked = dict(prompt=f"of {sources}", seed=31)

    def picture(server):
        answer = server.edit(images, size="64x64", **asked) if images else server.generate(**asked)
        return pixels(pngs(answer)[0])

    params = GlmImageSamplingParams(
        **asked, width=64, height=64, image_path=list(map(str, paths)) or None
    )
    (prior,) = client.fetch([Req(sampling_params=params)]).result()
    for other in kept.glob("*.pt"):
        other.unlink()
    picture(in_process)
    (written,) = kept.glob("*.pt")
    _, source_ids, _ = torch.load(written)
    for theirs, ours in zip(source_ids or (), prior.source_token_ids or (), strict=True):
        assert torch.equal(theirs, ours)
    torch.save((prior.token_ids_BL, prior.source_token_ids, None), written)
    assert np.abs(picture(in_process) - picture(server)).max() <= 1


def test_the_picture_has_the_size_of_its_source(server):
    (png,) = pngs(server.edit([source_image(100, 70)], seed=3))
    assert pixels(png).shape == (70, 100, 3)


@pytest.mark.parametrize("where", ["server", "in_process"])
@pytest.mark.parametrize(
    ("image", "cause"),
    [(b"not a picture", "source image"), (source_image(320, 32), "aspect ratio")],
)
def test_a_source_image_that_cannot_be_taken(where, image, cause, request):
    server = request.getfixturevalue(where)
    with pytest.raises(HTTPFailure) as failure:
        server.edit([image], size="64x64")
    assert failure.value.status == 400
    assert cause in failure.value.body


@pytest.mark.parametrize("where", ["server", "in_process"])
def test_source_images_over_the_limit(where, request):
    """As large as the picture, or beside it."""
    server = request.getfixturevalue(where)
    large = source_image(4096, 4096)
    for images, size in (([large], {}), ([large] * 3, {"size": "64x64"})):
        with pytest.raises(HTTPFailure) as failure:
            server.edit(images, **size)
        assert failure.value.status == 400
        assert f"{len(images)} source images, takes" in failure.value.body


def test_a_killed_ar_server_a_plain_one_in_its_place_and_the_first_again(glm, server, ar_server):
    """Each request in flight is answered once, health tells. Upstream's own AR server goes on with
    text-to-image, without seeds, and image-to-image says what it needs.
    """
    request = dict(prompt="before", seed=5, size="128x128")
    wanted = pngs(server.generate(**request))
    command = ar_command(glm, port=ar_server.port, honours_seeds=False)
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(
                server.generate, prompt=f"kill {i}", seed=i, size="128x128", timeout=600
            )
            for i in range(4)
        ]
        time.sleep(0.3)
        ar_server.kill()
        wait_until(lambda: json.loads(server.get("/health"))["status"] == "degraded")
        plain = Server(glm, command=command, upstream=True, waits=False)
        try:
            assert all(len(future.result()["data"]) == 1 for future in futures)
            wait_for_health(server, {"status": "ok"})
            (warning,) = server.generate(prompt="plain", seed=41)["warnings"]
            assert "the AR server ignores seeds" in warning
            with pytest.raises(HTTPFailure) as failure:
                server.edit([source_image(64, shade=9)], size="64x64")
            assert failure.value.status == 502
            assert "needs an AR server with sglang-guidance-buckets installed" in failure.value.body
        finally:
            plain.close()
    ar_server.start()
    ar_server.wait()
    wait_for_health(server, {"status": "ok"})
    answer = server.generate(**request)
    assert "warnings" not in answer
    assert pngs(answer) == wanted  # its tokens were pushed out of the cache


def test_a_greedy_request_leaves_the_others_tokens(ar_server, glm):
    """SRT's own health check is one, and comes into the batch where nothing ran before."""
    processor = AutoProcessor.from_pretrained(glm, subfolder="processor")
    request = PriorRequest(prompt="checked", height=128, width=128, seeds=(5,), sources=())
    body = json.loads(prepare(request, processor, CODEBOOK).body(5))
    greedy = {"input_ids": [0], "sampling_params": {"temperature": 0, "max_new_tokens": 50}}
    wanted = ar_server.post("/generate", body)["output_ids"]
    with ThreadPoolExecutor(6) as pool:
        bodies = [body, greedy] * 3
        answers = list(pool.map(lambda body: ar_server.post("/generate", body), bodies))
    assert [answer["output_ids"] for answer in answers[::2]] == [wanted] * 3
