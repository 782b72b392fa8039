"""The story of a fine-tuning that a learning rate spoils, run to its end on a small BERT, and one that is well."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch

HOME = Path(__file__).parents[3] / "benchmarks" / "doctor"


@pytest.fixture(scope="module")
def story() -> Any:
    """The program, with fewer and shorter sentences, and its pretrained model."""
    sys.path.insert(0, str(HOME))
    try:
        module = importlib.import_module("story")
    finally:
        sys.path.remove(str(HOME))
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"WORDS": 20, "LENGTH": 5, "WIDTH": 32}.items():
            patch.setattr(module, name, size)
        torch.manual_seed(1)
        model = module.Bert()
        assert module.pretrain(model, 60) < 0.2, "it has learned its task"
        yield module, model


@pytest.mark.parametrize(("lr", "first"), [(0.1, "LR_TOO_HIGH"), (5e-5, "")])
def test_the_root_is_the_learning_rate_and_all_else_follows_from_it(story: Any, lr: float, first: str) -> None:
    module, pretrained = story
    model = copy.deepcopy(pretrained)
    torch.manual_seed(2)
    doctor = anybatch.Doctor(model)
    with doctor:
        module.finetune(model, lr, 50)
    alarms = [one for one in doctor.findings if one.severity != "info"]
    assert [one.name for one in alarms[:1]] == ([first] if first else [])
    assert {one.consequence_of for one in alarms[1:]} <= {first}
