"""What a model is called with, and what changes beside the weights."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.doctor.recording.numbering import Numbering
from anybatch.doctor.samples.alongside import BufferSampler, TieSampler, memory
from anybatch.doctor.samples.inputs import look, some_of
from anybatch.records.lines import from_line, to_line
from anybatch.records.lossfacts import Probed
from anybatch.records.samples import InputSample


def numbered(model: nn.Module) -> Numbering:
    numbering = Numbering(lambda fact: None)
    numbering.root(model)
    return numbering


def one(tensor: torch.Tensor) -> Any:
    return look(0, (tensor,), {})[0]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.full((6,), 11), True),
        (torch.ones(300, 2), True),
        (torch.randn(1, 4).expand(5, 4), True),
        (torch.tensor([1, 2, 1]), False),
        (torch.eye(3)[[0, 0, 1, 0]], False),
        (torch.ones(1, 4), None),
        (torch.tensor(2.0), None),
    ],
)
def test_rows_that_are_all_alike_are_told(tensor: torch.Tensor, expected: bool | None) -> None:
    assert one(tensor).alike is expected


def test_figures_of_one_tensor() -> None:
    x = torch.linspace(-3, 5, 40).reshape(8, 5)
    found = one(x)
    assert (found.name, found.shape, found.dtype, found.bytes) == ("0", (8, 5), "float32", 160)
    assert found.mean == pytest.approx(1.0)
    assert found.std == pytest.approx(float(x.std(correction=0)))
    assert (found.low, found.high, found.finite, found.requires_grad) == (-3.0, 5.0, True, False)
    assert one(x.clone().requires_grad_()).requires_grad
    assert not one(x.clone().requires_grad_() * 2).requires_grad
    assert found.alike is False
    nearly_constant = one(1e4 + torch.linspace(0, 1e-6, 40, dtype=torch.float64).reshape(8, 5))
    assert nearly_constant.std == pytest.approx(2.96e-7, rel=1e-2)
    tokens = one(torch.tensor([[1, 2], [3, 9]]))
    assert (tokens.mean, tokens.low, tokens.high, tokens.dtype) == (None, 1.0, 9.0, "int64")


def test_names_of_what_is_nested() -> None:
    x = torch.ones(2)

    class Batch:
        def __init__(self) -> None:
            self.x, self.note = x, "text"

    batch = {"input_ids": x, "more": [x, {"deep": x}]}
    found = look(0, (batch, Batch(), 3), {"mask": x, "flag": True})
    assert [entry.name for entry in found] == [
        "0['input_ids']", "0['more'][0]", "0['more'][1]['deep']", "1.x", "mask"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).reshape(3, 4),
        lambda: torch.arange(12).reshape(3, 4),
        lambda: torch.arange(12.0).reshape(3, 4).bfloat16(),
        lambda: torch.arange(12).reshape(3, 4) % 5 == 0,
        lambda: torch.arange(400_000.0).reshape(4, 100, 1000),
        lambda: torch.arange(400_000.0),
        lambda: torch.arange(400_000.0).reshape(200_000, 2),
    ],
)
def test_equal_tensors_have_equal_hashes_and_others_do_not(make: Callable[[], torch.Tensor]) -> None:
    first = one(make()).hash
    assert first == one(make()).hash != ""
    assert first == one(make().t().contiguous().t() if make().dim() == 2 else make()).hash
    other = make()
    flat = other.view(-1)
    flat[0] = not flat[0] if other.dtype is torch.bool else flat[0] + 1
    assert first != one(other).hash
    assert first != one(make().roll(1, 0)).hash
    assert first != one(make().unsqueeze(0)).hash


def test_one_bad_entry_among_many_is_seen() -> None:
    x = torch.zeros(3, 200_000)
    assert one(x).finite
    x[1, 77_777] = math.nan
    assert not one(x).finite
    x[1, 77_777] = math.inf
    assert not one(x).finite


def test_odd_tensors_are_described_as_far_as_they_can_be() -> None:
    assert one(torch.empty(0, 3)).shape == (0, 3)
    assert one(torch.ones(3, device="meta")).hash == ""
    assert one(torch.eye(3).to_sparse()).shape == (3, 3)
    assert one(torch.ones(3, dtype=torch.complex64)).hash
    assert one(torch.tensor(2.0)).mean == 2.0
    inside: list[InputSample] = []

    def look_inside(x: torch.Tensor) -> torch.Tensor:
        inside.extend(look(0, (x,), {}))
        return x

    torch.func.vmap(look_inside)(torch.ones(3, 2))
    (found,) = inside
    assert (found.shape, found.mean, found.hash) == ((2,), None, "")


@pytest.mark.parametrize("shape", [(300, 400), (8, 5), (7,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_reading_draws_no_random_numbers_and_writes_nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, state = torch.randn(shape).to(dtype), torch.get_rng_state()
    version, before = x._version, x.clone()
    one(x)
    assert x._version == version
    assert torch.equal(x, before)
    assert torch.equal(state, torch.get_rng_state())


def test_statistics_that_move_though_the_layer_is_frozen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).requires_grad_(False), nn.LayerNorm(3))
    sampler = BufferSampler(numbered(model))
    assert list(sampler.sample()) == []
    model(torch.randn(4, 3) + 2)
    found = list(sampler.sample())
    assert [(fact.moved, fact.frozen) for fact in found] == [(("0", "1"), ("1",))]
    assert list(sampler.sample()) == []
    model.eval()
    model(torch.randn(4, 3))
    assert list(sampler.sample()) == []


def test_ties_that_break_and_parameters_that_only_look_tied() -> None:
    torch.manual_seed(0)
    names = {"e": nn.Embedding(6, 4), "h": nn.Linear(4, 6, bias=False), "n": nn.Linear(4, 6, bias=False)}
    model: Any = nn.ModuleDict(names)
    model["h"].weight = nn.Parameter(model["e"].weight.detach().clone())
    model["c"] = nn.Linear(4, 6, bias=False)
    model["d"] = nn.Linear(4, 6, bias=False)
    for name in ("c", "d"):
        nn.init.zeros_(model[name].weight)
    numbering = numbered(model)
    sampler = TieSampler(numbering)
    tied = sampler.sample()
    assert tied is not None
    assert [tuple(map(numbering.name, pair)) for pair in tied.pairs] == [("e.weight", "h.weight")]
    assert tied.differ == ()
    assert sampler.sample() is None
    with torch.no_grad():
        model["h"].weight[0, 0] += 1
    tied = sampler.sample()
    assert tied is not None
    assert tied.differ == tied.pairs
    assert sampler.sample() is None


def test_really_tied_parameters_are_one() -> None:
    model = nn.ModuleDict({"e": nn.Embedding(6, 4), "h": nn.Linear(4, 6, bias=False)})
    model["h"].weight = model["e"].weight
    assert TieSampler(numbered(model)).sample() is None


def test_memory_of_the_process() -> None:
    before = memory(3)
    held = torch.ones(16_000_000)  # more than 32 MiB, which malloc never takes from what was freed before
    after = memory()
    assert before.graphs == 3
    assert after.resident == 0 or after.resident - before.resident > 20_000_000
    assert held.numel() == 16_000_000


def test_a_tensor_of_a_class_of_the_users_is_read_too() -> None:
    class Odd(torch.Tensor):
        pass

    assert one(torch.randn(8, 5).as_subclass(Odd)).mean is not None


@pytest.mark.parametrize("side", [8, 16, 28])
@pytest.mark.parametrize("samples", [200, 1000, 1797])
def test_what_is_read_of_pictures_is_of_all_their_columns(side: int, samples: int) -> None:
    """Their first column is dark, as in handwritten digits, and a step of a row's length would read no other one."""
    pictures = torch.rand(samples, 1, side, side)
    pictures[..., 0] = 0
    found = one(pictures)
    assert found.mean == pytest.approx(float(pictures.mean()), rel=0.1)
    assert float(some_of(pictures, 4096).mean()) == pytest.approx(float(pictures.mean()), rel=0.1)


def test_a_probed_answer_that_is_infinite_is_a_number_again() -> None:
    probed = Probed(probe="rate", evidence={"after": math.inf, "steps": 3, "how": "inf. of all"})
    assert from_line(to_line(probed)) == probed
