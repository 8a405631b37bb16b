# SPDX-License-Identifier: Apache-2.0
"""Trains every part and writes the checkpoint: one command, one GPU, a quarter of an hour.

    python examples/shapes/train.py outputs/glm-image-shapes

All parts run side by side: the VAE and the codebook of the prior tokens train while the AR model
and the DiT draw their pictures; these two train when they have them. Each trains for a fixed time,
so a slower GPU gets a worse checkpoint, not a longer run. The same command takes up a run that was
stopped: a part whose file lies in the work folder is not trained again, and the AR model and the
DiT go on from where they were a minute before.
"""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

from export import export

HERE = Path(__file__).parent
SECONDS = {"vae": 90, "codebook": 240, "ar": 620, "dit": 620}


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
    parser.add_argument("--scenes", type=int, help="for each part; default: its own number")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # parts are stopped too
    work = args.work or args.checkpoint.with_suffix(".parts")
    work.mkdir(parents=True, exist_ok=True)
    vae, codebook, ar, dit = (work / name for name in ("vae", "codebook.pt", "ar.pt", "dit.pt"))
    scenes = ["--scenes", args.scenes] if args.scenes else []
    start = time.monotonic()
    run_together(
        {
            vae: ["train_vae.py", vae, "--seconds", args.vae],
            codebook: ["train_codebook.py", codebook, "--seconds", args.codebook, *scenes],
            ar: ["train_ar.py", codebook, ar, "--seconds", args.ar, *scenes],
            dit: ["train_dit.py", vae, codebook, dit, "--seconds", args.dit, *scenes],
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
