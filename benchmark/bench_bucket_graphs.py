"""What bucket CUDA graphs save: ms a denoising step against upstream, and each bucket by itself.

    python benchmark/bench_bucket_graphs.py steps MODEL --sizes 256 512 1024   # on a GPU
    python benchmark/bench_bucket_graphs.py buckets MODEL --sizes 256 512 1024 --points points.json
    python benchmark/bench_bucket_graphs.py plot points.json -o bucket_graphs.svg

`steps` serves MODEL from several engines side by side: upstream eagerly, upstream with its
breakable graphs, this project without and with bucket graphs; with --engines also both of these
with the DiT's blocks compiled. Each round asks every configuration for a request of one image or of
four (where one step takes four), in an order that rotates.
Upstream runs the images of a GLM-Image request one after another, so its step of four images is
four times its own per-step metric, with the device drained before and after
(SGLANG_DIFFUSION_SYNC_STAGE_PROFILING=1). This project steps them together; its steps are timed by
the loop, which launches one step ahead of the device, so the first steps of a picture are left out.
GLM-Image writes each prior once for all sides; with --random-priors its prior tokens are drawn at
random and the AR model does not run.

`buckets` loads MODEL in this process and measures every bucket of each size: an eager forward of
those rows, a replay, the time that the GPU is busy in it (the sum of its kernels), the time that
the host takes to start a step, memory and capture. Eager and replayed forwards alternate.
"""

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from common import markdown_table, print_section

QUOTED = 'a shop sign that says "open until late"'
PLAIN = "a red cube on a table"
SEED = 7
_AHEAD = 3  # steps that the loop begins before it waits for the first


# --- steps --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    name: str
    engine: str
    images: int
    prompt: str


def steps(args: argparse.Namespace) -> None:
    from harness.engine import COMPILED, Engine
    from harness.processes import probe_environment

    priors = tempfile.TemporaryDirectory(prefix="priors-")
    environment = probe_environment(
        PROBE_KEEP_PRIOR=priors.name,
        SGLANG_DIFFUSION_STAGE_LOGGING="1",
        SGLANG_DIFFUSION_SYNC_STAGE_PROFILING="1",
    )
    if args.random_priors:
        write_random_priors(Path(priors.name), args.sizes, max(args.images))
    options = {"env": environment, **args.engine}
    sizes = [f"{size}x{size}" for size in args.sizes]
    buckets = {"guidance_buckets": 8}
    graphs = {"bucket_graphs": "full", "bucket_graph_resolutions": sizes}
    graphs["bucket_graph_text_lengths"] = args.text_lengths
    graphs["bucket_graph_rows"] = [2 * images for images in args.images]
    starts = {
        "upstream": lambda: Engine(args.model, upstream=True, **options),
        "upstream, breakable": lambda: Engine(
            args.model,
            upstream=True,
            enable_breakable_cuda_graph=True,
            warmup_resolutions=sizes,
            **options,
        ),
        "eager": lambda: Engine(args.model, bucket_graphs="off", **buckets, **options),
        "graphs": lambda: Engine(args.model, **graphs, **buckets, **options),
        "compiled": lambda: Engine(
            args.model, bucket_graphs="off", **COMPILED, **buckets, **options
        ),
        "graphs, compiled": lambda: Engine(
            args.model, **COMPILED, **graphs, **buckets, **options
        ),
    }
    starts = {name: start for name, start in starts.items() if name in args.engines}
    engines = {}
    with ThreadPoolExecutor() as pool:
        for name, future in {n: pool.submit(s) for n, s in starts.items()}.items():
            try:
                engines[name] = future.result()
            except Exception as error:
                print(f"{name} did not start:\n{error}", flush=True)
    try:
        for size in args.sizes:
            measure(engines, size, args)
    finally:
        for name, engine in engines.items():
            if name.startswith("graphs"):
                print(f"{name}:\n{_graph_table(engine.log)}", flush=True)
            engine.close()


def write_random_priors(directory: Path, sizes: list[int], images: int) -> None:
    """Where the probe plugin looks for what GLM-Image's AR model wrote before."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        for prompt in (PLAIN, QUOTED):
            for image in range(images):
                tokens = torch.randint(128, (1, size * size // 256), generator=generator)
                key = repr((prompt, size, size, SEED + image))
                name = hashlib.sha256(key.encode()).hexdigest()[:16]
                torch.save((tokens, None, None), directory / f"{name}.pt")


def _graph_table(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if "row" in line and "latent" in line)


def measure(engines, size: int, args) -> None:
    from sglang.multimodal_gen.configs.bucket_graphs import DEFAULT_MAX_IMAGE_TOKENS

    texts = {"": PLAIN} | ({", quoted": QUOTED} if args.quoted else {})
    # more image tokens than these are not stepped together
    together = [n for n in args.images if 2 * n * (size // 16) ** 2 <= DEFAULT_MAX_IMAGE_TOKENS]
    configurations = [
        Configuration(
            f"{engine}, {images} image{'s' * (images > 1)}{suffix}", engine, images, prompt
        )
        for suffix, prompt in texts.items()
        for images in together
        for engine in engines
    ]

    def picture(configuration: Configuration) -> list[float]:
        result = engines[configuration.engine].generate(
            prompt=configuration.prompt,
            width=size,
            height=size,
            num_inference_steps=args.steps,
            guidance_scale=4.0,
            num_outputs_per_prompt=configuration.images,
            seed=SEED,
            return_trajectory_latents=False,
        )
        steps = result.metrics["steps"]
        if configuration.engine.startswith("upstream"):
            return [step * configuration.images for step in steps]  # one image after another
        return steps[_AHEAD:]

    first_picture: dict[Configuration, float] = {}

    def warm_up(engine: str) -> list[Configuration]:
        failed = []
        for configuration in configurations:
            if configuration.engine == engine:
                try:
                    first_picture[configuration] = statistics.median(picture(configuration))
                except Exception as error:
                    print(f"{configuration.name}: {str(error)[-600:]}", flush=True)
                    failed.append(configuration)
        return failed

    first, *others = list(engines)
    failed = warm_up(first)  # alone: it writes the priors
    with ThreadPoolExecutor() as pool:
        for more in pool.map(warm_up, others):
            failed += more
    times: dict[Configuration, list[list[float]]] = {
        c: [] for c in configurations if c not in failed
    }
    for round_index in range(args.rounds):
        turn = round_index % len(times)
        order = list(times)
        for configuration in order[turn:] + order[:turn]:
            times[configuration].append(picture(configuration))
    title = f"{size}x{size}, {args.steps} steps, {args.rounds} rounds"
    print_section(title, steps_table(times, first_picture))


def steps_table(times, first_picture) -> str:
    rows = []
    for configuration in times:
        base = next(
            (
                other
                for other in times
                if (other.engine, other.images, other.prompt)
                == ("upstream", configuration.images, configuration.prompt)
            ),
            None,
        )
        spread = [step for picture in times[configuration] for step in picture]
        own = statistics.median(spread)
        gain = "" if base is None else f"{_median(times[base]) / own:.2f}"
        rows.append(
            [
                configuration.name,
                f"{own:.2f}",
                f"{min(spread):.1f}-{max(spread):.1f}",
                gain,
                f"{first_picture[configuration]:.1f}",
            ]
        )
    header = [
        *("configuration", "ms a guided step of all images", "min-max", "x upstream"),
        "in the first picture",
    ]
    return markdown_table(header, rows)


def _median(pictures: list[list[float]]) -> float:
    return statistics.median(step for picture in pictures for step in picture)


# --- buckets ------------------------------------------------------------------------------------


def buckets(args: argparse.Namespace) -> None:
    import torch

    from harness.graphs import prefer_replays
    from harness.worker import Worker

    worker = Worker(
        args.model,
        guidance_buckets=8,
        bucket_graphs=args.mode,
        bucket_graph_resolutions=[f"{size}x{size}" for size in args.sizes],
        bucket_graph_text_lengths=args.text_lengths,
        bucket_graph_memory_gb=40,
        **args.engine,
    )
    graphs = worker.stage.graphs
    prefer_replays(graphs)
    by_latent: dict[tuple, list] = {}
    for bucket in graphs.graphs:
        by_latent.setdefault(bucket.shape.latent_shape, []).append(bucket)
    points: list[list] = []
    timings: list[tuple[int, dict]] = []
    for latent_shape, found in sorted(by_latent.items()):
        size = latent_shape[-1] * 8
        found.sort(key=lambda bucket: (bucket.shape.text_length, bucket.rows))
        measured = {}
        for bucket in found:
            times = measured[bucket] = measure_bucket(graphs, bucket, args.rounds, torch)
            print(bucket.label, {name: round(ms, 2) for name, ms in times.items()}, flush=True)
            points.append(
                [size, bucket.shape.masked, bucket.rows, times["eager"], times["graph"]]
            )
        if args.points:
            args.points.write_text(json.dumps(points))
        timings.append((size, measured))
    # from its first use on, the profiler makes every launch of a graph slower: only now
    for size, measured in timings:
        rows = [
            bucket_row(graphs.graphs[bucket], times, gpu_busy_ms(graphs, bucket, torch))
            for bucket, times in measured.items()
        ]
        header = [
            *("rows", "text", "eager ms", "graph ms", "x", "GPU busy ms", "over busy"),
            *("host ms", "host ms, idle", "launch ms", "capture s", "beyond forwards s"),
            *("own MB", "differs"),
        ]
        print_section(f"{size}x{size}, {args.rounds} rounds", markdown_table(header, rows))
    for bucket, reason in graphs.refused.items():
        print(f"none for {bucket.label}: {reason}")
    for latent_shape, found in sorted(by_latent.items()):
        memory(graphs, found, latent_shape[-1] * 8)


def measure_bucket(graphs, bucket, rounds: int, torch) -> dict[str, float]:
    """Milliseconds: an eager forward, a replay, the host's part of a step, a launch alone.

    The host's part is timed as the loop runs it, one step ahead of the device, and, "idle", after
    the device has drained.
    """
    graph, inputs = graphs.graphs[bucket], graphs._inputs[bucket.shape]
    samples = load_samples(graphs, bucket)
    times: dict[str, list[float]] = {
        name: [] for name in ("eager", "graph", "host", "host, idle", "launch")
    }
    for _ in range(rounds):
        times["eager"].append(timed(lambda: graphs.forward(inputs, bucket.rows), torch))
        times["graph"].append(timed(graph.replay, torch))

    def host_ms() -> float:
        fresh = [replace(sample) for sample in samples]  # as each step has them
        start = time.perf_counter()
        assert graphs.predict(fresh, bucket.shape.quality) is not None
        return 1000 * (time.perf_counter() - start)

    before = torch.cuda.Event()
    for _ in range(20):
        before.record()
        times["host"].append(host_ms())
        before.synchronize()
    for _ in range(20):
        torch.cuda.synchronize()
        times["host, idle"].append(host_ms())
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        times["launch"].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def load_samples(graphs, bucket) -> list:
    """Rows that fill the bucket, in its static inputs: a replay reads their indices."""
    from harness.graphs import random_samples

    samples = random_samples(graphs, bucket, bucket.rows, seed=1)
    graphs._inputs[bucket.shape].load(samples, bucket.rows)
    return samples


def bucket_row(graph, times: dict[str, float], busy_ms: float) -> list:
    shape = graph.bucket.shape
    return [
        graph.bucket.rows,
        f"{'up to ' * shape.masked}{shape.text_length}",
        f"{times['eager']:.2f}",
        f"{times['graph']:.2f}",
        f"{times['eager'] / times['graph']:.2f}",
        f"{busy_ms:.2f}",
        f"{100 * (times['graph'] / busy_ms - 1):+.1f}%",
        f"{times['host']:.2f}",
        f"{times['host, idle']:.2f}",
        f"{times['launch']:.2f}",
        f"{graph.capture_s:.2f}",
        f"{graph.capture_s - graph.forwards_s:.2f}",
        f"{graph.own_bytes / 2**20:.0f}",
        f"{graph.error:.0e}" if graph.error else "no",
    ]


def memory(graphs, found, size: int) -> None:
    """All buckets of a resolution against its largest alone, each from nothing."""
    import torch

    def used(wanted) -> float:
        graphs.drop("to measure")
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        for bucket in wanted:
            graphs.capture(bucket)
        torch.cuda.synchronize()
        return (before - torch.cuda.mem_get_info()[0]) / 2**20

    found = [bucket for bucket in found if not bucket.shape.masked]
    order = sorted(found, key=lambda bucket: bucket.rows, reverse=True)
    alone, together = used(order[:1]), used(order)
    print(
        f"{size}x{size}: the graph of {order[0].rows} rows alone takes {alone:.0f} MB, all "
        f"{len(order)} row buckets {together:.0f} MB: {together / alone:.2f}\n",
        flush=True,
    )


def timed(run, torch, runs: int = 10) -> float:
    """Milliseconds of one of several runs, back to back as steps are."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(runs):
        run()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / runs


def gpu_busy_ms(graphs, bucket, torch, runs: int = 10) -> float:
    """The sum of the kernels of one replay, at the clocks of a card that has run it for a while."""
    from torch.profiler import ProfilerActivity, profile

    run = graphs.graphs[bucket].replay
    load_samples(graphs, bucket)
    timed(run, torch)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    device = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    return sum(event.device_time for event in device) / 1000 / runs


def plot(args: argparse.Namespace) -> None:
    """Draw what `buckets --points FILE` measured, for texts without a mask."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = [point for point in json.loads(args.points.read_text()) if not point[1]]
    sizes = sorted({point[0] for point in points})
    figure, axes = plt.subplots(1, len(sizes), figsize=(3.2 * len(sizes), 2.8), squeeze=False)
    for axis, size in zip(axes[0], sizes):
        mine = sorted(point[2:] for point in points if point[0] == size)
        rows = [row for row, _, _ in mine]
        axis.plot(rows, [eager for _, eager, _ in mine], "o--", label="eager", markersize=4)
        axis.plot(rows, [graph for _, _, graph in mine], "o-", label="graph", markersize=4)
        axis.set_title(f"{size}x{size}", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.set_xticks(rows, [str(row) for row in rows])
        axis.set_xlabel("rows")
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("ms a step")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(args.output)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    for name, run in (("steps", steps), ("buckets", buckets)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("model", type=Path)
        command.add_argument("--sizes", type=int, nargs="+", default=[256, 512])
        command.add_argument("--rounds", type=int, default=5)
        command.add_argument("--text-lengths", type=int, nargs="+", default=[64])
        command.add_argument(
            "--engine", type=json.loads, default={}, help="JSON, for DiffGenerator"
        )
        if name == "steps":
            engines = ["upstream", "upstream, breakable", "eager", "graphs"]
            choices = [*engines, "compiled", "graphs, compiled"]
            command.add_argument("--steps", type=int, default=12)
            command.add_argument("--images", type=int, nargs="+", default=[1, 4])
            command.add_argument("--quoted", action="store_true", help="also quoted text")
            command.add_argument("--random-priors", action="store_true", help="run no AR model")
            command.add_argument("--engines", nargs="+", choices=choices, default=engines)
        else:
            command.add_argument("--mode", choices=["full", "breakable"], default="full")
            command.add_argument("--points", type=Path, help="JSON of what `plot` draws")
    command = commands.add_parser("plot")
    command.set_defaults(run=plot)
    command.add_argument("points", type=Path)
    command.add_argument("-o", "--output", type=Path, default=Path("bucket_graphs.svg"))
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_args()
    arguments.run(arguments)
