# SPDX-License-Identifier: Apache-2.0
"""What the training scripts share: arguments, a schedule by the clock, averaged weights."""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SAVE_EVERY = 60  # seconds


def parse_args(description: str, paths: list[str], **numbers: float) -> argparse.Namespace:
    """`paths` are positional, `numbers` options with their defaults; also seeds torch."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name in paths:
        parser.add_argument(name, type=Path)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=" ")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    return args


def autocast():
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda")


class Trainer:
    """AdamW over modules, with clipped gradients and averaged weights."""

    def __init__(self, modules: list[torch.nn.Module], peak: float, average: float = 0.999):
        self.parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
        decayed = [p for p in self.parameters if p.dim() >= 2]
        others = [p for p in self.parameters if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
            lr=peak,
            betas=(0.9, 0.98),
            fused=DEVICE.type == "cuda",
        )
        self.peak, self.average, self.steps = peak, average, 0
        self.averaged = [p.detach().clone() for p in self.parameters]

    def step(self, loss: torch.Tensor, rate: float) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * rate
        self.optimizer.step()
        self.steps += 1
        keep = min(self.average, self.steps / (self.steps + 9))
        torch._foreach_lerp_(self.averaged, [p.detach() for p in self.parameters], 1 - keep)

    @torch.no_grad()
    def use_average(self) -> None:
        for parameter, average in zip(self.parameters, self.averaged):
            parameter.copy_(average)

    def state_dict(self) -> dict:
        return {
            "parameters": self.parameters,
            "averaged": self.averaged,
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        for name in ("parameters", "averaged"):
            torch._foreach_copy_(getattr(self, name), state[name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


class Clock:
    """Trains for `seconds`: warm-up over the first steps, then a cosine down to zero.

    With a file for its state, a training that was stopped goes on from there, a minute back at
    most.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        trainer: Trainer,
        *,
        state: Path | None = None,
        warmup: int = 200,
    ):
        self.name, self.seconds, self.warmup = name, seconds, warmup
        self.trainer, self.state = trainer, state
        self._losses: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[float]:
        """Yields the learning rate of each step as a share of its peak."""
        shown = saved = before = self._take_up()
        start = time.monotonic() - before
        while (elapsed := time.monotonic() - start) < self.seconds:
            if elapsed - shown >= max(10.0, self.seconds / 20) and self._losses:
                shown = elapsed
                self._show(elapsed)
            if self.state and elapsed - saved >= SAVE_EVERY:
                saved = elapsed
                save({"elapsed": elapsed, "trainer": self.trainer.state_dict()}, self.state)
            falling = 0.5 * (1 + math.cos(math.pi * elapsed / self.seconds))
            yield max(falling, 0.01) * min(1.0, (self.trainer.steps + 1) / self.warmup)

    def note(self, *losses: torch.Tensor) -> None:
        self._losses.append(torch.stack([loss.detach().float() for loss in losses]))

    def forget(self) -> None:
        """To be called when what was trained is saved."""
        if self.state:
            self.state.unlink(missing_ok=True)

    def _take_up(self) -> float:
        """The seconds trained in earlier runs."""
        if self.state is None or not self.state.exists():
            return 0.0
        kept = torch.load(self.state, map_location=DEVICE)
        self.trainer.load_state_dict(kept["trainer"])
        print(f"{self.name}: goes on after {kept['elapsed']:.0f} s", flush=True)
        return kept["elapsed"]

    def _show(self, elapsed: float) -> None:
        loss = torch.stack(self._losses).mean(0).tolist()
        self._losses.clear()
        print(
            f"{self.name}: {elapsed:.0f} of {self.seconds:.0f} s, step {self.trainer.steps}, "
            f"loss {' '.join(f'{value:.4f}' for value in loss)}",
            flush=True,
        )


def wait_for(path: Path) -> Path:
    """A file or folder that another part is still making."""
    while not path.exists():
        time.sleep(0.2)
    return path


def save(values: dict, path: Path) -> None:
    """In one go, for those who wait for it."""
    torch.save(values, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)
