"""A training of the shapes checkpoint that was stopped goes on from where it was."""

import sys
from pathlib import Path

import pytest
import torch

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(str(SHAPES))
    import training

    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(training, "DEVICE", torch.device("cpu"))
    yield training
    sys.modules.pop("training")


def make(training, path):
    torch.manual_seed(0)
    trainer = training.Trainer([torch.nn.Linear(4, 1)], peak=0.01)
    return trainer, training.Clock("part", 3600.0, trainer, state=path)


def train(trainer, clock, steps: int) -> None:
    random = torch.Generator().manual_seed(trainer.steps)
    for rate in clock:
        if trainer.steps == steps:
            return  # as if killed: the state has been saved before this step
        weight, bias = trainer.parameters
        loss = (torch.randn(8, 4, generator=random) @ weight.T + bias - 1).square().mean()
        trainer.step(loss, rate)
        clock.note(loss)


def tensors(trainer) -> list[torch.Tensor]:
    moments = trainer.optimizer.state_dict()["state"].values()
    return [*trainer.parameters, *trainer.averaged, *(t for m in moments for t in m.values())]


def test_goes_on_after_a_stop(training, tmp_path):
    trainer, clock = make(training, tmp_path / "part.state")
    train(trainer, clock, 5)
    again, clock_again = make(training, tmp_path / "part.state")
    rate = next(iter(clock_again))
    assert again.steps == 5
    assert 0 < rate == pytest.approx(6 / clock.warmup, rel=1e-3), "the warm-up goes on too"
    assert all(map(torch.equal, tensors(again), tensors(trainer)))
    train(again, clock_again, 9)
    assert again.steps == 9
    clock_again.forget()
    assert make(training, tmp_path / "part.state")[0].steps == 0
    assert not list(tmp_path.iterdir())


def test_the_clock_counts_what_was_trained_before(training, tmp_path):
    trainer, _ = make(training, None)
    state = tmp_path / "part.state"
    training.save({"elapsed": 10.0, "trainer": trainer.state_dict()}, state)
    assert not list(training.Clock("part", 9.0, trainer, state=state))
