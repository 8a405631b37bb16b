"""Whole engines with bucket graphs give the pictures of engines without."""

import re

import numpy as np
import pytest

from harness.engine import COMPILED, QUICK_COMPILE, Engine
from harness.graphs import graph_metric
from harness.server import Server

pytestmark = pytest.mark.gpu

CURVES = ["constant:4", "front:3:1@0.5", [2, 0, 1, 4, 0.5, 1]]
FAMILIES = ["glm-image", "sd3-medium"]


@pytest.mark.parametrize("compiled", [{}, COMPILED], ids=["plain", "compiled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_pictures(checkpoints, family, compiled):
    options = {
        "guidance_buckets": 8,
        "attention_backend": "torch_sdpa",
        "dit_precision": "fp32",
        "vae_precision": "fp32",
    }
    if family == "sd3-medium":
        options["text_encoder_precisions"] = ("fp32",) * 3
    model = checkpoints[family]
    graphs = {"bucket_graphs": "full", "bucket_graph_resolutions": ["64x64"]}
    if compiled:
        graphs |= {"bucket_graph_rows": [1, 2, 4], "bucket_graph_text_lengths": [64]}
    with (
        Engine(model, env=QUICK_COMPILE, **options, **graphs, **compiled) as engine,
        Engine(model, bucket_graphs="off", **options) as eager,
    ):
        for curve in CURVES:
            request = dict(guidance_curve=curve, seed=3)
            got, wanted = engine.generate(**request), eager.generate(**request)
            assert got.guidance == wanted.guidance
            assert np.abs(got.latents - wanted.latents).max() <= 2e-3 * np.abs(wanted.latents).max()
        log = engine.log.read_text()
    refused = re.findall("No graph for .*", log)
    assert not refused, refused
    captured = re.search(r"(\d+) bucket graphs, ", log)
    assert captured and int(captured[1]) >= (3 if compiled else 5)
    assert "not replayed" not in log


@pytest.mark.parametrize("family", FAMILIES)
def test_own_precisions(checkpoints, family):
    """A server as its family sets it: every step replays."""
    with Server(
        checkpoints[family],
        *("--guidance-buckets", "8", "--attention-backend", "torch_sdpa", "--enable-metrics"),
        *("--bucket-graphs", "full", "--bucket-graph-resolutions", "64x64"),
    ) as server:
        for curve in ("constant:4", "front:3:1@0.5"):
            assert server.generate(guidance_curve=curve)["data"]
        assert sum(graph_metric(server, "replays").values()) == 12
        assert not graph_metric(server, "misses")
