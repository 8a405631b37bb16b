"""Bucket graphs on a GPU: right in every bucket, and every failure that others met."""

import threading

import pytest
import torch

from harness.graphs import (
    assert_close,
    eagerly,
    forward_replaced,
    prefer_replays,
    random_samples,
    replay,
)
from harness.worker import Worker, write_lora

pytestmark = pytest.mark.gpu

MB = 2**20


@pytest.fixture(scope="module")
def worker(glm, tmp_path_factory):
    started = Worker(
        glm,
        priors=tmp_path_factory.mktemp("priors"),
        guidance_buckets=8,
        bucket_graphs="full",
        bucket_graph_rows=[1, 2, 4, 8],
        bucket_graph_resolutions=["256x256", "512x256"],
        bucket_graph_text_lengths=[32],
        attention_backend="torch_sdpa",
    )
    prefer_replays(started.stage.graphs)
    yield started
    started.close()


@pytest.fixture
def graphs(worker):
    """All declared graphs, whatever the test before dropped."""
    from sglang.multimodal_gen.runtime.bucket_cuda_graph.build import capture_declared

    graphs = worker.stage.graphs
    if len(graphs.graphs) < 16 or graphs.refused:
        graphs.drop("a test dropped some")
        capture_declared(graphs, worker.stage, worker.server_args)
    assert not graphs.refused
    prefer_replays(graphs)
    return graphs


def held_bytes() -> int:
    """Device memory of this process's allocator, pools of graphs included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def draw() -> None:
    """The default generator works, eagerly."""
    assert torch.randn(8, device="cuda").isfinite().all()


def test_every_declared_bucket_was_captured_and_equals_eager(graphs):
    assert len(graphs.graphs) == 16  # 2 resolutions x (text 1, text up to 32) x 4 row buckets
    for bucket, graph in graphs.graphs.items():
        print(bucket.label, graph.error)
        assert graph.error == 0.0, bucket.label


def test_every_row_count_of_every_bucket(worker, graphs):
    for bucket in graphs.graphs:
        for rows in range(1, bucket.rows + 1):
            samples = random_samples(graphs, bucket, rows, seed=rows)
            assert_close(replay(graphs, bucket, samples), eagerly(worker, samples), graphs.dtype)


def test_padding_rows_reach_no_output(graphs):
    for bucket in graphs.graphs:
        if bucket.rows < 4:
            continue
        samples = random_samples(graphs, bucket, bucket.rows - 1, seed=5)
        wanted = replay(graphs, bucket, samples)
        inputs = graphs._inputs[bucket.shape]
        held = {
            slot
            for slot, key in enumerate(inputs._held)
            if key and key[0] in {sample.serial for sample in samples}
        }
        for slot in set(range(bucket.rows)) - held:
            inputs._held[slot] = None
            for buffer in inputs.rows.values():
                if buffer.is_floating_point():
                    buffer[slot] = float("nan")
        inputs.latents[len(samples) :] = float("nan")
        got = replay(graphs, bucket, samples)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted))
        inputs.forget()
        for buffer in (*inputs.rows.values(), inputs.latents):
            if buffer.is_floating_point():
                buffer.nan_to_num_(0.0)


def test_an_unguided_sample_is_exactly_its_row(graphs):
    from dataclasses import replace

    for bucket in graphs.graphs:
        (sample,) = random_samples(graphs, bucket, 1, seed=1)
        sample = replace(sample, scale=4.0)  # even then: cond and uncond are one row
        (got,) = replay(graphs, bucket, [sample])
        rows = graphs.graphs[bucket].rows_out
        assert any(torch.equal(got[0], row.float()) for row in rows)


def test_buckets_interleave_for_1000_steps(graphs):
    """The first graph replays right after the last was captured, and so on, in any order."""
    buckets = list(graphs.graphs)[::3][:5]
    assert len(buckets) == 5
    steps = [
        (bucket, random_samples(graphs, bucket, rows, seed=seed))
        for seed, bucket in enumerate(buckets)
        for rows in {1, bucket.rows, max(1, bucket.rows - 1)}
    ]
    wanted = [replay(graphs, *step) for step in steps]
    order = torch.randint(len(steps), (1000,), generator=torch.Generator().manual_seed(0))
    for index in order.tolist():
        got = replay(graphs, *steps[index])
        assert all(torch.equal(one, other) for one, other in zip(got, wanted[index])), index


def test_a_replayed_step_does_not_sync(graphs):
    bucket = max(graphs.graphs, key=lambda bucket: bucket.rows)
    samples = random_samples(graphs, bucket, bucket.rows, seed=3)
    others = random_samples(graphs, bucket, bucket.rows, seed=4)
    replay(graphs, bucket, samples)
    torch.cuda.set_sync_debug_mode("error")
    try:
        replay(graphs, bucket, others)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def spare_bucket(graphs):
    """A bucket beyond the declared ones."""
    from dataclasses import replace

    bucket = max(graphs.graphs)
    return replace(bucket, shape=replace(bucket.shape, latent_shape=(16, 24, 24)))


def failing(kind: str, own):
    def forward(inputs, rows):
        rows_out, combined = own(inputs, rows)
        if torch.cuda.is_current_stream_capturing():
            if kind == "raises":
                raise RuntimeError("made to fail")
            if kind == "syncs":
                combined.sum().item()
            if kind == "draws and syncs":
                torch.randn(8, device=combined.device)
                combined.sum().item()
            if kind == "out of memory":
                torch.empty(2**42, dtype=torch.uint8, device=combined.device)
        return rows_out, combined

    return forward


@pytest.mark.parametrize("kind", ["raises", "syncs", "draws and syncs", "out of memory"])
def test_a_failed_capture_is_undone(worker, graphs, kind):
    some = max(graphs.graphs)
    samples = random_samples(graphs, some, some.rows, seed=2)
    wanted = replay(graphs, some, samples)
    bucket = spare_bucket(graphs)
    torch.manual_seed(11)
    first = torch.randn(4, device="cuda")
    torch.manual_seed(11)
    graphs.refused.clear()
    with forward_replaced(graphs, failing(kind, graphs.forward)):
        assert not graphs.capture(bucket)
        before = held_bytes()
        for _ in range(3):
            assert not graphs.capture(bucket)
    # a capture that could not be ended keeps its graph for good, and with it a small block
    assert held_bytes() - before <= 3 * 2 * MB
    assert torch.equal(torch.randn(4, device="cuda"), first)  # and draws nothing
    assert not torch.cuda.is_current_stream_capturing()
    assert all(map(torch.equal, replay(graphs, some, samples), wanted))
    graphs.refused.clear()
    assert graphs.capture(bucket)  # the pool works on
    prefer_replays(graphs)
    others = random_samples(graphs, bucket, bucket.rows, seed=2)
    assert_close(replay(graphs, bucket, others), eagerly(worker, others), graphs.dtype)
    draw()
    graphs._drop_graph(bucket)
    graphs._tidy()


def test_a_graph_that_differs_is_dropped(graphs):
    own, bucket = graphs.forward, spare_bucket(graphs)

    def forward(inputs, rows):
        rows_out, combined = own(inputs, rows)
        constant = 1.0 if torch.cuda.is_current_stream_capturing() else 0.0
        return rows_out, combined + constant

    with forward_replaced(graphs, forward):
        assert not graphs.capture(bucket)
    assert "differs from eager" in graphs.refused[bucket]
    graphs.refused.clear()


def test_a_replay_that_fails_falls_back_to_eager(worker, graphs, monkeypatch):
    request = dict(width=256, height=256, num_inference_steps=4, guidance_curve="constant:2")
    (wanted,) = worker.denoise(request)
    replays = sum(graphs.replays.values())

    def fail():
        raise RuntimeError("made to fail")

    for graph in graphs.graphs.values():
        monkeypatch.setattr(graph, "replay", fail)
    (got,) = worker.denoise(request)
    assert graphs.misses["replay failed"] >= 1
    assert sum(graphs.replays.values()) == replays
    assert_close([got], [wanted], graphs.dtype)
    assert graphs.refused
    graphs.drop("test")


def test_denoising_replays_and_equals_eager(worker, graphs):
    requests = [
        dict(
            width=256,
            height=256,
            num_inference_steps=4 + i,
            seed=i,
            guidance_curve=curve,
            prompt=prompt,
        )
        for i, (curve, prompt) in enumerate(
            [
                ("constant:2", "plain"),
                ("front:3:1@0.5", 'a sign that says "open"'),
                ("constant:0", "uncond alone"),
                ("linear:4:1.2", "'quoted' and 'again'"),
            ]
        )
    ]
    misses = sum(graphs.misses.values())
    got = worker.denoise(*requests)
    assert sum(graphs.misses.values()) == misses
    worker.stage.graphs = None
    try:
        wanted = worker.denoise(*requests)
    finally:
        worker.stage.graphs = graphs
    assert_close(got, wanted, graphs.dtype)


def test_lazy_capture(worker, graphs):
    """A resolution without graphs: eager and counted; captured when asked to at an idle moment."""
    request = dict(width=320, height=320, num_inference_steps=6, guidance_curve="constant:2")
    held, misses = len(graphs.graphs), graphs.misses["not captured"]
    (eager,) = worker.denoise(request)
    assert len(graphs.graphs) == held  # nothing was captured while it ran
    assert graphs.misses["not captured"] == misses + 6
    graphs.demand.steps.clear()  # the tests before asked for much else
    worker.denoise(request)
    while graphs.capture_next():
        pass
    assert len(graphs.graphs) > held
    prefer_replays(graphs)
    (replayed,) = worker.denoise(request)
    assert graphs.misses["not captured"] == misses + 12
    assert_close([replayed], [eager], graphs.dtype)
    graphs.demand.steps.clear()


def test_text_longer_than_every_bucket(worker, graphs):
    misses = graphs.misses["text length"]
    words = "word " * 12
    request = dict(width=256, height=256, num_inference_steps=3, prompt=f'says "{words}"')
    (latents,) = worker.denoise(request)
    assert latents.isfinite().all()
    assert graphs.misses["text length"] == misses + 3


def test_capture_while_another_thread_uses_the_device(graphs):
    stop, errors = threading.Event(), []

    def work():
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    x = torch.ones(512, 512, device="cuda")
                    (x @ x).sum().item()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        graphs.refused.clear()
        bucket = spare_bucket(graphs)
        assert graphs.capture(bucket), graphs.refused
    finally:
        stop.set()
        thread.join()
    assert not errors
    graphs._drop_graph(bucket)
    graphs._tidy()


def test_dropping_gives_the_memory_back(worker, graphs):
    from sglang.multimodal_gen.runtime.bucket_cuda_graph.build import capture_declared

    graphs.drop("test")
    without, free = held_bytes(), torch.cuda.mem_get_info()[0]
    for _ in range(3):
        capture_declared(graphs, worker.stage, worker.server_args)
        assert len(graphs.graphs) == 16
        assert held_bytes() > without
        graphs.drop("test")
        assert not graphs.budget.used
        assert held_bytes() == without
    # graphs themselves live outside of the allocator, where other processes count too
    print(f"{(free - torch.cuda.mem_get_info()[0]) / MB:.1f} MB of the device more than before")


def test_a_full_budget_drops_the_least_recently_used(graphs):
    own = graphs.budget.limit
    for bucket, graph in graphs.graphs.items():
        # what a tiny DiT's graph takes is lost in the noise, and other processes count too
        graphs.budget.own[bucket] = graph.own_bytes = 10 * MB
    graphs.budget.limit = graphs.budget.used - 1
    first, second, *_ = graphs.budget.own
    try:
        assert graphs.capture(spare_bucket(graphs)), graphs.refused
    finally:
        graphs.budget.limit = own
    assert first not in graphs.graphs and second in graphs.graphs
    draw()
    graphs.drop("test")


def test_changed_weights(worker, graphs):
    """After weights changed in place and graphs were dropped, new graphs are right."""
    bucket = max(graphs.graphs)
    samples = random_samples(graphs, bucket, bucket.rows, seed=9)
    before = replay(graphs, bucket, samples)
    weight = worker.stage.transformer.proj_out.weight
    saved = weight.detach().clone()
    graphs.drop("weights change")
    with torch.no_grad():
        weight.mul_(1.5)
    try:
        assert graphs.capture(bucket)
        got = replay(graphs, bucket, samples)
        assert_close(got, eagerly(worker, samples), graphs.dtype)
        assert not torch.allclose(got[0], before[0])
    finally:
        with torch.no_grad():
            weight.copy_(saved)
        graphs.drop("test")


def test_lora_switch(worker, graphs, tmp_path):
    """Graphs go before a LoRA request acts, also one that fails; new ones have the LoRA."""
    request = dict(width=256, height=256, num_inference_steps=4, guidance_curve="constant:2")
    (plain,) = worker.denoise(request)
    pictures = []
    for path, fails in ((write_lora(worker, tmp_path), False), (tmp_path / "missing", True)):
        bucket = max(graphs.graphs)
        assert worker.set_lora("style", path) is fails
        assert not graphs.graphs
        while graphs.capture_next():
            pass
        assert graphs.capture(bucket)
        prefer_replays(graphs)
        replays = sum(graphs.replays.values())
        pictures += worker.denoise(request)
        assert sum(graphs.replays.values()) > replays
        worker.stage.graphs = None
        pictures += worker.denoise(request)
        worker.stage.graphs = graphs
    with_lora, eagerly_with_lora, after_failure, eagerly_after_failure = pictures
    assert_close([with_lora], [eagerly_with_lora], graphs.dtype)
    assert_close([after_failure], [eagerly_after_failure], graphs.dtype)
    assert not torch.allclose(with_lora, plain, rtol=0.01, atol=0.01)


def test_memory_is_flat_over_500_requests(graphs):
    steps = [
        (bucket, random_samples(graphs, bucket, bucket.rows, seed=seed))
        for seed, bucket in enumerate(graphs.graphs)
    ]
    for step in steps:
        replay(graphs, *step)
    before = held_bytes()
    for index in range(500):
        bucket = steps[index % len(steps)][0]
        for _ in range(2):
            replay(graphs, bucket, random_samples(graphs, bucket, bucket.rows, seed=index))
    assert held_bytes() <= before
