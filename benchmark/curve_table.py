# SPDX-License-Identifier: Apache-2.0
"""The files of single settings, and from them one table: DIR/settings.csv."""

import csv
import fcntl
import json
import math
import os
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
from curve_grid import Setting, settings

HEAD = ("group", "label", "curve", "steps", "buckets", "mode", "mean_scale", "forwards")
MEASURES = (
    *("scene", "color", "shape", "place", "word", "all_right", "change"),
    *("frechet", "saturation", "clipped", "drift"),
)


def result_path(folder: Path, setting: Setting) -> Path:
    return folder / "settings" / f"{setting.key}.json"


@contextmanager
def locked(path: Path, *, wait: bool = False):
    """Whether this process holds the file; the system lets go of it if the process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def write_table(folder: Path) -> None:
    """A line for each setting that has its file, with the numbers of DIR/setup.json around it.

    ``change`` is the difference in pictures that are all right from constant guidance at the same
    scale, picture by picture: captions and noise are the same.
    """
    setup = json.loads((folder / "setup.json").read_text())
    every = list(settings(setup["scale"], setup["steps"]))
    results = {
        setting: json.loads(path.read_text())
        for setting in every
        if (path := result_path(folder, setting)).exists()
    }
    base = next(
        result
        for setting, result in results.items()
        if setting.group == "constant" and result["mean_scale"] == setup["scale"]
    )
    path = folder / "settings.csv"
    unfinished = path.with_suffix(f".{os.getpid()}")  # another process may be writing it too
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*HEAD, *(f"{m}{end}" for m in MEASURES for end in ("", "_low", "_high"))])
        for setting, result in results.items():
            result = {**result, **asdict(setting), "change": paired_change(result, base)}
            row = [result[name] for name in HEAD]
            for measure in MEASURES:
                row += [f"{v:.5g}" for v in result[measure]] if result[measure] else [""] * 3
            writer.writerow(row)
    unfinished.rename(path)
    print(f"{path}: {len(results)} of {len(every)} settings")


def paired_change(result: dict, base: dict) -> list[float]:
    """Mean difference and its 95% interval."""
    bits = [
        np.unpackbits(np.frombuffer(bytes.fromhex(r["all_right_bits"]), np.uint8))[: r["pictures"]]
        for r in (result, base)
    ]
    difference = bits[0].astype(float) - bits[1]
    half = 1.959964 * difference.std() / math.sqrt(len(difference))
    mean = float(difference.mean())
    return [mean, mean - half, mean + half]
