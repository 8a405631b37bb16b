"""What the probe plugin saved of an engine's computations."""

from pathlib import Path

import numpy as np


class Recording:
    def __init__(self, directory: Path):
        self.directory = directory

    def take(self, name: str) -> list[np.ndarray]:
        """The arrays saved under `name` since the last call, in order; all others are dropped."""
        arrays = []
        for path in sorted(self.directory.glob("*.npy")):
            if path.stem.endswith(name):
                arrays.append(np.load(path))
            path.unlink()
        return arrays
