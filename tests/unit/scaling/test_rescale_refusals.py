"""What rescaling refuses, before anything is changed."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, RMSprop, lr_scheduler

import anybatch
from anybatch.scaling.batchsize import rescale
from test_rescale import facts, parameters


def scheduled() -> SGD:
    optimizer = SGD(parameters(), lr=0.1)
    lr_scheduler.StepLR(optimizer, 5)
    return optimizer


class Unknown:
    """A scheduler whose learning rates lie nobody knows where."""

    def step(self) -> None:
        """Does nothing."""


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "no pair": (lambda: SGD(parameters(), lr=0.1), {"batch": 64}, "old and the new"),
    "three": (lambda: SGD(parameters(), lr=0.1), {"batch": (1, 2, 3)}, "old and the new"),
    "zero": (lambda: SGD(parameters(), lr=0.1), {"batch": (0, 64)}, "positive"),
    "infinite": (lambda: SGD(parameters(), lr=0.1), {"batch": (1, math.inf)}, "positive"),
    "a flag": (lambda: SGD(parameters(), lr=0.1), {"batch": (True, 64)}, "old and the new"),
    "rule": (lambda: SGD(parameters(), lr=0.1), {"rule": "cubic"}, "expected one of"),
    "decay": (lambda: SGD(parameters(), lr=0.1), {"weight_decay": 0.1}, "expected one of"),
    "momentum": (lambda: SGD(parameters(), lr=0.1), {"momentum_buffer": 2}, "True or False"),
    "SGD has no betas": (lambda: SGD(parameters(), lr=0.1), {"rule": "adam-sde"}, "SGD does not have"),
    "nor a half-life": (lambda: RMSprop(parameters(), lr=0.1), {"rule": "half-life"}, "RMSprop does not have"),
    "beyond the rule": (lambda: Adam(parameters()), {"batch": (8, 80), "rule": "adam-sde"}, "up to a batch 10 times"),
    "LBFGS": (lambda: torch.optim.LBFGS(parameters()), {}, "its own line search"),
    "a scheduler": (scheduled, {}, "scheduler=scheduler"),
    "an unknown scheduler": (lambda: SGD(parameters(), lr=0.1), {"scheduler": Unknown()}, "not known"),
    "no scheduler": (lambda: SGD(parameters(), lr=0.1), {"scheduler": 5}, "step"),
    "no rate": (lambda: torch.optim.Adafactor(parameters(), lr=0.1), {"rule": "adam-sde"}, "Adafactor does not have"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_and_nothing_changes(case: str) -> None:
    make, options, said = REFUSED[case]
    optimizer = make()
    before = facts(optimizer)
    with pytest.raises(anybatch.BatchError, match=said):
        rescale(optimizer, **{"batch": (64, 512), **options})
    assert facts(optimizer) == before


def test_the_scheduler_of_another_optimizer_is_refused() -> None:
    other = scheduled()
    with pytest.raises(anybatch.BatchError, match="another optimizer"):
        rescale(SGD(parameters(), lr=0.1), (64, 512), scheduler=lr_scheduler.StepLR(other, 5))


def test_no_scheduler_any_more() -> None:
    optimizer = scheduled()
    rescale(optimizer, (64, 128), scheduler=())
    assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["initial_lr"] == 0.2
