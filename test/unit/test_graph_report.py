"""What a server says of its bucket graphs, and where it refuses them."""

from types import SimpleNamespace

import pytest

from harness.engine import COMPILED
from sglang.multimodal_gen.configs.bucket_graphs import BucketGraphConfig
from sglang.multimodal_gen.guidance_buckets.graph_flags import graph_arguments, graph_config
from sglang.multimodal_gen.runtime.bucket_cuda_graph import build, report
from sglang.multimodal_gen.runtime.bucket_cuda_graph.buckets import Cost, GraphBucket, GraphShape
from sglang.multimodal_gen.runtime.bucket_cuda_graph.budget import GraphBudget
from sglang.multimodal_gen.runtime.bucket_cuda_graph.demand import Demand
from sglang.multimodal_gen.runtime.bucket_cuda_graph.graph import BucketGraph
from sglang.multimodal_gen.runtime.guidance.support import GuidanceUnsupported

SHAPE = GraphShape(
    latent_shape=(16, 32, 32), text_length=1, masked=False, dtype="bfloat16", quality="exact"
)


def held(*rows: int):
    """As much of `BucketGraphs` as a report reads."""
    graphs = {}
    budget = GraphBudget(2**30)
    for count in rows:
        bucket = GraphBucket(shape=SHAPE, rows=count)
        graph = BucketGraph(bucket, None, None, None, None)
        graph.cost, graph.error = Cost(13.0, 56.0), 0.0
        graph.capture_s, graph.forwards_s, graph.own_bytes = 1.25, 0.5, 2**20
        graphs[bucket] = graph
        budget.add(bucket, 2**20, 2**21)
    demand = Demand()
    demand.add(GraphBucket(shape=SHAPE, rows=1), replayed=True)
    demand.add(None, replayed=False)
    labels = [bucket.label for bucket in graphs]
    return SimpleNamespace(
        graphs=graphs,
        refused={GraphBucket(shape=SHAPE, rows=64): "made to fail"},
        budget=budget,
        demand=demand,
        replays={label: 3 for label in labels} | {"1 row, " + SHAPE.label: 7},
        padding_rows={label: 2 for label in labels} | {"1 row, " + SHAPE.label: 0},
        misses={"not captured": 4},
    )


def test_the_log_table(caplog):
    caplog.set_level("INFO")
    report.logger.addHandler(caplog.handler)
    try:
        report.log_graphs(held(1, 2))
    finally:
        report.logger.removeHandler(caplog.handler)
    text = caplog.text
    assert "2 bucket graphs, 4 of 1024 MB" in text
    header, first = (line.split() for line in text.splitlines()[1:3])
    assert header[:2] == ["bucket", "graph"]
    assert first[-6:] == ["1.25", "0.50", "13.00", "56.00", "1", "no"]
    assert "64 rows, latent 32x32, text 1, bfloat16, exact  none: made to fail" in text


def test_metrics(monkeypatch):
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    gauge = prometheus.Gauge
    monkeypatch.setattr(
        prometheus, "Gauge", lambda *args, **kwargs: gauge(*args, registry=registry, **kwargs)
    )
    metrics = report.GraphMetrics(("monolithic", "replica-0"))
    metrics.publish(held(1, 2))
    metrics.publish(held(2))  # the graph of one row has gone since
    text = prometheus.generate_latest(registry).decode()
    where = 'replica="replica-0",role="monolithic"'
    name = "sglang:diffusion_bucket_graph_"
    one = f'bucket="1 row, {SHAPE.label}",{where}'
    assert f"{name}replays{{{one}}} 7.0" in text
    assert f"{name}bytes{{{one}}} 0.0" in text
    assert f'{name}padding_rows{{bucket="2 rows, {SHAPE.label}",{where}}} 2.0' in text
    assert f'{name}misses{{reason="not captured",{where}}} 4.0' in text
    assert f"{name}replayed_share{{{where}}} 0.5" in text


def server_args(mode="auto", **changes):
    values = dict(
        bucket_graphs=BucketGraphConfig(mode=mode),
        enable_torch_compile=False,
        regional_compile=False,
        offload_during_compile=True,
        is_arg_explicitly_set=lambda name: False,
        quantization=None,
        transformer_weights_path=None,
        num_gpus=1,
        dp_size=1,
        is_dit_layerwise_offload_selected=False,
        use_fsdp_inference=False,
    )
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"num_gpus": 2, "dp_size": 2}, None),  # a replica of one rank
        ({"num_gpus": 4, "dp_size": 2}, "2 ranks a replica"),
        ({"enable_torch_compile": True}, "without --regional-compile"),
        (COMPILED, None),
        ({**COMPILED, "is_arg_explicitly_set": lambda name: True}, "--offload-during-compile"),
        ({"quantization": "fp8"}, "quantized"),
        ({"transformer_weights_path": "model.gguf"}, "quantized"),
        ({"is_dit_layerwise_offload_selected": True}, "weights move"),
        ({"use_fsdp_inference": True}, "weights move"),
    ],
)
def test_obstacles(changes, named):
    obstacles = list(build.settings_obstacles(server_args(**changes)))
    assert bool(obstacles) is (named is not None)
    assert named is None or named in obstacles[0]


def test_breakable_graphs_hold_no_compiled_code():
    (obstacle,) = build.settings_obstacles(server_args("breakable", **COMPILED))
    assert obstacle.startswith("--enable-torch-compile ")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(build, "current_platform", SimpleNamespace(is_cuda=lambda: False))


@pytest.mark.parametrize("mode", ["full", "breakable"])
@pytest.mark.usefixtures("no_gpu")
def test_a_host_without_a_gpu_refuses_graphs_asked_for_by_name(mode):
    with pytest.raises(GuidanceUnsupported, match=f"^--bucket-graphs {mode} .*without a CUDA GPU"):
        build.check_settings(server_args(mode))


@pytest.mark.parametrize("mode", ["auto", "off"])
@pytest.mark.usefixtures("no_gpu")
def test_and_has_none_otherwise(mode):
    build.check_settings(server_args(mode))
    assert build.build_bucket_graphs(None, server_args(mode)) is None


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"bucket_graphs": "off"},
        {"bucket_graphs": "full", "bucket_graph_rows": [2, 8], "bucket_graph_memory_gb": 4},
    ],
)
def test_settings_survive_being_handed_to_a_role(given):
    config = graph_config(given)
    assert graph_config(graph_arguments(config)) == config


@pytest.mark.parametrize(
    ("given", "warmup", "mode", "wanted"),
    [
        (("512x256",), ["1024x1024"], "server", [(512, 256)]),
        (None, ["1024x1024", "1024x1024"], "server", [(1024, 1024)]),
        (None, None, "off", []),
    ],
)
def test_declared_resolutions(given, warmup, mode, wanted):
    args = SimpleNamespace(
        bucket_graphs=BucketGraphConfig(resolutions=given),
        warmup_resolutions=warmup,
        warmup_mode=mode,
    )
    assert build.declared_resolutions(args) == wanted
