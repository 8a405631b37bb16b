"""What the benchmarks share: the tests' engine, and tables that name the machine."""

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "test"))


def machine() -> str:
    """The GPU's name, or the processor's with its core count; torch's version beside it."""
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        name = f"{_processor()}, {os.cpu_count()} cores"
    return f"{name}, torch {torch.__version__}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def print_section(title: str, table: str) -> None:
    print(f"\n### {title}\n\n`{' '.join(sys.argv)}` on {machine()}\n\n{table}\n", flush=True)
