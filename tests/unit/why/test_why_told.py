"""What is told beside the stops: finished losses, terms of a sum, memory of the graph, text and JSON."""

import io
import json
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import checkpoint

import anybatch
import versions
from anybatch import Paths

X = torch.linspace(-1.0, 1.0, 24).reshape(8, 3)


def net_of_two() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(3, 4)})


def test_a_finished_loss_tells_what_is_reached_and_how_to_learn_more() -> None:
    net: Any = net_of_two()
    net["b"].bias.requires_grad_(False)
    loss = net["a"](X).sum() + net["b"](X).detach().sum()
    paths = anybatch.why(loss, net)
    assert paths.reached == ("a.weight", "a.bias")
    assert {name: stop.op for name, stop in paths.stopped.items()} == {
        "b.weight": "unknown",
        "b.bias": "requires_grad",
    }
    assert not paths.followed
    assert "anybatch.why(lambda: loss_fn(model, batch), model)" in paths.notes[0]
    assert [term.has_gradient for term in paths.terms] == [True, False]
    assert not anybatch.why(net["a"](X).sum(), net["a"]).notes


def test_a_finished_loss_without_a_graph() -> None:
    net: Any = nn.Linear(3, 4)
    assert "no graph at all" in anybatch.why(net(X).sum().detach(), net).stopped["weight"].message
    with torch.inference_mode():
        assert anybatch.why(net(X).sum(), net).stopped["weight"].op == "inference_mode"


def test_a_finished_loss_behind_a_reentrant_checkpoint_is_no_sure_answer() -> None:
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    loss = cast(torch.Tensor, checkpoint(net[1], net[0](X), use_reentrant=True)).sum()
    paths = anybatch.why(loss, net)
    assert paths.reached == ("0.weight", "0.bias")
    assert not paths.stopped["1.weight"].sure
    assert "1 reentrant checkpoints hide" in paths.notes[0]
    assert not anybatch.why(
        lambda: cast(torch.Tensor, checkpoint(net[1], net[0](X), use_reentrant=True)).sum(), net
    ).stopped


def test_a_tensor_that_is_no_leaf() -> None:
    net: Any = net_of_two()
    h, other = net["a"](X), net["b"](X)
    h.retain_grad()
    paths = anybatch.why(h.sum(), {"h": h, "other": other})
    assert paths.reached == ("h",)
    assert (paths.leaves["h"].is_leaf, paths.leaves["h"].retains_grad) == (False, True)
    assert not paths.leaves["other"].retains_grad
    assert paths.outside == ("float32[4, 3]", "float32[4]") or paths.outside == ("float32[4]", "float32[4, 3]")


def test_the_terms_of_a_sum() -> None:
    net: Any = net_of_two()

    def loss() -> Any:
        first = F.mse_loss(net["a"](X), torch.zeros(8, 4))
        second = net["b"](X).detach().abs().mean()
        total = first + 0.5 * second
        total += net["a"].weight.square().sum()
        total = (total + 0.25) / 3
        return total - net["b"].weight.abs().sum().item()

    paths = anybatch.why(loss, net)
    terms = paths.terms
    assert [term.has_gradient for term in terms] == [True, False, True, False, False]
    assert [term.op for term in terms] == ["mse_loss", "mul", "sum", "a number", "item"]
    assert [term.parameters for term in terms] == [2, 0, 1, 0, 0]
    assert [term.stopped for term in terms] == [0, 2, 0, 0, 1]
    assert [term.by for term in terms] == ["", "detach", "", "", "item"]
    assert paths.constants == (terms[1], *terms[3:])
    assert terms[0].value == pytest.approx(F.mse_loss(net["a"](X), torch.zeros(8, 4)).item())
    assert terms[3].value == 0.25
    assert terms[1].line == terms[0].line + 2
    assert len({term.line for term in terms}) == 5


def test_a_sum_that_is_written_in_place() -> None:
    weight = nn.Parameter(torch.full((), 3.0))

    def loss() -> Any:
        total = weight * 2
        total += 4 * weight.detach()
        return total

    terms = anybatch.why(loss, {"weight": weight}).terms
    assert [(term.value, term.has_gradient) for term in terms] == [(6.0, True), (12.0, False)]


@pytest.mark.parametrize("way", ["stack", "sum", "mean of many"])
def test_terms_in_a_list(way: str) -> None:
    net: Any = net_of_two()

    def loss() -> Any:
        parts = [net["a"](X).sum(), net["b"](X).sum().detach(), net["b"].bias.sum()]
        if way == "sum":
            return cast(torch.Tensor, sum(parts))
        return torch.stack(parts).sum() if way == "stack" else torch.stack(parts).mean() * 2

    assert [term.has_gradient for term in anybatch.why(loss, net).terms] == [True, False, True]
    of_tensor = [term.has_gradient for term in anybatch.why(loss(), net).terms]
    assert of_tensor.count(True) == 2
    assert of_tensor.count(False) == (2 if way == "sum" else 1)  # the graph has the 0 that Python's sum begins with


def test_a_long_sum_is_not_told_term_by_term() -> None:
    weight = nn.Parameter(torch.ones(()))

    def loss() -> Any:
        total = weight * 1
        for _ in range(2000):
            total = total + weight * 2
        return total

    paths = anybatch.why(loss, {"weight": weight})
    assert paths.reached == ("weight",)
    assert 1 < len(paths.terms) <= 100
    assert not anybatch.why(loss(), {"weight": weight}).stopped


def test_a_product_of_losses_is_no_sum() -> None:
    net: Any = net_of_two()
    paths = anybatch.why(lambda: (net["a"](X).sum() + 1) * net["b"](X).sum(), net)
    assert paths.terms == ()


@versions.saved_tensors
def test_what_the_graph_keeps() -> None:
    net: Any = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 32), nn.Sigmoid())
    kept = anybatch.why(lambda: net(X).sum(), net).kept
    assert kept is not None
    assert dict(kept.modules) == {"3": 8 * 32 * 4, "1": 8 * 16 * 4, "0": 8 * 3 * 4}
    assert kept.bytes == sum(kept.modules.values())
    assert (kept.biggest[0].op, kept.biggest[0].shape, kept.biggest[0].dtype) == (
        "SigmoidBackward0",
        (8, 32),
        "float32",
    )
    assert list(kept.modules) == ["3", "1", "0"]
    of_tensor = anybatch.why(net(X).sum(), net).kept
    assert of_tensor is not None
    assert of_tensor.bytes == kept.bytes
    assert not of_tensor.modules


@versions.saved_tensors
def test_what_a_checkpoint_packed_is_counted_without_running_it() -> None:
    net: Any = nn.Sequential(nn.Linear(3, 16), nn.Tanh())
    runs = 0

    def run(x: torch.Tensor) -> Any:
        nonlocal runs
        runs += 1
        return cast(torch.Tensor, net(x))

    loss = cast(torch.Tensor, checkpoint(run, X, use_reentrant=False)).sum()
    kept = anybatch.why(loss, net).kept
    assert kept is not None
    assert (runs, kept.bytes) == (1, 0)
    assert kept.packed >= 2


def full() -> Paths:
    net: Any = net_of_two()
    net["unused[red]"] = nn.Linear(2, 2)

    def loss() -> Any:
        return (net["a"](X) + net["b"](X).detach()).sum() + X.sum()

    return anybatch.why(loss, net)


def test_the_text() -> None:
    lines = str(full()).splitlines()
    assert lines[0] == "The loss reaches 2 of 6 parameters (16 of 38 elements)"
    assert lines[1] == "├── reached: a.* (2)"
    assert lines[2].startswith("├── stopped by detach, test_why_told.py:")
    assert lines[3:5] == ["│   ├── parameters: b.* (2)", "│   └── last with a graph: linear in b"]
    assert "├── stopped by unused in unused[red]" in lines
    assert any("a constant for autograd" in line for line in lines)


def test_the_tree_for_rich_has_the_same_words() -> None:
    paths = full()
    console = Console(file=io.StringIO(), width=300, force_terminal=False)
    console.print(paths)
    assert cast(io.StringIO, console.file).getvalue().split() == str(paths).split()


def test_json_and_back() -> None:
    paths = full()
    values = json.loads(json.dumps(paths.to_dict(), allow_nan=False))
    assert Paths.from_dict(values) == paths
    assert values["reached"] == ["a.weight", "a.bias"]
    net: Any = nn.Linear(3, 1)
    infinite = anybatch.why(lambda: net(X).sum() + torch.tensor(float("inf")), net)
    assert json.loads(json.dumps(infinite.to_dict(), allow_nan=False))["terms"][1]["value"] is None


def test_models_of_every_form() -> None:
    net: Any = net_of_two()
    loss = net["a"](X).sum()
    assert anybatch.why(loss, [net["a"], net["b"]]).reached == ("0.weight", "0.bias")
    assert anybatch.why(loss, {"x": net["a"], "w": net["b"].weight}).reached == ("x.weight", "x.bias")
    assert anybatch.why(loss, net.named_parameters()).reached == ("a.weight", "a.bias")


def test_what_torchscript_hides_is_not_guessed() -> None:
    scripted = torch.jit.script(nn.Linear(3, 2))
    net: Any = nn.ModuleDict({"scripted": scripted, "head": nn.Linear(2, 1)})
    paths = anybatch.why(lambda: net["head"](net["scripted"](X).detach()).sum(), net)
    assert paths.reached == ("head.weight", "head.bias")
    assert paths.stopped["scripted.weight"].op in ("unknown", "detach")
    assert not anybatch.why(lambda: net["head"](net["scripted"](X)).sum(), net).stopped
