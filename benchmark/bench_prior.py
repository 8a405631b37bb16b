"""GLM-Image's AR as a service against upstream's own --srt-encoder-url, with a real AR server.

    python benchmark/bench_prior.py MODEL --precision fp32

One AR server serves all sides. Rounds alternate between them; every request has a seed that was
never asked for before, so no cache helps. "AR alone" sends the requests to the AR server and nobody
denoises; "DiT alone" asks this project's server for the same requests again, whose tokens it has.
Upstream merges waiting requests of one size into one AR call (--batching-max-size 8).

With --pin the AR server has the first core, and the diffusion servers and the client the second, as
if they were two devices; not for the comparison of denoisers, which share both.
"""

import argparse
import http.client
import itertools
import json
import os
import statistics
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from common import markdown_table, print_section

PARTS = ("client", "overlap", "trickle", "at-once", "one-process", "denoisers")
_seeds = itertools.count(1000)


def main() -> None:
    args = parse_args()
    from harness.server import Server, ar_command
    from harness.topology import Topology

    with on_core(0 if args.pin else None):
        ar = Server(args.model, command=ar_command(args.model) + args.ar_flags)
    try:
        with on_core(1 if args.pin else None):
            on_one_server(ar, args)
        if "denoisers" in args.only:
            with (
                Topology(args.model, ar.url, 1, "--guidance-buckets", "8") as one,
                Topology(args.model, ar.url, 2, "--guidance-buckets", "8") as two,
            ):
                denoisers({"one denoiser": one.head, "two denoisers": two.head}, args)
    finally:
        ar.close()


@contextmanager
def on_core(core: int | None):
    """This process, and those that it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def on_one_server(ar, args) -> None:
    """What does not need a head."""
    from harness.server import Server

    flags = ["--dit-precision", args.precision, "--vae-precision", args.precision]
    ours = ["--guidance-buckets", "8", *flags]
    url = ("--srt-encoder-url", ar.url)
    merged = ("--batching-mode", "dynamic", "--batching-max-size", "8")
    servers = {
        "upstream": Server(args.model, *url, *merged, *flags, upstream=True, waits=False),
        "this project": Server(args.model, *url, *ours, waits=False),
    }
    if "one-process" in args.only:
        servers["in one process"] = Server(args.model, *ours, waits=False)
    try:
        for server in servers.values():
            server.wait()
            for size in args.sizes:
                server.generate(**body(size, args))
        parts = {
            "client": lambda: client_time(ar, args),
            "overlap": lambda: overlap(ar, servers, args),
            "trickle": lambda: trickle(ar, servers, args),
            "at-once": lambda: at_once(servers, args),
            "one-process": lambda: one_process(servers, args),
        }
        for name, measure in parts.items():
            if name in args.only:
                measure()
    finally:
        for server in servers.values():
            server.close()


def body(size: int, args, seed: int | None = None) -> dict:
    return {
        "prompt": "a red cube on a table",
        "seed": next(_seeds) if seed is None else seed,
        "size": f"{size}x{size}",
        "num_inference_steps": args.steps,
    }


def mixed(count: int, args) -> list[dict]:
    return [body(args.sizes[index % len(args.sizes)], args) for index in range(count)]


def send(ask: Callable[[dict], object], requests: list[dict], gap_s: float) -> list[float]:
    """Latencies in seconds of requests that arrive `gap_s` apart; the last is the wall time."""
    start = time.monotonic()

    def one(index: int) -> tuple[float, float]:
        arrival = index * gap_s
        time.sleep(max(0.0, start + arrival - time.monotonic()))
        ask(requests[index])
        end = time.monotonic() - start
        return end - arrival, end

    with ThreadPoolExecutor(len(requests)) as pool:
        times = list(pool.map(one, range(len(requests))))
    return [latency for latency, _ in times] + [max(end for _, end in times)]


class ARClientAlone:
    """This project's client with the requests of an image server, and nobody who denoises."""

    def __init__(self, url: str, model: Path):
        from transformers import AutoProcessor

        from sglang.multimodal_gen.configs.glm_image_prior import PriorConfig
        from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages import (
            glm_image_prior,
        )

        self.package = glm_image_prior
        self.url = url
        self.processor = AutoProcessor.from_pretrained(model / "processor")
        transformer = json.loads((model / "transformer" / "config.json").read_text())
        self.codebook = transformer["prior_vq_quantizer_codebook_size"]
        self.service = glm_image_prior.build_service(
            PriorConfig(url=url, cache_size=0),
            processor=self.processor,
            codebook=self.codebook,
            sampling=glm_image_prior.sampling_of(str(model)),
            server_metrics=None,
        )

    def request(self, asked: dict):
        width, height = map(int, asked["size"].split("x"))
        return self.package.PriorRequest(
            prompt=asked["prompt"],
            height=height,
            width=width,
            seeds=(asked["seed"],),
            sources=(),
        )

    def ask(self, asked: dict) -> None:
        self.service.ask(self.request(asked)).result()

    def http_body(self, asked: dict) -> bytes:
        prepared = self.package.request.prepare(self.request(asked), self.processor, self.codebook)
        return prepared.body(asked["seed"])


def client_time(ar, args) -> None:
    """From a request to its tokens, against the same bytes over one open connection.

    Beside the real AR server, whose own time varies by more than what is measured, a server that
    answers at once (the tests' faulty one, without a fault).
    """
    from harness.faulty_ar import FaultyAR

    rows = timed(ARClientAlone(ar.url, args.model), args, args.client_requests, "AR server")
    with FaultyAR() as instant:
        rows += timed(ARClientAlone(instant.url, args.model), args, 200, "a server at once")
    print_section(
        f"What the client adds, {args.sizes[0]}x{args.sizes[0]}, one request at a time",
        markdown_table(["server", "requests", "same bytes ms", "client ms", "difference ms"], rows),
    )


def timed(client: ARClientAlone, args, count: int, name: str) -> list[list]:
    address = urllib.parse.urlsplit(client.url).netloc
    connection = http.client.HTTPConnection(address)
    plain, ours = [], []
    for index in range(count):
        asked = body(args.sizes[0], args)
        posted = client.http_body(asked)

        def ask_plainly() -> None:
            connection.connect()
            start = time.monotonic()
            connection.request("POST", "/generate", posted, {"Content-Type": "application/json"})
            json.loads(connection.getresponse().read())
            plain.append(time.monotonic() - start)
            connection.close()

        def ask_ours() -> None:
            start = time.monotonic()
            client.ask(asked)
            ours.append(time.monotonic() - start)

        both = (ask_plainly, ask_ours)
        for ask in both if index % 2 else both[::-1]:  # the second may find its prompt cached
            ask()
    client.service.close()
    difference = statistics.median(mine - theirs for mine, theirs in zip(ours, plain))
    return [[name, count, ms(plain), ms(ours), f"{1000 * difference:+.2f}"]]


def ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f}"


def overlap(ar, servers: dict, args) -> None:
    """Eight requests of three sizes, staggered over one AR time."""
    client = ARClientAlone(ar.url, args.model)
    ar_time = one_ar_time(client, args)
    gap = ar_time / 7
    walls: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        requests = mixed(8, args)
        sides = {
            "AR alone": client.ask,
            "this project": lambda asked: servers["this project"].generate(**asked),
            "DiT alone": lambda asked: servers["this project"].generate(**asked),
            "upstream": lambda asked: servers["upstream"].generate(**asked),
        }
        for name, ask in sides.items():
            walls.setdefault(name, []).append(send(ask, requests, gap)[-1])
    client.service.close()
    bar = [max(pair) for pair in zip(walls["AR alone"], walls["DiT alone"])]
    rows = [
        [
            name,
            f"{statistics.median(times):.2f}",
            f"{min(times):.2f}-{max(times):.2f}",
            f"{statistics.median(mine / base for mine, base in zip(times, bar)):.2f}",
        ]
        for name, times in walls.items()
    ]
    print_section(
        f"8 requests of {len(args.sizes)} sizes staggered over one AR time ({ar_time:.2f} s), "
        f"{args.rounds} rounds",
        markdown_table(["", "wall s", "min-max", "of the larger one alone"], rows),
    )


def one_ar_time(client: ARClientAlone, args) -> float:
    """Of a request that the AR server has to itself."""
    asked = [body(size, args) for size in args.sizes for _ in range(2)]
    return statistics.median(send(client.ask, [one], 0)[-1] for one in asked)


def trickle(ar, servers: dict, args) -> None:
    """One request a quarter of an AR time."""
    client = ARClientAlone(ar.url, args.model)
    gap = one_ar_time(client, args) / 4
    client.service.close()
    means: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name in ("upstream", "this project"):
            times = send(
                lambda asked: servers[name].generate(**asked), mixed(8, args), gap
            )
            means.setdefault(name, []).append(statistics.mean(times[:-1]))
    base = statistics.median(means["upstream"])
    rows = [
        [
            name,
            f"{statistics.median(times):.2f}",
            f"{min(times):.2f}-{max(times):.2f}",
            f"{statistics.median(times) / base:.2f}",
        ]
        for name, times in means.items()
    ]
    print_section(
        f"8 requests of {len(args.sizes)} sizes, one every {gap:.2f} s, "
        f"{args.rounds} rounds",
        markdown_table(["", "mean latency s", "min-max", "of upstream"], rows),
    )


def at_once(servers: dict, args) -> None:
    rows = []
    for count in (1, 4, 8, 16):
        firsts: dict[str, list[float]] = {}
        lasts: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for name in ("upstream", "this project"):
                times = send(lambda asked: servers[name].generate(**asked), mixed(count, args), 0)
                firsts.setdefault(name, []).append(min(times))
                lasts.setdefault(name, []).append(times[-1])
        rows += [
            [
                count,
                name,
                f"{statistics.median(firsts[name]):.2f}",
                f"{statistics.median(lasts[name]):.2f}",
                f"{min(lasts[name]):.2f}-{max(lasts[name]):.2f}",
            ]
            for name in firsts
        ]
    print_section(
        f"Requests at once, {len(args.sizes)} sizes, {args.rounds} rounds",
        markdown_table(["requests", "", "first picture s", "last picture s", "min-max"], rows),
    )


def one_process(servers: dict, args) -> None:
    times: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name in ("in one process", "this project"):
            ask = servers[name].generate
            for count in (1, 4):
                wall = send(lambda asked: ask(**asked), mixed(count, args), 0)[-1]
                times.setdefault(f"{name}, {count} at once", []).append(wall)
    rows = [[name, f"{statistics.median(walls):.2f}"] for name, walls in times.items()]
    print_section(
        f"The AR model in the same process, or on a server, {args.rounds} rounds",
        markdown_table(["", "wall s"], rows),
    )


def denoisers(heads: dict, args) -> None:
    walls: dict[str, list[float]] = {}
    for head in heads.values():
        for size in args.sizes * 2:
            head.generate(**body(size, args))
    for _ in range(args.rounds):
        for name, head in heads.items():
            asked = [{**one, "num_inference_steps": args.many_steps} for one in mixed(8, args)]
            walls.setdefault(name, []).append(
                send(lambda asked: head.generate(**asked), asked, 0)[-1]
            )
    rows = [[name, f"{statistics.median(times):.2f}"] for name, times in walls.items()]
    print_section(
        f"8 requests at once through a head, {args.many_steps} steps, {args.rounds} rounds",
        markdown_table(["", "wall s"], rows),
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 96, 128])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--many-steps", type=int, default=150, help="of the denoisers' comparison")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client-requests", type=int, default=20, help="to the real AR server")
    parser.add_argument("--pin", action="store_true", help="one core for each side")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--ar-flags", nargs=argparse.REMAINDER, default=[])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
