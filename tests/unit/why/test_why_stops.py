"""Every way in which a path to the loss can end is named, with the operation, the module and the line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch import Paths

X = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)
Cut = Callable[["Net", torch.Tensor], torch.Tensor]


class Middle(nn.Module):
    """Applies a function within a module, so that there is one to name."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, net: "Net", h: torch.Tensor) -> Any:
        return self.cut(net, h)


class Net(nn.Module):
    """An encoder, something in the middle, and a decoder."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.middle = Middle(cut)
        self.decoder = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return cast(torch.Tensor, self.decoder(self.middle(self, self.encoder(x))))

    def loss(self) -> Any:
        return self(X).square().mean()


def line_with(text: str) -> int:
    """Returns the number of the only line of this file that ends with a text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return found


def asked(net: Net) -> Paths:
    return anybatch.why(net.loss, net)


def detach(net: Net, h: torch.Tensor) -> Any:
    return h.detach() * 2  # at detach


def detach_(net: Net, h: torch.Tensor) -> torch.Tensor:
    h = h + 1
    return h.detach_()  # at detach_


def data(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h.data + 1  # at data


def set_data(net: Net, h: torch.Tensor) -> torch.Tensor:
    other = torch.zeros(4, 5)
    other.data = h * 2  # at set_data
    return other


def no_grad(net: Net, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # switched off
        return h * 2  # at no_grad


def grad_mode(net: Net, h: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(False):
        return F.relu(h)  # at grad_mode


def inference(net: Net, h: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        h = h * 2  # at inference
    return h.clone()


def argmax(net: Net, h: torch.Tensor) -> torch.Tensor:
    return F.one_hot(h.argmax(-1), 5).float()  # at argmax


def compared(net: Net, h: torch.Tensor) -> torch.Tensor:
    return (h > 0).float()  # at compared


def rounded_to_int(net: Net, h: torch.Tensor) -> torch.Tensor:
    return (h * 10).long().float()  # at rounded_to_int


def topk_indices(net: Net, h: torch.Tensor) -> torch.Tensor:
    _, places = h.topk(5)
    return places.float()  # at topk_indices


def copied_to(net: Net, h: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(4, 5)
    with torch.no_grad():
        buffer.copy_(h)  # at copied_to
    return buffer


def set_item(net: Net, h: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(6, 5)
    with torch.no_grad():
        buffer[1:5] = h  # at set_item
    return buffer[1:5]


def through_view(net: Net, h: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(6, 5)
    view = buffer[1:5]
    view.copy_(h.detach())  # at through_view
    return buffer[:4]


def through_base(net: Net, h: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(6, 5)
    view = buffer[1:5]
    buffer[:4] = h.detach()  # at through_base
    return view


def out(net: Net, h: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(4, 5)
    with torch.no_grad():
        torch.mul(h, 2, out=buffer)  # at out
    return buffer


def parameter(net: Net, h: torch.Tensor) -> torch.Tensor:
    made = nn.Parameter(h * 2)
    return made + 1  # at parameter


def item(net: Net, h: torch.Tensor) -> torch.Tensor:
    number = (h.sum() / 3).item()  # at item
    return torch.tensor([[number] * 5] * 4)


def as_factor(net: Net, h: torch.Tensor) -> Any:
    number = float((h.detach().sum() / 3).item())  # at as_factor
    return X @ torch.ones(3, 5) * number


def tolist(net: Net, h: torch.Tensor) -> torch.Tensor:
    numbers = h.tolist()  # at tolist
    return torch.tensor(numbers)


def numpy(net: Net, h: torch.Tensor) -> torch.Tensor:
    array = h.detach().numpy()  # at numpy
    return torch.from_numpy(array) * 2


def numpy_copied(net: Net, h: torch.Tensor) -> torch.Tensor:
    array = np.asarray(h.detach())  # at numpy_copied
    return torch.tensor(array.copy())


class Closed(torch.autograd.Function):
    """Reads what it was not given."""

    read: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x + Closed.read  # at function

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def function(net: Net, h: torch.Tensor) -> Any:
    Closed.read = h
    given = torch.zeros(4, 5, requires_grad=True)
    try:
        return cast(torch.Tensor, cast(Any, Closed).apply(given))
    finally:
        Closed.read = None


CUTS: dict[Cut, str] = {
    detach: "detach", detach_: "detach_", data: "data", set_data: "data", no_grad: "no_grad", grad_mode: "no_grad",
    inference: "inference_mode", argmax: "argmax", compared: "gt", rounded_to_int: "long", copied_to: "no_grad",
    set_item: "no_grad", through_view: "detach", through_base: "detach", out: "no_grad", parameter: "Parameter",
    item: "item", as_factor: "detach", tolist: "tolist", numpy: "detach", numpy_copied: "detach", function: "Closed",
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
def test_the_operation_that_ends_the_path_is_named(cut: Cut) -> None:
    net: Any = Net(cut)
    paths = asked(net)
    assert paths.reached == ("decoder.weight", "decoder.bias")
    for name in ("encoder.0.weight", "encoder.0.bias"):
        stop = paths.stopped[name]
        assert (stop.op, stop.module, Path(stop.file).name) == (CUTS[cut], "middle", "test_why_stops.py")
        assert stop.line == line_with(f"at {cut.__name__}")
        assert stop.sure
        assert stop.after
        assert not stop.others


def test_where_gradients_were_switched_off_is_said() -> None:
    stop = asked(Net(no_grad)).stopped["encoder.0.weight"]
    assert f"test_why_stops.py:{line_with('switched off')}" in stop.message


def test_the_last_tensor_with_a_graph_is_named() -> None:
    assert asked(Net(detach)).stopped["encoder.0.weight"].after == "tanh in encoder.1"
    assert asked(Net(rounded_to_int)).stopped["encoder.0.bias"].after == "mul in middle"


def test_indices_beside_values_that_have_a_graph() -> None:
    stop = asked(Net(topk_indices)).stopped["encoder.0.weight"]
    assert (stop.op, stop.module) == ("topk", "middle")


def test_gradients_that_are_off_for_all() -> None:
    net: Any = Net(lambda _, h: h)
    with torch.no_grad():
        paths = asked(net)
    assert paths.reached == ()
    assert {name: (stop.op, stop.module) for name, stop in paths.stopped.items()} == {
        "encoder.0.weight": ("no_grad", "encoder.0"),
        "encoder.0.bias": ("no_grad", "encoder.0"),
        "decoder.weight": ("no_grad", "decoder"),
        "decoder.bias": ("no_grad", "decoder"),
    }


def test_a_number_whose_way_is_not_seen() -> None:
    def doubled(net: Net, h: torch.Tensor) -> Any:
        return torch.full((4, 5), h.sum().item() * 2.5)  # at doubled

    stop = asked(Net(doubled)).stopped["encoder.0.weight"]
    assert (stop.op, stop.module, stop.line, stop.sure) == ("item", "middle", line_with("at doubled"), False)


def test_a_number_that_anybody_may_write_proves_nothing() -> None:
    weight, other = nn.Parameter(torch.full((), 0.5)), nn.Parameter(torch.ones(3))

    def short() -> Any:
        weight.item()
        return (other * 0.5).sum()

    def count() -> Any:
        (weight * 6).long().item()
        return (other + torch.zeros(3)).sum()

    assert not anybatch.why(short, {"weight": weight}).stopped["weight"].sure
    assert not anybatch.why(count, {"weight": weight}).stopped["weight"].sure


def test_requires_grad_false() -> None:
    net: Any = Net(lambda _, h: h)
    net.encoder.requires_grad_(False)
    stop = asked(net).stopped["encoder.0.weight"]
    assert (stop.op, stop.module, stop.file) == ("requires_grad", "encoder.0", "")


def test_requires_grad_false_in_the_forward_has_a_line_and_is_put_back() -> None:
    def freezes(net: Net, h: torch.Tensor) -> Any:
        net.decoder.weight.requires_grad_(False)  # at freezes
        net.decoder.bias.requires_grad = False  # at freezes too
        return h

    net: Any = Net(freezes)
    paths = asked(net)
    assert paths.reached == ("encoder.0.weight", "encoder.0.bias")
    assert paths.stopped["decoder.weight"].line == line_with("at freezes")
    assert paths.stopped["decoder.bias"].line == line_with("at freezes too")
    assert net.decoder.weight.requires_grad
    assert net.decoder.bias.requires_grad


def test_modules_that_do_not_run_and_parameters_that_nobody_reads() -> None:
    net: Any = Net(lambda _, h: h)
    net.pooler = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    net.middle.scale = nn.Parameter(torch.ones(()))
    stopped = asked(net).stopped
    assert (stopped["pooler.0.weight"].op, stopped["pooler.0.weight"].module) == ("unused", "pooler")
    assert "did not run" in stopped["pooler.0.bias"].message
    assert (stopped["middle.scale"].op, stopped["middle.scale"].module) == ("unused", "middle")
    assert "ran, but nothing read it" in stopped["middle.scale"].message


def test_a_result_that_is_left_out_of_the_loss() -> None:
    def aside(net: Any, h: torch.Tensor) -> Any:
        (net.decoder(h) * 3).argmax()
        hidden = net.aux(h).relu()  # at aside
        hidden.argmax()
        return h

    net: Any = Net(aside)
    net.aux = nn.Linear(5, 1)
    paths = asked(net)
    stop = paths.stopped["aux.weight"]
    assert (stop.op, stop.module, stop.line) == ("left out", "middle", line_with("at aside"))
    assert "the last was relu" in stop.message
    assert set(paths.stopped) == {"aux.weight", "aux.bias"}


def test_two_ways_that_end_are_both_told() -> None:
    def both(net: Net, h: torch.Tensor) -> Any:
        return h.detach() + (h > 0)

    stop = asked(Net(both)).stopped["encoder.0.weight"]
    assert [one.op for one in (stop, *stop.others)] == ["detach", "gt"]


def test_one_way_of_two_is_enough_to_be_reached() -> None:
    assert not asked(Net(lambda _, h: h.detach() + h)).stopped


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_without_an_input_that_needs_gradients() -> None:
    net: Any = Net(lambda _, h: h)

    def loss() -> Any:
        h = cast(torch.Tensor, checkpoint(net.encoder, X, use_reentrant=True))
        return net.decoder(h).sum()

    paths = anybatch.why(loss, net)
    assert paths.reached == ("decoder.weight", "decoder.bias")
    stop = paths.stopped["encoder.0.weight"]
    assert (stop.op, stop.module) == ("checkpoint", "encoder.0")
    assert "use_reentrant=False" in stop.message


def test_a_cut_inside_a_reentrant_checkpoint() -> None:
    def inner(h: torch.Tensor) -> Any:
        return net.extra(h).detach() + net.decoder(h)  # at inner

    net: Any = Net(lambda _, h: cast(torch.Tensor, checkpoint(inner, h, use_reentrant=True)))
    net.extra, net.decoder = nn.Linear(5, 2), nn.Linear(5, 2)
    net.last = nn.Linear(2, 1)

    def loss() -> Any:
        return net.last(net.middle(net, net.encoder(X))).sum()

    paths = anybatch.why(loss, net)
    assert set(paths.stopped) == {"extra.weight", "extra.bias"}
    stop = paths.stopped["extra.weight"]
    assert (stop.op, stop.module, stop.line) == ("detach", "middle", line_with("at inner"))


def test_a_loss_that_is_a_number() -> None:
    net: Any = Net(lambda _, h: h)
    paths = anybatch.why(lambda: net.loss().item(), net)  # at number
    assert paths.reached == ()
    stop = paths.stopped["encoder.0.weight"]
    assert (stop.op, stop.line, stop.sure) == ("item", line_with("at number"), True)
