"""What a proof is made of, when it is made, and what it says of itself.

What would be wrong in silence: a proof that is made at each call, or never again where the batch looks otherwise; a
model that is kept alive by what was proved of it; a difference that the sketches of two gradients do not show.
"""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.checking.gradients import distance, kept_of


def net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs))


def batch_of(rows: int = 12, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)
    y = torch.randint(3, (rows,), generator=generator)
    return {"x": torch.randn(rows, 6, generator=generator), "y": y, **more}


def mean(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def summed(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


class Calls:
    """A loss that counts how often it is called, where a proof does not put it back."""

    seen = 0

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        Calls.seen += 1
        return mean(model, batch)


def step_of(model: nn.Module, loss_fn: Any, **options: Any) -> anybatch.TrainStep:
    return anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The samples of each forward of any ``Sequential``."""
    found: list[int] = []
    forward = nn.Sequential.forward

    def noted(self: nn.Sequential, x: torch.Tensor) -> Any:
        found.append(len(x))
        return forward(self, x)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(nn.Sequential, "forward", noted)
    return found


def test_it_is_proved_once_for_each_layout_and_not_for_each_length(forwards: list[int]) -> None:
    step = step_of(net(), mean, micro_batch_size=5)
    first = step(batch_of(12)).proof
    assert first is not None
    assert len(forwards) == 3 + 3 + 3  # whole and two parts, two micro-batches at once and apart, the step
    for rows in (12, 17, 6):
        forwards.clear()
        assert step(batch_of(rows)).proof is first
        assert sum(forwards) == rows
    other = step(batch_of(12, weight=torch.ones(12))).proof
    assert other is not None
    assert other is not first
    assert step(batch_of(12)).proof is first


def test_backward_in_a_loop_proves_once_even_with_a_new_lambda_each_time(forwards: list[int]) -> None:
    model, criterion = net(), nn.CrossEntropyLoss()
    for number in range(3):
        forwards.clear()
        anybatch.backward(model, lambda m, b: criterion(m(b["x"]), b["y"]), batch_of(), micro_batch_size=5)
        assert sum(forwards) == (12 if number else 12 + 2 * 5 + 2 * (5 + 5))
    with pytest.raises(anybatch.NotSplittable):  # another loss is another proof
        anybatch.backward(model, summed, batch_of(), micro_batch_size=5)
    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(model, loss_with("sum"), batch_of(), micro_batch_size=5)
    assert anybatch.backward(model, loss_with("mean"), batch_of(), micro_batch_size=5).proof is not None
    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(model, loss_with("sum"), batch_of(), micro_batch_size=5)


def test_another_option_of_a_count_is_another_proof() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    batch = torch.randint(9, (12, 9)).masked_fill(torch.rand(12, 9) < torch.linspace(0, 0.9, 12)[:, None], -100)
    batch[:, 0] = 1

    def loss_fn(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch.clamp_min(0)).flatten(0, 1), batch.flatten())

    anybatch.backward(model, loss_fn, batch, micro_batch_size=4, count=anybatch.count_tokens(""))
    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(model, loss_fn, batch, micro_batch_size=4, count=anybatch.count_tokens("", shift=1))


def test_lazy_parameters_are_made_by_the_batch_and_the_next_one_is_proved() -> None:
    model, noise = nn.Sequential(nn.LazyLinear(4), nn.Dropout(0.5)), []
    for verify in ("first", "off"):
        torch.manual_seed(0)
        twin = copy.deepcopy(model)
        assert (
            anybatch.backward(twin, lambda m, x: m(x).mean(), torch.ones(8, 3), micro_batch_size=4, verify=verify).proof
            is None
        )
        noise.append(torch.get_rng_state())
        if verify == "first":
            proof = anybatch.backward(twin, lambda m, x: m(x).mean(), torch.ones(8, 3), micro_batch_size=4).proof
            assert proof is not None
            assert proof.exact
    assert torch.equal(*noise)


def loss_with(reduction: str) -> Any:
    return lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], reduction=reduction)


def test_nothing_is_kept_alive_by_what_was_proved() -> None:
    def trained() -> Any:
        model = net()
        count = lambda batch: len(batch["x"]) + 0 * len(model)  # type: ignore[arg-type]  # noqa: E731 - holds the model
        anybatch.backward(model, mean, batch_of(), micro_batch_size=5, count=count)
        return weakref.ref(model)

    gone = trained()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("rows", [None, 12])
def test_a_batch_that_is_not_split_proves_nothing(forwards: list[int], rows: int | None) -> None:
    out = step_of(net(), summed, micro_batch_size=rows)(batch_of())
    assert out.proof is None
    assert forwards == [12]


def test_it_is_proved_when_memory_runs_out_and_not_again(forwards: list[int]) -> None:
    def short(model: Any, batch: Any) -> torch.Tensor:
        if len(batch["x"]) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return mean(model, batch)

    step = step_of(net(), short)
    out = step(batch_of(12))
    assert [one.outcome for one in out.attempts] == ["out of memory", "done"]
    assert out.proof is not None
    assert out.proof.exact
    assert step(batch_of(12)).proof is out.proof


def test_a_warning_in_place_of_the_error() -> None:
    step = step_of(net(), summed, micro_batch_size=5, verify="warn")
    with pytest.warns(anybatch.AnyBatchWarning, match="a sum over the samples"):
        out = step(batch_of())
    assert step.updates == 1
    assert out.proof is not None
    assert (out.proof.outcome, out.proof.by) == ("not exact", "certificate")
    step(batch_of())  # warns once


def test_off_runs_nothing(forwards: list[int]) -> None:
    assert step_of(net(), summed, micro_batch_size=5, verify="off")(batch_of()).proof is None
    assert sum(forwards) == 12


@pytest.mark.parametrize("verify", ["on", None, True, ["first"]])
def test_another_word_is_refused(verify: Any) -> None:
    with pytest.raises(anybatch.BatchError, match=r"expected one of \('first', 'warn', 'off'\)"):
        step_of(net(), mean, verify=verify)
    with pytest.raises(anybatch.BatchError, match="verify="):
        anybatch.backward(net(), mean, batch_of(), verify=verify)


def test_batch_norm_is_still_refused_by_its_own_text() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    with pytest.raises(anybatch.NotSplittable, match="micro_batch_size=5 cuts these 12 samples") as caught:
        step_of(model, mean, micro_batch_size=5)(batch_of())
    assert caught.value.modules == ("1",)


def test_a_run_that_goes_on_from_a_checkpoint_is_the_same() -> None:
    model = net()
    step = step_of(model, mean, micro_batch_size=5)
    step(batch_of())
    saved, weights = copy.deepcopy(step.state_dict()), copy.deepcopy(model.state_dict())
    step(batch_of(9))
    again = net()
    again.load_state_dict(weights)
    other = step_of(again, mean, micro_batch_size=5)
    other.load_state_dict(saved)
    assert other(batch_of(9)).proof is not None
    for one, another in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, another)


def test_a_count_that_is_off_by_a_few_per_mille_is_seen_in_float32() -> None:
    """Of 500 items of a sample one does not count in the loss."""
    torch.manual_seed(0)
    labels = torch.randint(3, (8, 500))
    for row in range(8):
        labels[row, 120 + 40 * row :] = -100
    batch = {"x": torch.randn(8, 500, 6), "labels": labels}

    def shifted(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    right, wrong = (anybatch.count_tokens("labels", shift=shift) for shift in (1, 0))
    assert anybatch.backward(net(), shifted, batch, micro_batch_size=4, count=right).proof is not None
    with pytest.raises(anybatch.NotSplittable, match=r"averaged over"):
        anybatch.backward(net(), shifted, batch, micro_batch_size=4, count=wrong)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_numbers_are_cut_and_proved_like_others(dtype: torch.dtype) -> None:
    batch = {"x": torch.arange(72).reshape(12, 6).to(dtype), "y": (torch.arange(12) % 3).to(dtype)}

    def of_numbers(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"].float() / 72), batch["y"].long())

    def coupled(model: Any, batch: Any) -> torch.Tensor:
        outputs = model(batch["x"].float() / 72)
        loss: torch.Tensor = (outputs - outputs.mean(0)).square().mean()
        return loss

    proof = anybatch.backward(nn.Linear(6, 3), of_numbers, batch, micro_batch_size=4).proof
    assert proof is not None
    assert proof.exact
    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(nn.Linear(6, 3), coupled, batch, micro_batch_size=4)


def test_modes_of_the_user_do_not_see_it() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for verify in ("first", "off"):
        step = step_of(net(), mean, micro_batch_size=5, verify=verify)
        with FlopCounterMode(display=False) as counter:
            step(batch_of())
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("shape", [(7,), (64, 100), (300, 41), (5000, 3)])
@pytest.mark.parametrize("kind", ["dense", "sparse", "complex"])
def test_a_sketch_gives_the_norm_of_a_difference(shape: tuple[int, ...], kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    dtype = torch.complex64 if kind == "complex" else torch.float32
    one, other = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    other = one + 1e-3 * other
    weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
    sketches = []
    for gradient in (one, other):
        weight.grad = gradient.to_sparse(1) if kind == "sparse" else gradient
        sketches.append(kept_of([weight]))
    expected = float((one - other).norm())
    assert distance(sketches[0], sketches[1]) == pytest.approx(expected, rel=0.15)
    assert distance(sketches[0]) == pytest.approx(float(one.norm()), rel=0.15)
    weight.grad = one
    assert distance(kept_of([weight]), sketches[0]) <= 1e-5 * float(one.norm())
