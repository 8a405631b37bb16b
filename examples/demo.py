# SPDX-License-Identifier: Apache-2.0
"""Serve a checkpoint with guidance buckets, ask for pictures with several curves, show them.

Without --model that is the shapes checkpoint beside this file: it needs no download and no GPU.
--prompt and --curve can be given several times; the contact sheet has a row for each prompt and a
column for each curve.
"""

import argparse
import base64
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_server import ServerFailed, say, serve
from demo_sheet import save_sheet
from openai import APIError, OpenAI

SHAPES = Path(__file__).parent / "shapes" / "glm-image-shapes"
# it computes in fp32 wherever it runs, has nothing to warm up, and two threads are enough
SHAPES_FLAGS = (
    *("--dit-precision", "fp32", "--vae-precision", "fp32", "--text-encoder-precisions", "fp32"),
    *("--attention-backend", "torch_sdpa", "--warmup-mode", "off"),
)
SHAPES_ENVIRONMENT = {"OMP_NUM_THREADS": "2"}
SHAPES_PROMPTS = (
    'a large red star at the center, striped mint background, the word "HELLO" at the bottom',
    'a small blue circle left of a large yellow square, plain white background, the word "OPEN" '
    "at the top",
    'a large purple diamond above a small green triangle, plain pink background, the word "TEA" '
    "at the bottom",
    'a small orange cross at the top right, striped gray background, the word "ZOO" at the bottom',
)
CURVES = ("constant", "linear", "front", "peak", "interval")
SHAPES_SETTINGS = {"size": "192x192", "steps": 20, "scale": 2.5, "wait": 300}
MODEL_SETTINGS = {"size": "1024x1024", "steps": 30, "scale": 1.5, "wait": 1800}


@dataclass(frozen=True)
class Picture:
    """One answer: PNG bytes and the ``guidance`` object."""

    prompt: str
    curve: str
    png: bytes
    guidance: dict[str, Any]
    seconds: float


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="guidance-buckets-demo-") as scratch:
        try:
            run(args, Path(scratch))
        except KeyboardInterrupt:
            print("\ndemo: interrupted", file=sys.stderr)
            return 130
        except (ServerFailed, APIError) as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint that SGLang-Diffusion serves")
    parser.add_argument("--prompt", action="append", help="default: four that shapes can draw")
    parser.add_argument(
        "--curve", action="append", help=f"default: {', '.join(CURVES)}; a curve without numbers "
        "follows --scale"
    )
    parser.add_argument("--buckets", type=int, default=8, metavar="N")
    for name, unit in (("steps", "N"), ("size", "WxH"), ("scale", "S"), ("wait", "SECONDS")):
        shapes, model = SHAPES_SETTINGS[name], MODEL_SETTINGS[name]
        parser.add_argument(
            f"--{name}",
            type=type(shapes),
            metavar=unit,
            help=f"default: {shapes}, with --model {model}",
        )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), metavar="DIR")
    parser.add_argument(
        "--serve-args", nargs=argparse.REMAINDER, default=[], help="the rest goes to sglang serve"
    )
    args = parser.parse_args()
    defaults = MODEL_SETTINGS if args.model else SHAPES_SETTINGS
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.prompt = args.prompt or list(SHAPES_PROMPTS[:1] if args.model else SHAPES_PROMPTS)
    args.curve = args.curve or list(CURVES)
    return args


def run(args: argparse.Namespace, scratch: Path) -> None:
    model, flags, environment = args.model, [], {}
    traces = args.output.resolve() / "traces"
    if model is None:
        model, flags, environment = str(SHAPES.resolve()), list(SHAPES_FLAGS), SHAPES_ENVIRONMENT
        flags += ["--guidance-trace", str(traces)]
    elif Path(model).exists():
        model = str(Path(model).resolve())  # the server runs in a folder of its own
    command = [
        *(str(Path(sys.executable).with_name("sglang")), "serve", "--model-path", model),
        *("--guidance-buckets", str(args.buckets), *flags, *args.serve_args),
    ]
    log = args.output / "server.log"
    with serve(command, environment, log=log, folder=scratch, wait=args.wait) as url:
        pictures = ask(url, args)
        trace = None if args.model else ask_for_trace(url, args)

    say("Written")
    for picture in pictures:
        row, column = args.prompt.index(picture.prompt), args.curve.index(picture.curve)
        (args.output / f"picture-{row}-{column}.png").write_bytes(picture.png)
    sheet = args.output / "sheet.png"
    save_sheet(pictures, args.prompt, args.curve, sheet, scale=args.scale)
    print(f"  {args.output}/picture-ROW-COLUMN.png\n  {sheet}\n  {log}")
    if trace is not None:
        print(f"  {trace['sheet']}")


def ask(url: str, args: argparse.Namespace) -> list[Picture]:
    """Every prompt with every curve, all from one seed; the server batches them as it sees fit."""
    wanted = [(prompt, curve) for prompt in args.prompt for curve in args.curve]
    say(
        f"Asking for {len(wanted)} images of {args.size} in {args.steps} steps "
        f"at scale {args.scale:g}"
    )
    client = connect(url)
    start = time.monotonic()
    pictures = []
    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = [pool.submit(ask_for_one, client, args, *pair) for pair in wanted]
        try:
            for future in as_completed(futures):
                picture = future.result()
                pictures.append(picture)
                cond, uncond = (picture.guidance["forwards"][b] for b in ("cond", "uncond"))
                print(
                    f"  {len(pictures)} of {len(wanted)}: {picture.curve}, {cond} cond + {uncond} "
                    f"uncond forwards, {picture.seconds:.1f} s",
                    flush=True,
                )
        finally:
            pool.shutdown(cancel_futures=True)
    print(f"  all after {time.monotonic() - start:.1f} s")
    return pictures


def ask_for_trace(url: str, args: argparse.Namespace) -> dict[str, str]:
    """Where the server wrote what the steps of the first prompt with the last curve did."""
    say("Asking once more, for what each step did")
    picture = ask_for_one(connect(url), args, args.prompt[0], args.curve[-1], trace=True)
    return picture.guidance["trace"]


def connect(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600)


def ask_for_one(
    client: OpenAI, args: argparse.Namespace, prompt: str, curve: str, *, trace: bool = False
) -> Picture:
    start = time.monotonic()
    answer = client.images.generate(
        model="default",
        prompt=prompt,
        size=args.size,
        response_format="b64_json",
        output_format="png",
        extra_body={
            "guidance_curve": curve,
            "guidance_scale": args.scale,
            "num_inference_steps": args.steps,
            "seed": args.seed,
            **({"guidance_trace": True} if trace else {}),
        },
    )
    return Picture(
        prompt=prompt,
        curve=curve,
        png=base64.b64decode(answer.data[0].b64_json),
        guidance=answer.guidance,
        seconds=time.monotonic() - start,
    )


if __name__ == "__main__":
    sys.exit(main())
