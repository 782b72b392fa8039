"""TorchScript, whose operations no mode sees, and a program that fails only in a run of the proof.

How this could be silently wrong: weights that the forward moved stay moved, or an error is told without its line.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch


class Decayed(nn.Module):
    """Writes to its own weights in each forward, or not."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = nn.Linear(6, 4), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(self.factor)
        out: torch.Tensor = self.layer(x)
        return out.relu_()


def batch_of() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(48, 6), "y": torch.randint(4, (48,))}


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def test_weights_that_a_scripted_forward_writes_to_are_put_back() -> None:
    model: Any = torch.jit.script(Decayed(0.9))
    before = model.layer.weight.detach().clone()
    with pytest.raises(anybatch.NotSplittable, match=r"writes to layer\.weight"):
        anybatch.backward(model, loss_fn, batch_of(), micro_batch_size=6)
    assert torch.equal(model.layer.weight, before)


def test_a_scripted_forward_that_writes_what_is_there_passes() -> None:
    proof = anybatch.backward(torch.jit.script(Decayed(1.0)), loss_fn, batch_of(), micro_batch_size=6).proof
    assert proof is not None
    assert proof.exact


def test_what_fails_in_other_sizes_only_is_told_with_its_line() -> None:
    def of_six(model: Any, batch: Any) -> torch.Tensor:
        batch["x"].view(6, 6)
        return loss_fn(model, batch)

    proof = anybatch.backward(nn.Linear(6, 4), of_six, batch_of(), micro_batch_size=6).proof
    assert proof is not None
    line = of_six.__code__.co_firstlineno + 1
    assert f"(RuntimeError at test_proof_scripted.py:{line}: shape '[6, 6]' is invalid" in proof.note


@pytest.mark.parametrize(("failing", "told"), [(2, "A second run of the same"), (4, "failed with ValueError: too")])
def test_what_fails_in_a_run_of_the_proof_alone_ends_no_step_with_its_error(failing: int, told: str) -> None:
    calls = itertools.count(1)  # which nobody puts back

    def moving(model: Any, batch: Any) -> torch.Tensor:
        number = next(calls)
        if number == failing:
            raise ValueError("too often")
        return loss_fn(model, batch) * number

    with pytest.raises(anybatch.NotSplittable, match=told):
        anybatch.backward(nn.Linear(6, 4), moving, batch_of(), micro_batch_size=6)
