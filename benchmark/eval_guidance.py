# SPDX-License-Identifier: Apache-2.0
"""What guidance curves and bucket counts do to pictures, measured on the shapes checkpoint.

    python benchmark/eval_guidance.py examples/shapes/glm-image-shapes -o outputs/curves

Every setting draws the same held-out captions from the same prior tokens and the same noise, in
batches, without a server; test/server/test_shapes.py holds the two against each other. A setting
that has its file in DIR/settings is not run again, so an interrupted run can be taken up, and
several processes, one a GPU, can share a folder. At the end DIR/settings.csv has a line a setting,
and the plots are drawn where matplotlib is installed.
"""

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from curve_grid import SCALES, Setting, settings
from curve_metrics import (
    FeatureSpace,
    FrechetDistance,
    chroma,
    clipped,
    mean_interval,
    share_interval,
)
from curve_table import locked, result_path, write_table

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "shapes"))
from draw import draw
from judge import judge
from sample import Sampler, make_noise
from scenes import captions, sample_scenes, words

REFERENCE_PICTURES = 10_000
SEED = 2026
SHARES = ("scene", "color", "shape", "place")  # of judge.Verdict, beside the word


def main() -> None:
    args = parse_args()
    torch.set_float32_matmul_precision("high")
    (args.output / "settings").mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    evaluation = Evaluation(args)
    print(f"ready after {time.monotonic() - started:.0f} s on {evaluation.machine}", flush=True)
    sweep = [Setting("constant", f"{s:g}", f"constant:{s:g}", args.steps) for s in SCALES]
    evaluation.run(sweep, "constant scales")
    scale = args.scale or best_scale(evaluation, sweep)
    print(f"the best constant scale: {scale:g}", flush=True)
    (args.output / "setup.json").write_text(
        json.dumps({"scale": scale, "machine": evaluation.machine, **evaluation.setup}, indent=1)
    )
    everything = list(settings(scale, args.steps))
    if args.only:
        everything = [setting for setting in everything if args.only in setting.group]
    evaluation.run(everything, "settings")
    write_table(args.output)
    try:
        from curve_plots import draw_plots
    except ModuleNotFoundError as error:
        print(f"no plots: {error.name} is not installed; run again where it is")
        return
    draw_plots(args.output)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--pictures", type=int, default=1000, metavar="N", help="a setting")
    parser.add_argument("--steps", type=int, default=20, metavar="N")
    parser.add_argument("--batch", type=int, default=500, metavar="N")
    parser.add_argument("--scale", type=float, help="instead of the best constant scale")
    parser.add_argument("--only", metavar="TEXT", help="groups that contain it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop in good time")
    return parser.parse_args()


class Evaluation:
    """The fixed things: captions, prior tokens, noise, reference pictures."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.machine = (
            torch.cuda.get_device_name() if self.device.type == "cuda" else platform.processor()
        )
        self.setup = {"pictures": args.pictures, "steps": args.steps, "seed": SEED}
        self.until = time.monotonic() + args.seconds
        self.scenes = sample_scenes(
            args.pictures, torch.Generator().manual_seed(SEED), held_out=True
        )
        self.sampler = Sampler(args.checkpoint, self.device)
        self.conditions = self._conditions()
        self.noise = make_noise(args.pictures, SEED)
        reference = sample_scenes(
            REFERENCE_PICTURES, torch.Generator().manual_seed(SEED + 1), held_out=True
        )
        self.space = FeatureSpace(self._drawn(reference), self.device)
        self.distance = FrechetDistance(self.space.reference)
        self.true_chroma = torch.cat([chroma(picture) for picture in self._drawn(reference)]).mean()
        drawn = np.concatenate([self.space(picture) for picture in self._drawn(self.scenes)])
        self.setup["frechet of drawn pictures"] = round(self.distance(drawn), 3)
        self._continuous: tuple[Setting, torch.Tensor] | None = None

    def _conditions(self):
        path = self.args.output / "prior_tokens.pt"
        texts, quoted = captions(self.scenes), words(self.scenes)
        with locked(path.with_suffix(".lock"), wait=True):
            if not path.exists():
                conditions = self.sampler.conditions(texts, quoted, SEED)
                torch.save(conditions.codes.cpu().short(), path.with_suffix(".new"))
                path.with_suffix(".new").rename(path)
        codes = torch.load(path)
        if len(codes) != len(texts):
            sys.exit(f"{path} is of {len(codes)} pictures, not {len(texts)}: take another folder")
        return self.sampler.with_codes(codes.long().to(self.device), quoted)

    def _drawn(self, scenes):
        """Pictures as they should be, in batches."""
        for start in range(0, len(scenes), self.args.batch):
            yield draw(scenes[start : start + self.args.batch].to(self.device))

    def path(self, setting: Setting) -> Path:
        return result_path(self.args.output, setting)

    def result(self, setting: Setting) -> dict:
        return json.loads(self.path(setting).read_text())

    def run(self, todo: list[Setting], what: str) -> None:
        """Run what has no file yet, and wait for what another process is at."""
        started, count = time.monotonic(), 0
        while missing := list({s.key: s for s in todo if not self.path(s).exists()}.values()):
            before = count
            for setting in missing:
                if time.monotonic() > self.until:
                    print(f"out of time, {len(missing)} {what} missing; run again to go on")
                    return
                with locked(self.path(setting).with_suffix(".lock")) as mine:
                    if not mine or self.path(setting).exists():
                        continue
                    result = self.measure(setting)
                    unfinished = self.path(setting).with_suffix(".new")
                    unfinished.write_text(json.dumps(result))
                    unfinished.rename(self.path(setting))
                count += 1
                left = sum(not self.path(s).exists() for s in missing)
                seconds = (time.monotonic() - started) / count * left
                print(
                    f"{left} {what}, at most {seconds:.0f} s left: {setting.group} "
                    f"{setting.label}: all right {result['all_right'][0]:.3f} "
                    f"frechet {result['frechet'][0]:.3f}",
                    flush=True,
                )
            if count == before:
                time.sleep(0.5)

    def draw_setting(self, setting: Setting):
        """Batches of (slice, pictures with their clipped part)."""
        scales = list(setting.schedule().scales)
        for start in range(0, len(self.scenes), self.args.batch):
            part = slice(start, start + self.args.batch)
            latent = self.sampler.denoise(self.conditions[part], scales, self.noise[part])
            yield part, self.sampler.decode(latent)

    def measure(self, setting: Setting) -> dict:
        """Each measure as [value, low, high]."""
        forwards = setting.schedule().forwards
        keep = setting.group.startswith("buckets")
        others = self._continuous_pictures(setting) if keep and setting.buckets else None
        columns: dict[str, list] = {}
        pictures = []
        for part, raw in self.draw_setting(setting):
            picture = raw.clamp(0, 1)
            verdict = judge(picture, self.scenes[part])
            values = {
                **{name: getattr(verdict, name) for name in SHARES},
                "word": verdict.word,
                "worded": verdict.worded,
                "chroma": chroma(picture),
                "clipped": clipped(raw),
            }
            if keep and not setting.buckets:
                pictures.append((picture * 255).round().byte().cpu())
            if others is not None:
                change = picture - others[part].to(self.device).float() / 255
                values["drift"] = change.square().mean((1, 2, 3)).sqrt() * 255
            for name, value in values.items():
                columns.setdefault(name, []).append(value.cpu().numpy())
            columns.setdefault("features", []).append(self.space(picture))
        if pictures:
            self._continuous = (setting, torch.cat(pictures))
        table = {name: np.concatenate(parts) for name, parts in columns.items()}
        return {
            **asdict(setting),
            "mean_scale": sum(setting.schedule().scales) / setting.steps,
            "forwards": sum(forwards.values()),
            "pictures": len(self.scenes),
            **self._summary(table),
        }

    def _summary(self, table: dict[str, np.ndarray]) -> dict[str, list[float] | None]:
        worded = table["worded"]
        all_right = table["scene"] & (table["word"] | ~worded)
        shares = {
            **{name: table[name] for name in SHARES},
            "word": table["word"][worded],
            "all_right": all_right,
        }
        summary: dict = {
            name: [float(hits.mean()), *share_interval(int(hits.sum()), len(hits))]
            for name, hits in shares.items()
        }
        features = table["features"]
        summary["frechet"] = [self.distance(features), *self.distance.interval(features)]
        relative = table["chroma"] / float(self.true_chroma)
        for name, values in (("saturation", relative), ("clipped", table["clipped"])):
            summary[name] = [float(values.mean()), *mean_interval(values)]
        summary["drift"] = None
        if "drift" in table:
            drift = table["drift"]
            summary["drift"] = [float(drift.mean()), *mean_interval(drift)]
        # one bit a picture, so that settings can be compared picture by picture
        summary["all_right_bits"] = np.packbits(all_right).tobytes().hex()
        return summary

    def _continuous_pictures(self, setting: Setting) -> torch.Tensor:
        """The same curve's pictures with a bucket a step, which was run just before."""
        held = self._continuous
        if held is None or (held[0].curve, held[0].steps) != (setting.curve, setting.steps):
            each = Setting(setting.group, "", setting.curve, setting.steps)
            drawn = [raw.clamp(0, 1).mul(255).round().byte() for _, raw in self.draw_setting(each)]
            self._continuous = (each, torch.cat(drawn).cpu())
        return self._continuous[1]


def best_scale(evaluation: Evaluation, sweep: list[Setting]) -> float:
    """The lowest scale of those with the most pictures all right."""
    if not all(evaluation.path(setting).exists() for setting in sweep):
        sys.exit("the constant scales come first: run again to finish them")
    results = [evaluation.result(setting) for setting in sweep]
    best = max(result["all_right"][0] for result in results)
    return min(r["mean_scale"] for r in results if r["all_right"][0] == best)


if __name__ == "__main__":
    main()
