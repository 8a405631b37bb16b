# SPDX-License-Identifier: Apache-2.0
"""What the training loops share: a schedule by the clock, averaged weights, a device."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast():
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda")


class Clock:
    """Trains for `seconds`: warm-up over the first steps, then a cosine down to zero."""

    def __init__(self, name: str, seconds: float, warmup: int = 200):
        self.name, self.seconds, self.warmup = name, seconds, warmup
        self.step = 0

    def __iter__(self) -> Iterator[float]:
        """Yields the learning rate of each step as a share of its peak."""
        start, shown = time.monotonic(), 0.0
        self._losses: list[torch.Tensor] = []
        while (elapsed := time.monotonic() - start) < self.seconds:
            if elapsed - shown >= max(10.0, self.seconds / 20) and self._losses:
                shown = elapsed
                loss = torch.stack(self._losses).mean(0).tolist()
                self._losses.clear()
                text = " ".join(f"{value:.4f}" for value in loss)
                print(
                    f"{self.name}: {elapsed:.0f} of {self.seconds:.0f} s, step {self.step}, "
                    f"loss {text}",
                    flush=True,
                )
            falling = 0.5 * (1 + math.cos(math.pi * elapsed / self.seconds))
            yield max(falling, 0.01) * min(1.0, (self.step + 1) / self.warmup)
            self.step += 1

    def note(self, *losses: torch.Tensor) -> None:
        self._losses.append(torch.stack([loss.detach().float() for loss in losses]))


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


def wait_for(path: Path) -> Path:
    """A file that another part is still making."""
    while not path.exists():
        time.sleep(0.2)
    return path


def save(values: dict, path: Path) -> None:
    """In one go, for those who wait for it."""
    torch.save(values, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)
