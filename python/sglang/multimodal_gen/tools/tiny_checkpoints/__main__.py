# SPDX-License-Identifier: Apache-2.0
"""Command line: build one tiny checkpoint."""

import argparse
import sys
import time

from sglang.multimodal_gen.tools.tiny_checkpoints import FAMILIES, build_checkpoint


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang.multimodal_gen.tools.tiny_checkpoints",
        description="Build a random-weight checkpoint that SGLang-Diffusion serves, offline.",
    )
    parser.add_argument("family", metavar="FAMILY", choices=FAMILIES, help=", ".join(FAMILIES))
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="where to build it: new or empty, its name containing FAMILY (except for sana)",
    )
    parser.add_argument(
        "--full-dit",
        action="store_true",
        help="glm-image only: the real 6.93B-parameter DiT, random bf16 weights (14 GB, GPU)",
    )
    args = parser.parse_args(argv)

    # A bar for each of several models that take milliseconds would only bury the last line.
    from transformers.utils import logging

    logging.disable_progress_bar()

    start = time.perf_counter()
    try:
        path = build_checkpoint(args.family, args.directory, full_dit=args.full_dit)
    except ValueError as error:
        parser.error(str(error))
    except (OSError, RuntimeError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(f"{path}: {args.family}, {size / 1e6:.1f} MB, {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
