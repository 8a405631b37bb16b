"""Continuous batching against upstream, one request at a time: images a second, and latency.

    python benchmark/bench_continuous.py MODEL --sizes 64 --precision fp32
    python benchmark/bench_continuous.py MODEL --sizes 256 512  # on a GPU

Two real servers hold MODEL side by side: upstream (the plugin off, its dynamic batching on) and
this project. Rounds alternate between them. "saturated" keeps a number of requests in
flight; "Poisson" sends them at random times at 80% of the rate that upstream just reached. Upstream
serves plain CFG at mixed scales; this project serves the same, and then mixed curves. GLM-Image
writes each prior once for all sides (the AR model would hide the DiT). From the trace of the loop:
its own time between two steps, and how soon a prepared request has its first step.
"""

import argparse
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import markdown_table, print_section

SCALES = [1.5, 2.0, 4.0, 7.0]
CURVES = ["constant", "front:4:1@0.4", "interval:5@0.1-0.8", "linear:5:1.5"]
LOAD = 0.8


def main() -> None:
    args = parse_args()
    from harness.batching import trace_events
    from harness.processes import probe_environment
    from harness.server import Server

    priors = tempfile.TemporaryDirectory(prefix="priors-")
    environment = probe_environment(PROBE_KEEP_PRIOR=priors.name)
    flags = list(args.flags)
    if args.precision:
        flags += ["--dit-precision", args.precision, "--vae-precision", args.precision]
    merging = ["--batching-mode", "dynamic", "--batching-max-size", str(args.samples)]
    trace = args.trace or Path(priors.name) / "trace.json"
    batching = ["--guidance-buckets", "8", "--max-running-samples", str(args.samples)]
    batching += ["--schedule-trace", str(trace)]
    starts = {
        "upstream": lambda: Server(args.model, *flags, *merging, upstream=True, env=environment),
        "continuous": lambda: Server(args.model, *flags, *batching, env=environment),
    }
    with ThreadPoolExecutor() as pool:
        servers = dict(zip(starts, pool.map(lambda start: start(), starts.values())))
    try:
        for size in args.sizes:
            seen = len(trace_events(trace))
            measure(servers, size, args)
            report_loop(size, trace_events(trace)[seen:])
    finally:
        for server in servers.values():
            server.close()


def bodies(count: int, size: int, args, *, curves: bool) -> list[dict]:
    made = []
    for index in range(count):
        body = {
            "prompt": "a red cube on a table",
            "seed": 7,  # one prior for all
            "size": f"{size}x{size}",
            "num_inference_steps": args.steps,
            "guidance_scale": SCALES[index % len(SCALES)],
        }
        if curves:
            body["guidance_curve"] = CURVES[index % len(CURVES)]
        made.append(body)
    return made


def saturate(server, requests: list[dict], in_flight: int) -> float:
    """Images a second with `in_flight` requests at any time."""
    start = time.monotonic()
    with ThreadPoolExecutor(in_flight) as pool:
        list(pool.map(lambda body: server.generate(**body), requests))
    return len(requests) / (time.monotonic() - start)


def poisson(server, requests: list[dict], rate: float, seed: int) -> list[float]:
    """Latencies in seconds of requests that arrive at `rate` a second."""
    arrivals, at = [], 0.0
    gaps = random.Random(seed)
    for _ in requests:
        at += gaps.expovariate(rate)
        arrivals.append(at)
    start = time.monotonic()

    def send(body: dict, arrival: float) -> float:
        time.sleep(max(0.0, start + arrival - time.monotonic()))
        server.generate(**body)
        return time.monotonic() - start - arrival

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(send, requests, arrivals))


def measure(servers, size: int, args) -> None:
    plain = bodies(args.requests, size, args, curves=False)
    mixed = bodies(args.requests, size, args, curves=True)
    for server in servers.values():  # compile what these loads need
        server.generate(**plain[0])
    for load in (plain, mixed):
        saturate(servers["continuous"], load, args.in_flight)
    alone = {name: [] for name in servers}
    rates: dict[str, list[float]] = {"upstream": [], "continuous": [], "continuous, curves": []}
    latencies: dict[str, list[float]] = {"upstream": [], "continuous": []}
    for round_index in range(args.rounds):
        for name, server in servers.items():
            for _ in range(3):
                start = time.monotonic()
                server.generate(**plain[0])
                alone[name].append(time.monotonic() - start)
        few = plain[: max(args.in_flight, args.requests // 2)]
        rates["upstream"].append(saturate(servers["upstream"], few, args.in_flight))
        rates["continuous"].append(saturate(servers["continuous"], plain, args.in_flight))
        rates["continuous, curves"].append(saturate(servers["continuous"], mixed, args.in_flight))
        rate = LOAD * rates["upstream"][-1]
        for name, server in servers.items():
            latencies[name] += poisson(server, plain, rate, seed=round_index)
    report(size, args, alone, rates, latencies)


def report(size, args, alone, rates, latencies) -> None:
    base = statistics.median(rates["upstream"])
    rows = []
    for name, got in rates.items():
        rate = statistics.median(got)
        waits = sorted(latencies.get(name, []))
        single = alone.get(name)
        rows.append(
            [
                name,
                f"{rate:.2f}",
                f"{rate / base:.2f}",
                f"{statistics.median(single):.3f}" if single else "",
                f"{statistics.median(waits):.2f}" if waits else "",
                f"{waits[int(0.95 * (len(waits) - 1))]:.2f}" if waits else "",
            ]
        )
    header = ["server", "images/s saturated", "of upstream", "s alone", "s p50", "s p95"]
    title = (
        f"{size}x{size}, {args.steps} steps, {args.in_flight} in flight, up to {args.samples} "
        f"samples, {args.rounds} rounds; p50 and p95 at {LOAD:.0%} of upstream's rate"
    )
    print_section(title, markdown_table(header, rows))


def report_loop(size: int, events: list[dict]) -> None:
    """What the loop itself took, from its trace."""
    busy = sorted(
        (event for event in events if event["name"] in ("step", "prepare")),
        key=lambda event: event["ts"],
    )
    pairs = list(zip(busy, busy[1:]))
    between = [
        later["ts"] - earlier["ts"] - earlier["dur"]
        for earlier, later in pairs
        if earlier["name"] == later["name"] == "step"
    ]
    between = [gap for gap in between if gap < 50_000]  # longer: nothing was running
    step = statistics.median(event["dur"] for event in busy if event["name"] == "step")
    waits = []
    for prepared in (event for event in busy if event["name"] == "prepare"):
        ready = prepared["ts"] + prepared["dur"]
        first = [
            event["ts"]
            for event in events
            if event["tid"] == prepared["tid"] and event["name"].startswith("bucket")
        ]
        waits += [min(first) - ready] if first else []
    gap = statistics.median(between)
    rows = [
        ["step, median ms", f"{step / 1000:.2f}"],
        ["loop between two steps, median ms", f"{gap / 1000:.3f} ({gap / step:.2%} of a step)"],
        ["prepared to first step, median ms", f"{statistics.median(waits) / 1000:.2f}"],
        ["prepared to first step, longest", f"{max(waits) / step:.2f} steps"],
    ]
    print_section(f"{size}x{size}, the loop", markdown_table(["", ""], rows))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--trace", type=Path, help="keep the loop's trace in this file")
    parser.add_argument("--precision", help="of DiT and VAE (default: the model's own)")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for sglang serve")
    return parser.parse_args()


if __name__ == "__main__":
    main()
