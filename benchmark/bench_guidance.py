"""What guidance buckets cost and save: ms a denoising step against upstream, interleaved.

    python benchmark/bench_guidance.py MODEL --sizes 64 128 --precision fp32
    python benchmark/bench_guidance.py MODEL --sizes 256 512 1024 --quoted  # on a GPU

Three engines serve MODEL side by side: upstream (the plugin off), this project with its flags off
(0 buckets), and with guidance buckets. Each round asks every configuration for one picture, in an
order that rotates, so that drift meets all of them alike. A step's time is upstream's own per-step
metric with the device drained before and after (SGLANG_DIFFUSION_SYNC_STAGE_PROFILING=1). GLM-Image
writes each prior once for all sides: only denoising is compared.
"""

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import markdown_table, print_section

SCALE = 4.0
FRONT = "front:4:1.0@0.4"
QUOTED = 'a shop sign that says "open until late"'


@dataclass(frozen=True)
class Configuration:
    name: str
    engine: str
    fields: dict
    prompt: str = "a red cube on a table"


PLAIN = "upstream, plain CFG"
CONFIGURATIONS = [
    Configuration(PLAIN, "upstream", {}),
    Configuration("0 buckets", "off", {}),
    *(
        Configuration(f"{count} buckets", "buckets", {"guidance_buckets": count})
        for count in (4, 8, 16)
    ),
    Configuration(f"8 buckets, {FRONT}", "buckets", {"guidance_curve": FRONT}),
]
SPLIT = Configuration("8 buckets, rows split", "split", {})
QUOTED_CONFIGURATIONS = [
    Configuration(PLAIN + ", quoted text", "upstream", {}, QUOTED),
    Configuration("8 buckets, quoted text", "buckets", {}, QUOTED),
    Configuration("8 buckets, quoted text, rows packed", "packed", {}, QUOTED),
]


def main() -> None:
    args = parse_args()
    from harness.engine import Engine
    from harness.processes import probe_environment

    priors = tempfile.TemporaryDirectory(prefix="priors-")
    environment = probe_environment(
        PROBE_KEEP_PRIOR=priors.name,
        SGLANG_DIFFUSION_STAGE_LOGGING="1",
        SGLANG_DIFFUSION_SYNC_STAGE_PROFILING="1",
    )
    options = {"env": environment, **args.engine}
    if args.precision:
        options |= {f"{part}_precision": args.precision for part in ("dit", "vae")}
    configurations = CONFIGURATIONS + [SPLIT] + (QUOTED_CONFIGURATIONS if args.quoted else [])
    engines = {
        "upstream": lambda: Engine(args.model, upstream=True, **options),
        "off": lambda: Engine(args.model, **options),
        "buckets": lambda: Engine(args.model, guidance_buckets=8, **options),
        "split": lambda: Engine(args.model, guidance_buckets=8, guidance_rows="split", **options),
        "packed": lambda: Engine(args.model, guidance_buckets=8, guidance_rows="packed", **options),
    }
    wanted = list(dict.fromkeys(configuration.engine for configuration in configurations))
    with ThreadPoolExecutor() as pool:
        started = dict(zip(wanted, pool.map(lambda name: engines[name](), wanted)))
    try:
        for size in args.sizes:
            measure(started, configurations, size, args)
    finally:
        for engine in started.values():
            engine.close()


def measure(engines, configurations: list[Configuration], size: int, args) -> None:
    def picture(configuration: Configuration):
        return engines[configuration.engine].generate(
            prompt=configuration.prompt,
            width=size,
            height=size,
            num_inference_steps=args.steps,
            guidance_scale=SCALE,
            return_trajectory_latents=False,
            **configuration.fields,
        )

    def warm_up(engine: str) -> None:
        for configuration in configurations:
            if configuration.engine == engine:
                picture(configuration)

    for engine in list(engines)[:1]:  # alone: it writes the priors
        warm_up(engine)
    with ThreadPoolExecutor() as pool:  # compiling side by side
        list(pool.map(warm_up, list(engines)[1:]))
    steps = {configuration.name: [] for configuration in configurations}
    peak_mb = dict.fromkeys(steps, 0.0)
    for round_index in range(args.rounds):
        turn = round_index % len(configurations)
        for configuration in configurations[turn:] + configurations[:turn]:
            result = picture(configuration)
            steps[configuration.name].append(result.metrics["steps"])
            peak_mb[configuration.name] = max(peak_mb[configuration.name], result.peak_memory_mb)
    title = f"{size}x{size}, {args.steps} steps, {args.rounds} rounds"
    print_section(title, table(configurations, steps, peak_mb))


def table(configurations, steps, peak_mb) -> str:
    def median_total(name: str) -> float:
        return statistics.median(sum(picture) for picture in steps[name])

    def step_median(name: str) -> float:
        return statistics.median(step for picture in steps[name] for step in picture)

    rows = []
    for configuration in configurations:
        name = configuration.name
        base = PLAIN + ", quoted text" if configuration.prompt == QUOTED else PLAIN
        totals = [sum(picture) for picture in steps[name]]
        rows.append(
            [
                name,
                f"{step_median(name):.2f}",
                f"{median_total(name):.1f}",
                f"{min(totals):.1f}-{max(totals):.1f}",
                f"{median_total(name) / median_total(base):.3f}",
                f"{peak_mb[name]:.0f}",
            ]
        )
    header = ["configuration", "ms a step", "ms a picture", "min-max", "of plain CFG", "peak MB"]
    return markdown_table(header, rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", help="of DiT and VAE (default: the model's own)")
    parser.add_argument("--quoted", action="store_true", help="also prompts with quoted text")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON, for DiffGenerator")
    return parser.parse_args()


if __name__ == "__main__":
    main()
