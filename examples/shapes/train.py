# SPDX-License-Identifier: Apache-2.0
"""Trains every part and writes the checkpoint: one command, one GPU, a quarter of an hour.

    python examples/shapes/train.py outputs/glm-image-shapes

The VAE first, then the codebook of the prior tokens, while the AR model and the DiT draw their
pictures; then these two, side by side. Each trains for a fixed time, so a slower GPU gets a worse
checkpoint, not a longer run. A part whose file lies in the work folder is not trained again.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from export import export

HERE = Path(__file__).parent
SECONDS = {"vae": 65, "codebook": 130, "ar": 450, "dit": 450}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="folder to write")
    parser.add_argument("--work", type=Path, help="for parts; default: CHECKPOINT.parts")
    for part, seconds in SECONDS.items():
        parser.add_argument(
            f"--{part}", type=float, default=seconds, metavar="SECONDS", help=f"default: {seconds}"
        )
    args = parser.parse_args()
    work = args.work or args.checkpoint.with_suffix(".parts")
    work.mkdir(parents=True, exist_ok=True)
    vae, codebook, ar, dit = (work / name for name in ("vae", "codebook.pt", "ar.pt", "dit.pt"))
    start = time.monotonic()
    run_together({vae: ["train_vae.py", vae, "--seconds", args.vae]})
    run_together(
        {
            codebook: ["train_codebook.py", codebook, "--seconds", args.codebook],
            ar: ["train_ar.py", codebook, ar, "--seconds", args.ar],
            dit: ["train_dit.py", vae, codebook, dit, "--seconds", args.dit],
        }
    )
    export(vae, ar, dit, args.checkpoint)
    print(f"{args.checkpoint}: done after {time.monotonic() - start:.0f} s", flush=True)


def run_together(commands: dict[Path, list]) -> None:
    """Run scripts of this folder side by side, but those whose file is there; exit if one fails."""
    processes = {
        command[0]: subprocess.Popen([sys.executable, HERE / command[0], *map(str, command[1:])])
        for path, command in commands.items()
        if not path.exists()
    }
    try:
        while any(process.poll() is None for process in processes.values()):
            check(processes)
            time.sleep(0.5)
        check(processes)
    finally:
        for process in processes.values():  # some may wait for the one that failed
            process.kill()


def check(processes: dict[str, subprocess.Popen]) -> None:
    failed = [name for name, process in processes.items() if process.poll()]
    if failed:
        sys.exit(f"train: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
