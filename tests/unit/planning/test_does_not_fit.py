"""What is said where nothing fits: why nothing is split, and only what helps, with the bytes that it then takes.

Each way that is printed is done literally, and then the plan is made, and the step stays within the budget.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.planning import advice
from anybatch.units import parse_bytes


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip


def rows() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16))


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], Callable[..., Any], str]] = {
    "batch norm": (
        pictures, {"x": torch.randn(128, 1, 8, 8), "y": torch.randint(10, (128,))}, torch.optim.Adam, "2MiB",
    ),
    "Adam": (rows, {"x": torch.randn(24, 32), "y": torch.randint(16, (24,))}, torch.optim.Adam, "90KiB"),
    "SGD": (rows, {"x": torch.randn(24, 32), "y": torch.randint(16, (24,))}, torch.optim.SGD, "62KiB"),
}  # fmt: skip
WAY = re.compile(r"(batch_norm=\"\w+\"|autocast=torch\.\w+|torch\.optim\.SGD without momentum|"
                 r"anybatch\.freeze\(model, \"[^\"]+\"\)) needs ([\d.]+ \w+)")  # fmt: skip


@pytest.mark.parametrize("memory", [8, "8"])
def test_a_budget_of_few_bytes_is_said_to_have_no_unit(memory: Any) -> None:
    model = rows()
    with pytest.raises(anybatch.DoesNotFit, match=r'a number without a unit is in bytes; did you mean "8GiB"\?'):
        anybatch.plan(model, loss_fn, CASES["SGD"][1], torch.optim.SGD(model.parameters()), memory=memory)


def refused(name: str) -> anybatch.DoesNotFit:
    make, batch, optimizer, memory = CASES[name]
    torch.manual_seed(0)
    model = make()
    with pytest.raises(anybatch.DoesNotFit) as error:
        anybatch.plan(model, loss_fn, batch, optimizer(model.parameters(), lr=0.01), memory=memory)
    return error.value


def ways_of(error: anybatch.DoesNotFit) -> list[tuple[str, str]]:
    text = str(error)
    assert "These were planned, and fit: " in text
    return WAY.findall(text.partition("These were planned, and fit: ")[2])


@pytest.mark.parametrize("name", CASES)
def test_each_way_that_is_said_to_fit_does(name: str) -> None:
    make, batch, kind, memory = CASES[name]
    ways = ways_of(refused(name))
    assert ways
    for way, _ in ways:
        torch.manual_seed(0)
        model = make()
        options: dict[str, Any] = {}
        if way.startswith("torch.optim.SGD"):
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        else:
            optimizer = kind(model.parameters(), lr=0.01)
        if way.startswith("batch_norm"):
            options["batch_norm"] = way.split('"')[1]
        elif way.startswith("autocast"):
            options["autocast"] = torch.bfloat16
        elif way.startswith("anybatch.freeze"):
            anybatch.freeze(model, way.split('"')[1])
        step = anybatch.TrainStep(model, loss_fn, optimizer, memory=memory, verify="off", **options)
        for _ in range(3):
            taken = anybatch.measure(functools.partial(step, batch), model=model, optimizer=optimizer, batch=batch)
            assert taken.peak_bytes <= parse_bytes(memory), way


def test_ways_that_no_time_is_left_for_are_named_as_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_PATIENCE", -1.0)
    said = str(refused("Adam"))
    assert "Not planned, for lack of time: " in said
    assert "torch.optim.SGD without momentum" in said
    assert "of what was planned" not in said
    assert "These were planned" not in said


def test_batch_norm_is_named_where_it_is_why_nothing_is_split() -> None:
    text = str(refused("batch norm"))
    assert "The batch is not split, since 1, 4 (2 BatchNorm2d) are in training mode" in text
    assert [way for way, _ in ways_of(refused("batch norm"))][:2] == ['batch_norm="ghost"', 'batch_norm="frozen"']
    assert "BatchNorm" not in str(refused("Adam"))


def test_an_optimizer_without_state_is_not_told_to_have_less() -> None:
    text = str(refused("SGD"))
    assert "SGD" not in text
    assert "less state" not in text
    make, batch, kind, _ = CASES["SGD"]
    model = make()
    plan = anybatch.plan(model, loss_fn, batch, kind(model.parameters(), lr=0.1), memory="1MiB")
    assert "less state" not in plan.binding


def test_what_does_not_help_enough_is_not_said_to_fit() -> None:
    make, batch, kind, _ = CASES["batch norm"]
    model = make()
    weights = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(anybatch.DoesNotFit, match="Smaller samples or a smaller model are needed") as error:
        anybatch.plan(model, loss_fn, batch, kind(model.parameters(), lr=0.1), memory="120KiB")
    assert "and fit" not in str(error.value)
    assert error.value.needed is not None
    for _, size in WAY.findall(str(error.value)):
        assert parse_bytes("120KiB") < parse_bytes(size.replace(" ", "")) < error.value.needed
    assert weights == [parameter.requires_grad for parameter in model.parameters()]
    assert all(module.training for module in model.modules())


def test_a_single_sample_is_named() -> None:
    model = rows()
    batch = {"x": torch.randn(1, 32), "y": torch.randint(16, (1,))}
    with pytest.raises(anybatch.DoesNotFit, match="one sample, which is not split"):
        anybatch.plan(model, loss_fn, batch, torch.optim.SGD(model.parameters(), lr=0.1), memory="1KiB")


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.rnn(x)[0])
        return found


def test_chunks_of_time_are_named_where_a_recurrent_net_can_take_them() -> None:
    batch = {"x": torch.randn(4, 256, 8), "y": torch.randint(8, (4, 256))}

    def tagging(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    def chunk_loss(model: Any, chunk: Any, state: Any) -> tuple[Tensor, Tensor]:
        output, state = model.rnn(chunk["x"], state)
        return F.cross_entropy(model.head(output).flatten(0, 1), chunk["y"].flatten()), state

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(anybatch.DoesNotFit, match=r"in chunks of time, anybatch\.OverTime.* none of these was tried"):
        anybatch.plan(model, tagging, batch, optimizer, memory="200KiB")
    over_time = anybatch.OverTime(chunk_loss, lambda model, batch: torch.zeros(1, len(batch["x"]), 32))
    step = anybatch.TrainStep(model, over_time, optimizer, memory="200KiB")
    for _ in range(3):
        taken = anybatch.measure(functools.partial(step, batch), model=model, optimizer=optimizer, batch=batch)
        assert taken.peak_bytes <= parse_bytes("200KiB")
    model.rnn = nn.GRU(8, 16, batch_first=True, bidirectional=True)  # which goes through no chunks
    with pytest.raises(anybatch.DoesNotFit, match="none of these was tried") as error:
        anybatch.plan(model, tagging, batch, torch.optim.Adam(model.parameters()), memory="200KiB")
    assert "OverTime" not in str(error.value)
