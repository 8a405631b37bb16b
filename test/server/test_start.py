"""Starting: flags, config file, `sglang generate`, and everything that is refused."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from harness.batching import together
from harness.engine import FP32, Engine, Refused
from harness.processes import (
    HARNESS,
    free_ports,
    probe_environment,
    test_environment,
    wait_until,
)
from harness.recording import Recording
from harness.server import (
    FP32_FLAGS,
    START_SECONDS,
    HTTPFailure,
    Server,
    pixels,
    pngs,
    serve_command,
)

SGLANG = str(Path(sys.executable).parent / "sglang")


def refused_start(model, *flags: str, env=None) -> str:
    """The output of a server that must not start."""
    result = subprocess.run(
        serve_command(model, *flags),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=test_environment(env or {}),
    )
    assert result.returncode != 0
    return result.stdout + result.stderr


def test_config_file_and_default_curve(glm, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"guidance_buckets": 4, "guidance_curve": "front:3:1@0.5", "guidance_rows": "split"}
        )
    )
    with Server(glm, "--config", str(config), *FP32_FLAGS) as server:
        guidance = server.generate()["guidance"]
        assert guidance["curve"] == "front:3:1@0.5"
        assert guidance["forwards"] == {"cond": 6, "uncond": 3}
        assert guidance["buckets"][-1]["bucket"] == 3
        named = server.generate(guidance_scale=2.0)["guidance"]
        assert named["curve"] == "constant"
        assert {run["scale"] for run in named["buckets"]} == {2.0}


@pytest.mark.parametrize("mode", ["request", "server"])
def test_warm_up(glm, mode, tmp_path):
    """Warm-up requests have fewer steps than the list that is this server's default."""
    flags = ("--warmup-mode", mode, "--warmup-resolutions", "64x64", "--guidance-rows", "packed")
    curve = ("--guidance-buckets", "4", "--guidance-curve", "[3, 3, 1, 1, 1, 1]")
    environment = probe_environment(PROBE_RECORD=str(tmp_path))
    with Server(glm, *flags, *curve, *FP32_FLAGS, env=environment) as server:
        assert server.generate()["guidance"]["forwards"] == {"cond": 6, "uncond": 2}
        with pytest.raises(HTTPFailure, match="wanted 8 .* the server's --guidance-curve"):
            server.generate(num_inference_steps=8)
        log = server.log.read_text()
    assert "Warmup" in log or "warmup" in log
    first, *_, last = Recording(tmp_path).take("noise")
    assert (len(first), len(last)) == (2, 1)  # the warm-up had both branches
    assert len(re.findall("Guidance of ", log)) == 1  # the warm-up is neither counted nor logged


def test_dynamic_batching_merges_equal_guidance_only(checkpoints, tmp_path):
    flags = ("--batching-mode", "dynamic", "--batching-max-size", "4", "--batching-delay-ms", "700")
    precisions = (*FP32_FLAGS, "--text-encoder-precisions", "fp32")
    guidance = ("--guidance-buckets", "8", "--guidance-trace", str(tmp_path))
    with Server(checkpoints["qwen-image"], *guidance, *flags, *precisions) as server:

        def generate(curve, seed):
            return server.generate(guidance_curve=curve, seed=seed, negative_prompt="blurry")

        requests = [("front:3:1@0.5", 1), ("constant:1", 2), ("front:3:1@0.5", 3)]
        alone = [generate(*request) for request in requests]

        def merged() -> bool:
            """Whether the two came within the delay, which depends on the machine's other work."""
            with ThreadPoolExecutor() as pool:
                together = list(pool.map(lambda request: generate(*request), requests))
            for single, batched in zip(alone, together):
                assert batched["guidance"] == single["guidance"]
                difference = pixels(pngs(batched)[0]) - pixels(pngs(single)[0])
                assert np.abs(difference).max() <= 1
            return "Processed dynamic batch of 2/4" in server.log.read_text()

        wait_until(merged)
        traced = dict(guidance_trace=True, negative_prompt="blurry")
        answers = together(server, [dict(prompt=f"cat {i}", **traced) for i in range(3)])
        traces = [answer["guidance"]["trace"]["data"] for answer in answers]
        assert len({Path(trace).read_text() for trace in traces}) == 3  # each request has its own


def generate_command(model, tmp_path, *flags: str) -> list[str]:
    scheduler_port, master_port = free_ports(2)
    return [
        *(SGLANG, "generate", "--model-path", str(model), "--prompt", "a cat"),
        *("--width", "64", "--height", "64", "--num-inference-steps", "6"),
        *("--scheduler-port", str(scheduler_port), "--master-port", str(master_port)),
        *("--output-path", str(tmp_path), "--perf-dump-path", str(tmp_path / "perf.json")),
        *(*FP32_FLAGS, *flags),
    ]


def run_generate(model, tmp_path, *flags: str) -> str:
    command = generate_command(model, tmp_path, *flags)
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=START_SECONDS, env=test_environment()
    )
    return result.stdout + result.stderr


def test_generate_command(glm, tmp_path):
    output = run_generate(
        glm,
        tmp_path,
        *("--guidance-buckets", "3", "--guidance-curve", "front:3:1@0.5"),
        *("--guidance-scale", "2"),
    )
    assert "curve=front:3:1@0.5 buckets=[0:0-1@3 1:2-2@3 1:3-3@1 2:4-5@1]" in output
    assert len(list(tmp_path.glob("*.jpg")) + list(tmp_path.glob("*.png"))) == 1


def test_generate_command_traces_every_image(glm, tmp_path):
    """Its prompts share one request id."""
    run_generate(
        glm,
        tmp_path,
        *("--guidance-buckets", "3", "--guidance-trace", str(tmp_path / "traces")),
        *("--prompt", "a cat", "a dog", "--num-outputs-per-prompt", "2"),
    )
    traces = [path.read_text() for path in (tmp_path / "traces").glob("*.json")]
    assert len(traces) == len(set(traces)) == 4
    assert len(list((tmp_path / "traces").glob("*.png"))) == 4


def test_generate_command_with_a_config_file(glm, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"guidance_buckets": 6, "guidance_curve": [3, 3, 1, 1, 1, 2]}))
    output = run_generate(glm, tmp_path, "--config", str(config))
    assert "forwards=6 cond + 3 uncond an image" in output


def test_python(glm):
    """DiffGenerator: server keywords, request keywords, and a refusal that names the field."""
    with Engine(glm, guidance_buckets=4, guidance_curve="front:3:1@0.5", **FP32) as engine:
        assert engine.generate().guidance["forwards"] == {"cond": 6, "uncond": 3}
        got = engine.generate(guidance_curve="interval:2@0.5-1", guidance_buckets=2)
        assert [run["scale"] for run in got.guidance["buckets"]] == [1.0, 2.0]
        with pytest.raises(Refused, match="guidance_curve: got 'liner'"):
            engine.generate(guidance_curve="liner")
        with pytest.raises(Refused, match="cfg_gate_step"):
            engine.generate(cfg_gate_step=0.5)
        with pytest.raises(Refused, match="num_inference_steps: got 1000000"):
            engine.generate(num_inference_steps=1_000_000)


GUIDED = ["--guidance-buckets", "4"]
REFUSED = [
    (["--guidance-buckets", "65"], {}, "--guidance-buckets: wanted a whole number from 0 to 64"),
    (["--guidance-buckets", "x"], {}, "--guidance-buckets: wanted a whole number from 0 to 64"),
    ([*GUIDED, "--guidance-curve", "liner"], {}, "--guidance-curve: .*'liner'"),
    ([*GUIDED, "--guidance-rows", "x"], {}, "--guidance-rows: invalid choice"),
    (["--guidance-curve", "constant:2"], {}, "wanted 1 to 64 where --guidance-curve is given"),
    (
        ["--guidance-buckets", "0", "--guidance-rows", "split"],
        {},
        "where --guidance-rows is given",
    ),
    (["--max-running-samples", "4"], {}, "wanted 1 to 64 where --max-running-samples is given"),
    ([*GUIDED, "--max-running-samples", "-1"], {}, "--max-running-samples: got -1"),
    ([*GUIDED, "--max-rows", "1"], {}, "--max-rows: got 1"),
    (
        [*GUIDED, "--max-running-samples", "0", "--max-rows", "8"],
        {},
        "--max-running-samples: got 0, wanted 1 or more where --max-rows is given",
    ),
    (
        [*GUIDED, "--max-running-samples", "4", "--batching-max-size", "2"],
        {},
        "--max-running-samples does not combine with --batching-max-size above 1",
    ),
    (
        [*GUIDED, "--max-running-samples", "4", "--batching-delay-ms", "5"],
        {},
        "a batching delay",
    ),
    (
        [*GUIDED, "--srt-encoder-url", "http://127.0.0.1:1", "--batching-max-size", "2"],
        {},
        "--batching-max-size: got 2, wanted 1 beside --srt-encoder-url",
    ),
    ([*GUIDED, "--bucket-graphs", "some"], {}, "--bucket-graphs: invalid choice"),
    ([*GUIDED, "--bucket-graph-rows", "2", "0"], {}, "--bucket-graph-rows: got \\[2, 0\\]"),
    ([*GUIDED, "--bucket-graph-resolutions", "512"], {}, "wanted WIDTHxHEIGHT in pixels"),
    (["--bucket-graphs", "auto"], {}, "wanted 1 to 64 where --bucket-graphs is given"),
    (
        [*GUIDED, "--bucket-graphs", "off", "--bucket-graph-rows", "2"],
        {},
        "--bucket-graphs: got 'off', wanted auto, full or breakable where --bucket-graph-rows",
    ),
    ([*GUIDED, "--disagg-role", "denoiser"], {}, "--disagg-role denoiser"),
    ([*GUIDED, "--enable-breakable-cuda-graph"], {}, "--enable-breakable-cuda-graph"),
    (GUIDED, {"SGLANG_CACHE_DIT_ENABLED": "1"}, "SGLANG_CACHE_DIT_ENABLED"),
    (GUIDED, {"SGLANG_DIFFUSION_CFG_GATE_STEP": "0.5"}, "SGLANG_DIFFUSION_CFG_GATE_STEP"),
]


@pytest.fixture(scope="module")
def refusals(glm):
    """The refusal of every case, all parsed in one process."""
    cases = [
        (["--model-path", str(glm), *flags], env) for flags, env, _ in [*REFUSED, (GUIDED, {}, "")]
    ]
    result = subprocess.run(
        [sys.executable, str(HARNESS / "parse_flags.py")],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=test_environment(),
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=lambda case: " ".join(REFUSED[case][0]))
def test_refused_flags(refusals, case):
    assert refusals[-1] is None
    assert re.search(REFUSED[case][-1], refusals[case])


def test_a_refused_server_does_not_start(glm):
    flags = ("--guidance-buckets", "4", "--batching-delay-ms", "5", "--max-running-samples", "4")
    output = refused_start(glm, *flags)
    assert "--max-running-samples does not combine with" in output


def test_a_hook_that_is_not_applied_is_named(glm):
    environment = probe_environment(PROBE_BREAK_HOOK="RequestMetrics.to_dict")
    output = refused_start(glm, "--guidance-buckets", "4", env=environment)
    assert "not applied: " in output
    assert "runtime.utils.perf_logger.RequestMetrics.to_dict" in output
