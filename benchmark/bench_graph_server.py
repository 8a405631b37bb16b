"""A server with bucket CUDA graphs: its start, its first requests, its memory after many.

    python benchmark/bench_graph_server.py MODEL --sizes 256 512 \\
        --flags --attention-backend torch_sdpa

The server captures its declared buckets and warms up before `/health` answers. Then: ten requests
one after another, the first against the tenth; and many over all sizes, with and without quoted
text, of mixed curves, some at a time, with the device's memory before and after them. GLM-Image's
prior tokens are drawn at random and the AR model does not run.
"""

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench_bucket_graphs import PLAIN, QUOTED, SEED, write_random_priors
from common import markdown_table, print_section

CURVES = ["constant:4", "front:4:1@0.4", "interval:5@0.1-0.8", "constant:1"]
IN_FLIGHT = 8


def main() -> None:
    args = parse_args()
    from harness.graphs import graph_metric
    from harness.processes import probe_environment
    from harness.server import Server

    priors = tempfile.TemporaryDirectory(prefix="priors-")
    write_random_priors(Path(priors.name), args.sizes, images=1)
    sizes = [f"{size}x{size}" for size in args.sizes]
    start = time.monotonic()
    with Server(
        args.model,
        *("--guidance-buckets", "8", "--bucket-graphs", args.mode, "--enable-metrics"),
        *("--warmup-mode", "server", "--warmup-resolutions", *sizes),
        *("--bucket-graph-text-lengths", "64", *args.flags),
        env=probe_environment(PROBE_KEEP_PRIOR=priors.name),
    ) as server:
        ready = time.monotonic() - start
        bodies = make_bodies(sizes, args)
        captured = len(graph_metric(server, "bytes"))
        rows = [["ready after, s", f"{ready:.1f}"], ["graphs then", captured]]
        rows += firsts(server, bodies[0])
        rows += many(server, bodies, args.requests)
        replays = sum(graph_metric(server, "replays").values())
        misses = sum(graph_metric(server, "misses").values())
        rows.append(["steps replayed", f"{replays:.0f} of {replays + misses:.0f}"])
        print_section(f"{' and '.join(sizes)}", markdown_table(["", ""], rows))


def make_bodies(sizes: list[str], args) -> list[dict]:
    return [
        {
            "prompt": prompt,
            "seed": SEED,
            "size": size,
            "num_inference_steps": args.steps,
            "guidance_curve": curve,
        }
        for curve in CURVES
        for prompt in (PLAIN, QUOTED)
        for size in sizes
    ]


def firsts(server, body: dict) -> list[list]:
    times, inner = [], []
    for _ in range(10):
        start = time.monotonic()
        answer = server.generate(**body)
        times.append(1000 * (time.monotonic() - start))
        inner.append(1000 * answer["inference_time_s"])
    return [
        [f"first request, ms ({body['size']})", f"{times[0]:.0f}"],
        ["of it in the engine", f"{inner[0]:.0f}"],
        ["second to tenth, ms, median (min-max)", _spread(times[1:])],
        ["of it in the engine", _spread(inner[1:])],
    ]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def many(server, bodies: list[dict], count: int) -> list[list]:
    import torch

    def used_mb() -> float:
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20

    def send(index: int) -> None:
        server.generate(**bodies[index % len(bodies)])

    seen = [used_mb()]
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for done in range(0, count, count // 5):
            list(pool.map(send, range(done, done + count // 5)))
            seen.append(used_mb())
    return [
        [f"device memory, MB, before and after each {count // 5} requests"]
        + [", ".join(f"{value:.0f}" for value in seen)]
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--mode", choices=["auto", "full", "breakable", "off"], default="full")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
