"""The page of error messages quotes what torch and anybatch really say."""

import copy
import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import anybatch
from anybatch.doctor.rules.registry import all_rules
from source_tree import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r'^### "(.+?)"', PAGE, re.MULTILINE)

ELSEWHERE = {
    "CUDA out of memory": "needs a GPU",
    "Torch not compiled with CUDA enabled": "depends on the build of torch",
    "CUDA error: device-side assert triggered": "needs a GPU",
    "Expected all tensors to be on the same device": "needs a GPU",
    "Expected to have finished reduction in the prior iteration": "needs two processes",
    "Expected to mark a variable ready only once": "needs two processes",
    "DataLoader worker (pid(s) ...) exited unexpectedly": "needs a worker that dies",
}
"""What no test raises here, and why."""

x = torch.randn(4, 3)


def leaf_of(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True)


def twice() -> None:
    loss = x.clone().requires_grad_().square().sum()
    loss.backward()
    loss.backward()


def overwritten() -> None:
    result = torch.ones(2, requires_grad=True).exp()
    result += 1
    result.sum().backward()


def leaf() -> None:
    weight = torch.ones(2, requires_grad=True)
    weight += 1


def inference() -> None:
    with torch.inference_mode():
        factor = torch.ones(2)
    (torch.ones(2, requires_grad=True) * factor).sum().backward()


def second_derivative() -> None:
    scores = torch.randn(4, 1, 3, requires_grad=True)
    loss = F.ctc_loss(scores.log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]))
    (gradient,) = torch.autograd.grad(loss, scores, create_graph=True)
    gradient.sum().backward()


def stepped(scale: bool = True, unscalings: int = 0, half: bool = False, step: bool = False) -> None:
    layer = nn.Linear(3, 2, dtype=torch.float16 if half else torch.float32)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaled = scaler.scale(layer(x.to(layer.weight.dtype)).sum())
    if scale:
        scaled.backward()
    for _ in range(unscalings):
        scaler.unscale_(optimizer)
    if step:
        scaler.step(optimizer)


def stepped_twice() -> None:
    layer, scaler = nn.Linear(3, 2), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(x).sum()).backward()
    scaler.step(optimizer)
    scaler.step(optimizer)


def never_scaled() -> None:
    torch.amp.GradScaler("cpu").step(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1))


class Unmade(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(3, 2)


class Counting(nn.Module):
    calls = 0

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return given.exp() if self.calls % 2 else given * 1


def checkpointed(part: nn.Module, given: torch.Tensor, reentrant: bool) -> None:
    torch.utils.checkpoint.checkpoint(part, given, use_reentrant=reentrant).sum().backward()


def sparse() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = torch.optim.Adam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    optimizer.step()


def past_the_end() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=2)
    for _ in range(3):
        optimizer.step()
        scheduler.step()


def two_groups() -> None:
    layer = nn.Linear(3, 2)
    torch.optim.SGD([{"params": layer.parameters()}, {"params": layer.parameters()}], lr=0.1)


def schedule_first() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1).step()


def too_little_memory() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    anybatch.plan(model, lambda model, batch: model(batch["x"]).mean(), {"x": x}, optimizer, memory=100)


RAISED: dict[str, Callable[[], object]] = {
    "DefaultCPUAllocator: can't allocate memory": lambda: torch.empty(10**15),
    "nothing fits into 8 GiB": too_little_memory,
    "Trying to backward through the graph a second time": twice,
    "one of the variables needed for gradient computation has been modified by an inplace operation": overwritten,
    "a leaf Variable that requires grad is being used in an in-place operation": leaf,
    "element 0 of tensors does not require grad and does not have a grad_fn": lambda: x.sum().backward(),
    "grad can be implicitly created only for scalar outputs": lambda: nn.Linear(3, 2)(x).backward(),
    "Can't call numpy() on Tensor that requires grad": lambda: nn.Linear(3, 2)(x).numpy(),
    "Inference tensors cannot be saved for backward": inference,
    "derivative for ... is not implemented": second_derivative,
    "appears to not have been used in the graph": lambda: torch.autograd.grad(leaf_of(1.0), leaf_of(1.0)),
    "Only Tensors created explicitly by the user": lambda: copy.deepcopy(leaf_of(1.0) * 2),
    "None of the inputs have requires_grad=True": lambda: checkpointed(nn.Linear(3, 2), x, True),
    "A different number of tensors was saved during the original forward and recomputation": lambda: checkpointed(
        Counting(), x.clone().requires_grad_(), False
    ),
    "mat1 and mat2 shapes cannot be multiplied": lambda: nn.Linear(4, 2)(x),
    "The size of tensor a (3) must match the size of tensor b (4)": lambda: x + torch.ones(4, 4),
    "mat1 and mat2 must have the same dtype": lambda: nn.Linear(3, 2)(x.double()),
    "expected target dtype to be Long": lambda: F.cross_entropy(x, torch.rand(4)),
    "Using a target size ... that is different to the input size": lambda: F.mse_loss(x[:, :1], torch.rand(4)),
    "index out of range in self": lambda: nn.Embedding(3, 2)(torch.tensor([3])),
    "Target 7 is out of bounds": lambda: F.cross_entropy(x, torch.tensor([7, 0, 0, 0])),
    "Expected parameter scale ... to satisfy the constraint": lambda: torch.distributions.Normal(
        x, x - 10, validate_args=True
    ),
    "cannot assign module before Module.__init__() call": Unmade,
    "Expected more than 1 value per channel when training": lambda: nn.BatchNorm1d(3)(x[:1]),
    "stack expects each tensor to be equal size": lambda: torch.utils.data.default_collate([x[0], x[0, :2]]),
    "optimizer got an empty parameter list": lambda: torch.optim.SGD([], lr=0.1),
    "can't optimize a non-leaf Tensor": lambda: torch.optim.SGD([x.clone().requires_grad_() * 2], lr=0.1),
    "some parameters appear in more than one parameter group": two_groups,
    "unscale_() has already been called on this optimizer since the last update()": lambda: stepped(unscalings=2),
    "step() has already been called since the last update()": stepped_twice,
    "Attempted step but _scale is None": never_scaled,
    "No inf checks were recorded for this optimizer": lambda: stepped(scale=False, step=True),
    "Attempting to unscale FP16 gradients": lambda: stepped(unscalings=1, half=True),
    "Adam does not support sparse gradients": sparse,
    "Tried to step 101 times": past_the_end,
    "Detected call of `lr_scheduler.step()` before `optimizer.step()`": schedule_first,
    "Error(s) in loading state_dict": lambda: nn.Linear(3, 2).load_state_dict({}),
    "is not the whole batch's": lambda: anybatch.backward(
        nn.Linear(3, 2), lambda model, batch: model(batch["x"]).sum(), {"x": x}, micro_batch_size=2
    ),
    "has 31 rows, ... has 32": lambda: anybatch.backward(
        nn.Linear(3, 2), lambda model, batch: model(batch["x"]).mean(), {"x": x, "mask": x[:3]}, micro_batch_size=2
    ),
}


def test_every_quoted_message_is_known() -> None:
    assert sorted(QUOTED) == sorted([*RAISED, *ELSEWHERE])


@pytest.mark.parametrize("text", RAISED)
def test_the_message_is_raised(text: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = ""
        try:
            RAISED[text]()
        except (RuntimeError, ValueError, AssertionError, IndexError, AttributeError, anybatch.AnyBatchError) as error:
            said = str(error)
        said = " ".join([*(str(one.message) for one in caught), said])
    parts = [re.escape(part) for part in re.sub(r"\d+( GiB)?", "#", text).split("...")]
    pattern = ".*".join(parts).replace(r"\#", r"[\d.]+( [KMGT]?i?B)?")
    pattern = pattern.replace(
        r"target\ dtype\ to\ be\ Long", "(target dtype to be|scalar type) Long"
    )  # before torch 2.13
    assert re.search(pattern, said, re.DOTALL), said


def entries() -> dict[str, list[str]]:
    """By quoted message the codes of the findings that its entry links."""
    parts = re.split(r"^#{2,3} ", PAGE, flags=re.MULTILINE)
    found = {}
    for part in parts:
        quoted = re.match(r'"(.+?)"', part)
        codes = re.findall(r"findings/(AB\d{3})\.md", part)
        if quoted and codes:
            found[quoted[1]] = codes
    return found


@pytest.mark.parametrize("text", entries())
def test_a_message_leads_to_a_finding_that_quotes_it(text: str) -> None:
    rules = {rule.code: rule for rule in all_rules().values()}
    searched = max(re.split(r"\.\.\.|\d+", text), key=len).strip().casefold()
    for code in entries()[text][:1]:
        assert searched in " ".join(rules[code].page.split()).casefold(), code
