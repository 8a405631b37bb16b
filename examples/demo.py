# SPDX-License-Identifier: Apache-2.0
"""Serve a checkpoint with guidance buckets, ask it for one image, show what was run.

Without --model a tiny GLM-Image checkpoint with random weights is built first: it needs no
download and no GPU, and its picture means nothing.
"""

import argparse
import base64
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import APIError, OpenAI

from sglang.multimodal_gen.tools.guidance_curve_plot import save_curve

# what the tiny checkpoint wants: it is saved in fp32, has nothing to warm up, and more threads only
# get in its way
TINY_FLAGS = (
    *("--dit-precision", "fp32", "--vae-precision", "fp32", "--text-encoder-precisions", "fp32"),
    *("--attention-backend", "torch_sdpa", "--warmup-mode", "off"),
)
TINY_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

CLEAR_LINE = "\033[K" if sys.stdout.isatty() else ""


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
    parser.add_argument("--curve", default="front:2:1@0.4")
    parser.add_argument("--buckets", type=int, default=8, metavar="N")
    parser.add_argument("--steps", type=int, default=30, metavar="N")
    parser.add_argument("--size", help="default: 256x256, with --model 1024x1024")
    parser.add_argument(
        "--scale", type=float, default=1.5, help="followed by a curve without numbers"
    )
    parser.add_argument("--prompt", default='a small red fox in the snow, a sign says "hello"')
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), metavar="DIR")
    parser.add_argument(
        "--wait",
        type=int,
        metavar="SECONDS",
        help="for the server; default: 300, with --model 1800",
    )
    parser.add_argument(
        "--serve-args", nargs=argparse.REMAINDER, default=[], help="the rest goes to sglang serve"
    )
    args = parser.parse_args()
    args.size = args.size or ("1024x1024" if args.model else "256x256")
    args.wait = args.wait or (1800 if args.model else 300)
    return args


def run(args: argparse.Namespace, scratch: Path) -> None:
    model, flags, environment = args.model, [], {}
    if model is None:
        model = str(build_tiny_checkpoint(scratch))
        flags, environment = list(TINY_FLAGS), TINY_ENVIRONMENT
    elif Path(model).exists():
        model = str(Path(model).resolve())  # the server runs in a folder of its own

    command = [
        *(str(Path(sys.executable).with_name("sglang")), "serve", "--model-path", model),
        *("--guidance-buckets", str(args.buckets), *flags, *args.serve_args),
    ]
    log = args.output / "server.log"
    with serve(command, environment, log=log, folder=scratch, wait=args.wait) as url:
        guidance = ask_for_image(url, args, args.output / "image.png")

    say("What was run")
    print_guidance(guidance)
    plot = args.output / "curve.png"
    save_curve(guidance, plot, scale=args.scale)
    say("Written")
    for path in (args.output / "image.png", plot, log):
        print(f"  {path}")


def build_tiny_checkpoint(scratch: Path) -> Path:
    say("Building a tiny GLM-Image checkpoint with random weights")
    path = scratch / "tiny-glm-image"
    subprocess.run(
        [sys.executable, "-m", "sglang.multimodal_gen.tools.tiny_checkpoints", "glm-image", path],
        check=True,
    )
    return path


# --- the server ---------------------------------------------------------------------------------


class ServerFailed(RuntimeError):
    """The server did not come up."""


@contextmanager
def serve(
    command: list[str], environment: dict[str, str], *, log: Path, folder: Path, wait: int
) -> Iterator[str]:
    """Run `command`, a `sglang serve` without a port, until the caller is done; yields its URL."""
    port = free_port()
    command = [*command, "--port", str(port)]
    say("Starting the server")
    print(f"  {' '.join(command)}\n  its log: {log}")
    with log.open("w") as log_file:
        process = subprocess.Popen(
            command,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C is ours to handle
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(process, url, log, wait)
        yield url
    finally:
        stop(process)


def free_port() -> int:
    """A free port whose successor is free too: SGLang opens both."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def wait_until_healthy(process: subprocess.Popen, url: str, log: Path, wait: int) -> None:
    start, shown = time.monotonic(), 0.0
    while (waited := time.monotonic() - start) < wait:
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with code {process.returncode}\n{tail(log)}")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:  # not up yet, or it says that it is not ready
            if waited - shown >= (1 if sys.stdout.isatty() else 10):
                shown = waited
                print(
                    f"  waiting for it to be ready: {waited:.0f} of at most {wait} s",
                    end="\r" if sys.stdout.isatty() else "\n",
                    flush=True,
                )
            time.sleep(0.5)
        else:
            print(f"{CLEAR_LINE}  ready after {waited:.0f} s")
            return
    raise ServerFailed(f"the server was not ready after {wait} s\n{tail(log)}")


def stop(process: subprocess.Popen) -> None:
    """Stop the server and its workers, which share its process group."""
    say("Stopping the server")
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue
    print(f"  stopped (process {process.pid})")


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


# --- the request --------------------------------------------------------------------------------


def ask_for_image(url: str, args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Save one image to `path`; returns the ``guidance`` object of the answer."""
    say(f"Asking for one image of {args.size} in {args.steps} steps, guidance_curve={args.curve}")
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600)
    start = time.monotonic()
    answer = client.images.generate(
        model="default",
        prompt=args.prompt,
        size=args.size,
        response_format="b64_json",
        output_format="png",
        extra_body={
            "guidance_curve": args.curve,
            "guidance_scale": args.scale,
            "num_inference_steps": args.steps,
            "seed": 42,
        },
    )
    print(f"  answered in {time.monotonic() - start:.1f} s")
    path.write_bytes(base64.b64decode(answer.data[0].b64_json))
    return answer.guidance


def print_guidance(guidance: dict[str, Any]) -> None:
    print(f"  curve {guidance['curve']}\n")
    print("  bucket  steps   scale           rows")
    for run in guidance["buckets"]:
        first, last = run["steps"]
        steps = str(first) if first == last else f"{first}-{last}"
        scales = run["scale"] if isinstance(run["scale"], list) else [run["scale"]]
        rows = {1: "cond", 0: "uncond"}.get(scales[0], "cond + uncond")
        scale = " to ".join(f"{scale:.4g}" for scale in scales)
        print(f"  {run['bucket']:>6}  {steps:<6}  {scale:<14}  {rows}")
    cond, uncond = guidance["forwards"]["cond"], guidance["forwards"]["uncond"]
    steps = guidance["buckets"][-1]["steps"][1] + 1
    print(
        f"\n  forwards: {cond} cond + {uncond} uncond = {cond + uncond}; "
        f"plain CFG runs {2 * steps} in {steps} steps"
    )


def say(text: str) -> None:
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
