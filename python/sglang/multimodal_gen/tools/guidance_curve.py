# SPDX-License-Identifier: Apache-2.0
"""Show what a guidance curve means: buckets, scales and forwards. No server, no GPU.

  python -m sglang.multimodal_gen.tools.guidance_curve front:2:1@0.4 --steps 30 --buckets 8
  python -m sglang.multimodal_gen.tools.guidance_curve interval --scale 3 --output interval.png
  python -m sglang.multimodal_gen.tools.guidance_curve --all --output curves.png

Run by its path, this file needs neither sglang nor torch; --output needs matplotlib.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

if __package__:
    from sglang.multimodal_gen.configs import guidance_curves as curves
else:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "configs"))
    import guidance_curves as curves

_BAR = 40  # characters of the highest scale


def describe(
    curve: str | list[float],
    *,
    steps: int,
    buckets: int,
    mode: str = "constant",
    scale: float = 1.5,
) -> dict[str, Any]:
    """The ``guidance`` object that a server would answer with.

    Raises:
        GuidanceError: for what a server would answer with 400.
    """
    parsed = curves.parse_curve(curve)
    schedule = curves.make_schedule(parsed, steps, buckets=buckets, mode=mode, scale=scale)
    return {
        "curve": parsed.spec,
        "buckets": [run.to_dict() for run in schedule.bucket_runs()],
        "forwards": schedule.forwards,
    }


def step_scales(answer: dict[str, Any]) -> list[float]:
    """The scale of each step; inside a run that moves they lie on a straight line."""
    scales = []
    for run in answer["buckets"]:
        first, last = run["steps"]
        start, end = run["scale"] if isinstance(run["scale"], list) else [run["scale"]] * 2
        slope = (end - start) / max(1, last - first)
        scales += [start + slope * i for i in range(last - first + 1)]
    return scales


def forwards_text(forwards: dict[str, int]) -> str:
    cond, uncond = forwards["cond"], forwards["uncond"]
    return f"{cond + uncond} forwards: {cond} cond + {uncond} uncond"


def table(answer: dict[str, Any]) -> str:
    """The buckets of a ``guidance`` object, one a line with a bar as long as its scale."""
    scales = step_scales(answer)
    highest = max(scales) or 1.0
    lines = ["bucket  steps   scale             rows"]
    for run in answer["buckets"]:
        first, last = run["steps"]
        steps = str(first) if first == last else f"{first}-{last}"
        ends = run["scale"] if isinstance(run["scale"], list) else [run["scale"]]
        scale = " to ".join(f"{end:.4g}" for end in ends)
        branches = curves.branches_of(scales[first])
        rows = "both" if len(branches) == 2 else branches[0]
        mean = sum(scales[first : last + 1]) / (last - first + 1)
        bar = "#" * round(_BAR * mean / highest)
        lines.append(f"{run['bucket']:>6}  {steps:<6}  {scale:<16}  {rows:<6}  {bar}".rstrip())
    steps = len(scales)
    lines.append(
        f"{forwards_text(answer['forwards'])}; plain CFG runs {2 * steps} in {steps} steps; "
        f"mean scale {sum(scales) / steps:.4g}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.guidance_curve" if __package__ else None,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("curve", nargs="?", metavar="CURVE", help=curves.CURVE_HELP)
    what.add_argument("--all", action="store_true", help="one of each shape; needs --output")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="default: 30")
    parser.add_argument("--buckets", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--mode", choices=curves.BUCKET_MODES, default="constant")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.5,
        metavar="S",
        help="the request's, for a curve without numbers (default: 1.5)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PNG", help="also draw it there")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps: got {args.steps}, wanted a whole number from 1")
    if not 0 <= args.scale <= curves.MAX_SCALE:
        parser.error(f"--scale: got {args.scale}, wanted a number from 0 to {curves.MAX_SCALE}")
    if args.all and args.output is None:
        parser.error("--all: nothing to print, wanted --output PNG beside it")
    try:
        curves.check_buckets(args.buckets, field="--buckets")
        run(args)
    except curves.GuidanceError as error:
        parser.error(str(error))
    except ModuleNotFoundError as error:
        parser.error(f"--output needs {error.name}: pip install {error.name}")


def run(args: argparse.Namespace) -> None:
    options = {"steps": args.steps, "buckets": args.buckets, "mode": args.mode}
    answer = None
    if not args.all:
        answer = describe(args.curve, scale=args.scale, **options)
        print(table(answer))
    if args.output is None:
        return
    if __package__:
        from sglang.multimodal_gen.tools import guidance_curve_plot as plot
    else:
        import guidance_curve_plot as plot
    if answer is None:
        plot.save_gallery(args.output, **options)
    else:
        plot.save_curve(answer, args.output, scale=args.scale)
    print(args.output)


if __name__ == "__main__":
    main()
