"""Everything about bucket graphs but CUDA: the same code with a recorder that runs eagerly."""

from dataclasses import replace

import pytest
import torch

from harness.engine import FP32
from harness.graphs import (
    assert_close,
    eagerly,
    forward_replaced,
    install_eager_graphs,
    prefer_replays,
    random_samples,
    replay,
)
from harness.worker import Worker, write_lora

FAMILIES = {"glm-image": 12, "sd3-medium": 4}  # and how many buckets are declared
REQUESTS = [
    dict(num_inference_steps=4 + i, seed=i, guidance_curve=curve, prompt=f"picture {i}{text}")
    for i, (curve, text) in enumerate(
        [
            ("constant:2", ""),
            ("front:3:1@0.5", ' "a"'),
            ("constant:0", ""),
            ("linear:4:1.2", " 'two words'"),
        ]
    )
]


@pytest.fixture(scope="module", params=FAMILIES)
def worker(request, checkpoints):
    options = {} if request.param == "glm-image" else {"text_encoder_precisions": ("fp32",) * 3}
    started = Worker(
        checkpoints[request.param],
        guidance_buckets=8,
        bucket_graph_rows=[1, 2, 4, 8],
        bucket_graph_resolutions=["64x64"],
        bucket_graph_text_lengths=[16, 32],
        **FP32,
        **options,
    )
    started.family = request.param
    started.eager = started.denoise(*REQUESTS), [started.denoise(one)[0] for one in REQUESTS]
    yield started
    started.close()


@pytest.fixture
def graphs(worker):
    graphs = install_eager_graphs(worker)
    yield graphs
    worker.stage.graphs = None


def test_a_cpu_host_has_no_graphs_by_itself(worker):
    assert worker.stage.graphs is None


def test_all_declared_buckets(worker, graphs):
    assert len(graphs.graphs) == FAMILIES[worker.family]
    assert not graphs.refused
    assert all(graph.error == 0 for graph in graphs.graphs.values())


def test_denoising_equals_eager_together_and_alone(worker, graphs):
    """What a request really brings fits the static inputs: nothing misses."""
    together, alone = worker.eager
    assert_close(worker.denoise(*REQUESTS), together, torch.float32)
    assert_close([worker.denoise(one)[0] for one in REQUESTS], alone, torch.float32)
    assert not graphs.misses
    assert graphs.demand.replayed_share == 1.0
    assert sum(graphs.padding_rows.values()) > 0
    assert worker.stage.padded_rows == graphs.padding


def test_every_row_count(worker, graphs):
    for bucket in graphs.graphs:
        for rows in range(1, bucket.rows + 1):
            samples = random_samples(graphs, bucket, rows, seed=rows)
            assert_close(replay(graphs, bucket, samples), eagerly(worker, samples), torch.float32)


def test_padding_reaches_no_output(graphs):
    bucket = max(graphs.graphs, key=lambda bucket: bucket.rows)
    samples = random_samples(graphs, bucket, bucket.rows - 1, seed=3)
    wanted = replay(graphs, bucket, samples)
    inputs = graphs._inputs[bucket.shape]
    serials = {sample.serial for sample in samples}
    (slot,) = (s for s, key in enumerate(inputs._held) if key is None or key[0] not in serials)
    for buffer in inputs.rows.values():
        if buffer.is_floating_point():
            buffer[slot] = float("nan")
    inputs.latents[len(samples) :] = float("nan")
    assert all(map(torch.equal, replay(graphs, bucket, samples), wanted))


def test_post_processes_run_on_the_graphs_rows(worker, graphs):
    request = dict(REQUESTS[0], guidance_rescale=0.7)
    (got,) = worker.denoise(request)
    assert not graphs.misses
    worker.stage.graphs = None
    (wanted,) = worker.denoise(request)
    assert_close([got], [wanted], torch.float32)


def test_several_images_a_request(worker, graphs):
    request = dict(REQUESTS[0], num_outputs_per_prompt=3)
    (got,) = worker.denoise(request)
    assert graphs.replays and not graphs.misses  # 6 rows in 8
    worker.stage.graphs = None
    (wanted,) = worker.denoise(request)
    assert_close([got], [wanted], torch.float32)


def test_constants_are_loaded_once(graphs, monkeypatch):
    bucket = max(graphs.graphs, key=lambda bucket: bucket.rows)
    inputs = graphs._inputs[bucket.shape]
    loads = []
    load_row = inputs._load_row
    monkeypatch.setattr(inputs, "_load_row", lambda *args: (loads.append(args[2]), load_row(*args)))
    samples = random_samples(graphs, bucket, 6, seed=1)
    for _ in range(3):
        replay(graphs, bucket, samples)
    assert len(loads) == 6
    newcomer = random_samples(graphs, bucket, 2, seed=6)
    replay(graphs, bucket, samples[1:] + newcomer)
    assert len(loads) == 8


def test_other_inputs_are_not_replayed(worker, graphs):
    bucket = max(graphs.graphs, key=lambda bucket: bucket.rows)
    (sample,) = random_samples(graphs, bucket, 1, seed=1)
    odd = replace(sample, timestep_B=sample.timestep_B.long())
    assert graphs.predict([odd], bucket.shape.quality) is None
    assert graphs.misses == {"other inputs": 1}


def test_a_failed_replay_runs_eagerly(worker, graphs, monkeypatch):
    def fail():
        raise RuntimeError("made to fail")

    for graph in graphs.graphs.values():
        monkeypatch.setattr(graph, "replay", fail)
    (got,) = worker.denoise(REQUESTS[0])
    assert_close([got], [worker.eager[1][0]], torch.float32)
    assert graphs.misses["replay failed"] >= 1
    assert any("made to fail" in reason for reason in graphs.refused.values())


def test_a_failed_capture_leaves_the_others(worker, graphs):
    def fail(inputs, rows):
        raise RuntimeError("made to fail")

    bucket = max(graphs.graphs)
    held = set(graphs.graphs)
    other = replace(bucket, shape=replace(bucket.shape, latent_shape=(16, 12, 12)))
    with forward_replaced(graphs, fail):
        assert not graphs.capture(other)
    assert graphs.refused == {other: "made to fail"}
    assert set(graphs.graphs) == held
    graphs.demand.add(other, replayed=False)
    assert not graphs.capture_next()  # it is not tried again and again


def test_a_graph_that_differs_is_dropped(graphs):
    own, calls, bucket = graphs.forward, [], max(graphs.graphs)

    def forward(inputs, rows):
        calls.append(rows)
        rows_out, combined = own(inputs, rows)
        return rows_out, combined + len(calls)

    other = replace(bucket, shape=replace(bucket.shape, latent_shape=(16, 12, 12)))
    with forward_replaced(graphs, forward):
        assert not graphs.capture(other)
    assert "differs from eager" in graphs.refused[other]


def test_lazy_capture(worker, graphs):
    if worker.family != "glm-image":
        pytest.skip("one family is enough")
    request = dict(REQUESTS[0], width=96, height=64)
    worker.denoise(request)
    assert graphs.misses == {"not captured": 4}
    assert graphs.capture_next()
    assert not graphs.capture_next()
    prefer_replays(graphs)
    worker.denoise(request)
    assert graphs.misses == {"not captured": 4}


def test_a_full_budget_keeps_what_as_many_steps_ask_for(worker, graphs):
    """Idle captures end: a bucket never takes the place of one that is wanted as much."""
    buckets = sorted(graphs.graphs)
    for bucket in buckets:
        graphs.budget.own[bucket] = 10
        for _ in range(5):
            graphs.demand.add(bucket, replayed=True)
    graphs.budget.limit = graphs.budget.used - 1
    other = replace(buckets[-1], shape=replace(buckets[-1].shape, latent_shape=(16, 12, 12)))
    for _ in range(5 * len(buckets)):
        graphs.demand.add(other, replayed=False)
    graphs.demand.steps[other] = 5  # no more than any of them
    assert not graphs.capture(other, spare=graphs.demand.steps[other])
    assert "budget is full" in graphs.refused[other]
    assert sorted(graphs.graphs) == buckets
    graphs.refused.clear()
    assert graphs.capture(other, spare=6)
    assert len(graphs.graphs) == len(buckets)


def test_weights_that_moved_drop_all_graphs(worker, graphs):
    parameter = next(worker.stage.transformer.parameters())
    parameter.data = parameter.data.clone()
    (got,) = worker.denoise(REQUESTS[0])
    assert_close([got], [worker.eager[1][0]], torch.float32)
    assert not graphs.graphs
    assert not graphs.replays


@pytest.mark.parametrize(
    ("name", "drops"),
    [
        ("SetLoraReq", True),
        ("UnmergeLoraWeightsReq", True),
        ("UpdateWeightFromDiskReqInput", True),
        ("ReleaseMemoryOccupationReqInput", True),
        ("ListLorasReq", False),
        ("GetDisaggStatsReq", False),
        ("dict", False),
    ],
)
def test_control_requests(worker, graphs, name, drops):
    from types import SimpleNamespace

    from sglang.multimodal_gen.guidance_buckets.server_hooks import drop_bucket_graphs

    scheduler = SimpleNamespace(worker=worker.worker, server_args=worker.server_args)
    drop_bucket_graphs(scheduler, type(name, (), {})())
    assert bool(graphs.graphs) is not drops


def test_lora_switch(worker, graphs, tmp_path):
    if worker.family != "glm-image":
        pytest.skip("its DiT has no LoRA layers")
    before = [worker.denoise(REQUESTS[0])[0]]
    assert worker.set_lora("style", tmp_path / "missing")
    assert not graphs.graphs  # also where it failed
    assert not worker.set_lora("style", write_lora(worker, tmp_path))
    while graphs.capture_next():
        prefer_replays(graphs)
    replays = sum(graphs.replays.values())
    (got,) = worker.denoise(REQUESTS[0])
    assert sum(graphs.replays.values()) > replays
    worker.stage.graphs = None
    assert_close([got], worker.denoise(REQUESTS[0]), torch.float32)
    assert not torch.allclose(got, before[0], rtol=0.01, atol=0.01)
