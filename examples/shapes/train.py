# SPDX-License-Identifier: Apache-2.0
"""Trains every part and writes the checkpoint: one command, one GPU, under 25 minutes.

    python examples/shapes/train.py glm-image-shapes

First the VAE and the codebook, side by side; then, on top of both, the AR model and the DiT, side
by side. Each part trains for a fixed time.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from export import export

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="folder to write")
    parser.add_argument("--work", type=Path, help="for parts; default: CHECKPOINT.parts")
    parser.add_argument("--first", type=int, default=90, metavar="SECONDS", help="VAE, codebook")
    parser.add_argument("--second", type=int, default=900, metavar="SECONDS", help="AR, DiT")
    args = parser.parse_args()
    work = args.work or args.checkpoint.with_suffix(".parts")
    work.mkdir(parents=True, exist_ok=True)
    vae, codebook, ar, dit = (work / name for name in ("vae", "codebook.pt", "ar.pt", "dit.pt"))
    start = time.monotonic()
    run_together(
        ["train_vae.py", vae, "--seconds", args.first],
        ["train_codebook.py", codebook, "--seconds", args.first],
    )
    run_together(
        ["train_ar.py", codebook, ar, "--seconds", args.second],
        ["train_dit.py", vae, codebook, dit, "--seconds", args.second],
    )
    export(vae, ar, dit, args.checkpoint)
    print(f"{args.checkpoint}: done after {time.monotonic() - start:.0f} s", flush=True)


def run_together(*commands: list) -> None:
    """Run scripts of this folder side by side; ends with the first that fails."""
    processes = [
        subprocess.Popen([sys.executable, HERE / command[0], *map(str, command[1:])])
        for command in commands
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit(f"train: {commands[[bool(code) for code in codes].index(True)][0]} failed")


if __name__ == "__main__":
    main()
