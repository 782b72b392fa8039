"""What ``encode`` may give, what it may not, and what comes back in the order of the batch."""

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import anybatch
from coupled_losses import CASES, Batch, Case, Towers, by_hand, clip, run, samples, towers
from reference import assert_bitwise, assert_float64, clear, gradients_of, whole_gradients

ROWS = 10


class Pair(NamedTuple):
    z: Any
    rest: Any


@dataclass(frozen=True)
class Frozen:
    z: Any
    rest: Any


WRAPPERS: dict[str, Any] = {
    "tuple": lambda z, rest: (z, rest),
    "list": lambda z, rest: [z, rest],
    "dict": lambda z, rest: {"z": z, "rest": rest},
    "ordered": lambda z, rest: OrderedDict(z=z, rest=rest),
    "namedtuple": Pair,
    "dataclass": Frozen,
    "nested": lambda z, rest: {"a": [Pair({"deep": (z,)}, None)], "b": Frozen(3, rest)},
}


def unwrapped(outputs: Any) -> tuple[Any, Any]:
    if isinstance(outputs, dict) and "a" in outputs:
        return outputs["a"][0].z["deep"][0], outputs["b"].rest
    if isinstance(outputs, tuple | list):
        return outputs[0], outputs[1]
    return (outputs["z"], outputs["rest"]) if isinstance(outputs, dict) else (outputs.z, outputs.rest)


def rest_of(batch: Batch, z: Tensor) -> dict[str, Any]:
    """What needs no gradient, in all kinds."""
    return {
        "label": batch["label"], "flag": batch["label"] > 0, "weight": batch["mask"][:, 0, 0] + 1, "none": None,
        "name": "x", "number": 3, "twin": z, "constant": z.detach().abs(),
    }  # fmt: skip


def loss_of(model: Any, outputs: Any) -> Tensor:
    z, rest = unwrapped(outputs)
    assert type(rest) is dict
    assert (rest["none"], rest["name"], rest["number"]) == (None, "x", 3)
    assert rest["twin"] is z
    assert not rest["weight"].requires_grad
    assert not rest["constant"].requires_grad
    weight = rest["weight"].clone()
    rest["weight"] += 1  # what needs no gradient may be written to
    assert rest["label"].dtype == torch.int64
    assert rest["flag"].dtype == torch.bool
    logits: Tensor = F.normalize(z, dim=1) @ F.normalize(rest["twin"], dim=1).T * model.scale
    same = (rest["label"][:, None] == rest["label"]).double()
    result: Tensor = (weight * (logits.softmax(1) * same).sum(1)).sum() / (weight * rest["flag"]).sum()
    product: Tensor = rest["constant"] * z
    return result + 0.1 * product.mean()


@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_any_container(kind: str) -> None:
    def encode(model: Any, batch: Batch) -> Any:
        z = model.image(batch["image"])
        return WRAPPERS[kind](z, rest_of(batch, z))

    case = Case(encode, loss_of)
    model, batch = Towers(), samples(ROWS)
    expected, _ = whole_gradients(model, case.whole, batch)
    for keep in (0, 1, 99):
        for size in (None, 3):
            clear(model)
            anybatch.backward(model, case.coupled(keep=keep), samples(ROWS), micro_batch_size=size)
            assert_float64(gradients_of(model), expected)


def test_a_tensor_that_is_there_twice_in_one_micro_batch_only() -> None:
    """Two outputs that are the same tensor for the first micro-batch are not for the others."""

    def encode(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        z = model.image(batch["image"])
        return (z, z) if bool((batch["label"] == 7).all()) else (z, z * 2)

    def rows(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        z = model.image(batch["image"])
        return z, z * torch.where(batch["label"] == 7, 1.0, 2.0)[:, None]

    def loss(model: Any, outputs: Any) -> Tensor:
        result: Tensor = (outputs[0] @ outputs[1].T * model.scale).logsumexp(1).mean()
        return result

    model, batch = Towers(), samples(9)
    for special in (slice(0, 3), slice(3, 6), slice(6, 9)):
        batch["label"][:] = 0
        batch["label"][special] = 7
        clear(model)
        expected, _ = whole_gradients(model, Case(rows, loss).whole, batch)
        for keep in (0, 1, 2, 99):
            clear(model)
            anybatch.backward(model, anybatch.Coupled(encode, loss, keep=keep), batch, micro_batch_size=3, verify="off")
            assert_float64(gradients_of(model), expected)


def test_what_needs_a_gradient_in_some_micro_batches_only() -> None:
    """Whoever runs again must not lose its gradient in silence."""

    def encode(model: Any, batch: Batch) -> Tensor:
        z: Tensor = model.image(batch["image"])
        return z.detach() if bool((batch["label"] == 7).all()) else z

    def loss(model: Any, z: Tensor) -> Tensor:
        result: Tensor = (z @ z.T * model.scale).logsumexp(1).mean()
        return result

    model, batch = Towers(), samples(9)
    batch["label"][:] = 0
    batch["label"][6:] = 7
    expected = run(anybatch.Coupled(encode, loss, keep=99), model, batch, 3, verify="off")
    for keep in (0, 1, 2):
        assert_bitwise(run(anybatch.Coupled(encode, loss, keep=keep), model, batch, 3, verify="off"), expected)


def raw(rows: int) -> list[dict[str, Any]]:
    torch.manual_seed(2)
    return [
        {"tokens": torch.randn(n, 5, dtype=torch.float64), "text": torch.randn(4, dtype=torch.float64), "number": i}
        for i, n in enumerate(random.Random(3).choices(range(1, 9), k=rows))
    ]


def padded(chosen: list[dict[str, Any]]) -> Batch:
    tokens = pad_sequence([sample["tokens"] for sample in chosen], batch_first=True)
    length = torch.tensor([len(sample["tokens"]) for sample in chosen])
    text = torch.stack([sample["text"] for sample in chosen])
    return {"image": tokens.sum(1) / length[:, None], "text": text, "length": length}


def with_metrics(model: Any, outputs: Any, batch: list[dict[str, Any]]) -> Any:
    assert [sample["number"] for sample in batch] == list(range(len(batch)))
    image, text, length = outputs
    assert length.tolist() == [len(sample["tokens"]) for sample in batch]
    metrics = {"length": length, "hit": anybatch.Mean((image * text).sum().detach(), len(image))}
    return clip(model, (image, text)), metrics


def with_lengths(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return *towers(model, batch), batch["length"]


@settings(max_examples=15, deadline=None)
@given(limit=st.integers(8, 60), keep=st.integers(0, 5), rows=st.integers(2, 12))
def test_raw_samples_packed_by_cost_come_back_in_the_order_of_the_batch(limit: int, keep: int, rows: int) -> None:
    model, batch = Towers(), raw(rows)
    coupled = anybatch.Coupled(with_lengths, with_metrics, keep=keep)
    reference = padded(batch)
    expected, losses = whole_gradients(model, CASES["clip"].whole, reference)
    out = anybatch.backward(
        model, coupled, batch, micro_batch_size=limit, collate=padded, cost=lambda sample: len(sample["tokens"])
    )
    assert_float64(gradients_of(model), expected)
    assert out.loss == pytest.approx(losses["loss"])
    assert out.metrics["length"].tolist() == reference["length"].tolist()


def test_a_random_collate_is_made_once() -> None:
    made: list[Tensor] = []

    def noisy(chosen: list[dict[str, Any]]) -> Batch:
        batch = padded(chosen)
        batch["image"] = batch["image"] + torch.randn_like(batch["image"])
        made.append(batch["image"])
        return batch

    model, batch = Towers(), raw(ROWS)
    for keep in (0, 1):
        made.clear()
        clear(model)
        anybatch.backward(model, anybatch.Coupled(towers, clip, keep=keep), batch, micro_batch_size=3, collate=noisy)
        found = gradients_of(model)
        assert len(made) == 4
        whole = {**padded(batch), "image": torch.cat(made)}
        expected, _ = whole_gradients(model, CASES["clip"].whole, whole)
        assert_float64(found, expected)


@pytest.mark.parametrize("row_block", [None, 3])
def test_metrics_of_each_sample(row_block: int | None) -> None:
    def loss(model: Any, outputs: Any, *rows: slice) -> Any:
        image, text = outputs
        chosen = rows[0] if rows else slice(0, len(image))
        right = (image @ text.T)[chosen].argmax(1) == torch.arange(chosen.start, chosen.stop)
        of_rows = CASES["clip"].of_rows
        assert of_rows is not None
        return of_rows(model, outputs, chosen), {"right": right, "hits": anybatch.Mean(right.sum(), len(right))}

    def plain(model: Any, outputs: Any) -> Any:
        return loss(model, outputs)

    def of_block(model: Any, outputs: Any, rows: slice) -> Any:
        return loss(model, outputs, rows)

    model, batch = Towers(), samples(ROWS)
    coupled = anybatch.Coupled(towers, of_block if row_block else plain, row_block=row_block)
    out = anybatch.backward(model, coupled, batch, micro_batch_size=4)
    image, text = towers(model, batch)
    expected = (image @ text.T).argmax(1) == torch.arange(ROWS)
    assert out.metrics["right"].tolist() == expected.tolist()
    assert out.metrics["hits"] == pytest.approx(float(expected.double().mean()))


def test_the_batch_may_be_taken_apart_by_encode() -> None:
    """``pop`` and new entries in the micro-batch do not reach the second pass, nor the loss."""

    def encode(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        batch["image"] = batch["image"] * 2
        return towers(model, {"image": batch.pop("image"), "text": batch.pop("text")})

    def loss(model: Any, outputs: Any, batch: Batch) -> Tensor:
        assert len(batch["image"]) == ROWS
        return clip(model, outputs)

    model = Towers()
    for keep in (0, 1, 99):
        found = run(anybatch.Coupled(encode, loss, keep=keep), model, samples(ROWS), 3)
        doubled = {**samples(ROWS), "image": 2 * samples(ROWS)["image"]}
        parts = [{key: value[i : i + 3] for key, value in doubled.items()} for i in range(0, ROWS, 3)]
        assert_float64(found, by_hand(CASES["clip"], model, parts))


def test_a_batch_that_is_written_to_does_not_run_twice() -> None:
    def encode(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        batch["image"].mul_(2)
        return towers(model, batch)

    with pytest.raises(anybatch.LossError, match="encode of Coupled wrote to a tensor of the batch in place"):
        run(anybatch.Coupled(encode, clip), Towers(), samples(ROWS), 3)
    run(anybatch.Coupled(encode, clip), Towers(), samples(ROWS), None)


class OwnGenerator:
    """Draws that nobody can replay."""

    def __init__(self) -> None:
        self.torch, self.numpy = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def encode(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        image, text = towers(model, batch)
        mask = torch.rand(image.shape, generator=self.torch, dtype=torch.float64) > 0.3
        return F.normalize(image * mask, dim=1), F.normalize(text + float(self.numpy.random()), dim=1)


def test_values_that_are_not_the_same_again_are_refused() -> None:
    model, batch = Towers(), samples(ROWS)
    step = anybatch.TrainStep(
        model, anybatch.Coupled(OwnGenerator().encode, clip), torch.optim.SGD(model.parameters(), 1.0),
        micro_batch_size=3,
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):  # not only the first time
        with pytest.raises(anybatch.LossError, match=r"outputs\[0\] of micro-batch 3 has different values .* keep="):
            step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    run(anybatch.Coupled(OwnGenerator().encode, clip, keep=1_000_000), model, batch, 3)


WRONG_OUTPUTS: dict[str, tuple[Any, str]] = {
    "nothing": (lambda z, n: None, "encode gave no tensor"),
    "no tensor": (lambda z, n: {"a": 3}, "encode gave no tensor"),
    "a scalar": (lambda z, n: (z, z.sum()), r"outputs\[1\] has the shape \(\) for a micro-batch of 3 samples"),
    "other rows": (lambda z, n: z[:2], r"outputs has the shape \(2, 3\) for a micro-batch of 3"),
    "other widths": (lambda z, n: z[:, : 1 + n], r"shapes \(3, 1\), \(3, 2\).*pool or pad them"),
    "a list of samples": (
        lambda z, n: (z, list(range(n, 4))),
        r"gave 4 outputs for micro-batch 2 and 5 .*take it from",
    ),
    "another constant": (lambda z, n: (z, n), r"outputs\[1\] is 0 for one micro-batch and another for the next"),
    "an array": (lambda z, n: (z, np.arange(n, n + 3)), r"outputs\[1\] is array\(\[0, 1, 2\]\) for one"),
    "other keys": (lambda z, n: {f"z{n}": z}, r"differ in outputs\['z1'\], outputs\['z0'\]"),
}


@pytest.mark.parametrize("kind", list(WRONG_OUTPUTS))
def test_refused_outputs(kind: str) -> None:
    make, text = WRONG_OUTPUTS[kind]
    model, calls = Towers(), []

    def encode(model: Any, batch: Batch) -> Any:
        calls.append(1)
        return make(model.image(batch["image"]), min(len(calls) - 1, 1))

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(anybatch.LossError, match=text):
        anybatch.backward(model, anybatch.Coupled(encode, lambda m, z: z[0].sum()), samples(6), micro_batch_size=3)
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())


def test_refused_arguments() -> None:
    def encode(model: Any, batch: Any) -> Any: ...

    wrong: Any
    for wrong in ({"keep": -1}, {"keep": True}, {"row_block": 0}, {"row_block": 2.0}, {"keep": "all"}):
        with pytest.raises(anybatch.LossError, match="expected an integer"):
            anybatch.Coupled(encode, lambda model, outputs, rows: 0, **wrong)
    one: Any
    other: Any
    for one, other, text in (
        (3, clip, "encode"), (encode, None, "loss"), (lambda b: b, clip, r"encode\(model, batch\)"),
        (encode, lambda o: o, r"loss\(model, outputs\)"), (encode, lambda m, o, b, r, x: o, "loss"),
    ):  # fmt: skip
        with pytest.raises(anybatch.LossError, match=text):
            anybatch.Coupled(one, other)
    with pytest.raises(anybatch.LossError, match="rows"):
        anybatch.Coupled(encode, clip, row_block=3)


def test_which_losses_take_the_batch() -> None:
    """An option of the user's own is no place for the batch."""

    class Module(nn.Module):
        def forward(self, model: Any, outputs: Any) -> Any: ...

    class WithBatch(nn.Module):
        def forward(self, model: Any, outputs: Any, batch: Any) -> Any: ...

    def option(model: Any, outputs: Any, temperature: float = 0.1) -> Any: ...
    def optional(model: Any, outputs: Any, batch: Any = None) -> Any: ...

    def takes(loss: Any, **options: Any) -> bool:
        return anybatch.Coupled(towers, loss, **options).takes_batch

    assert not takes(clip)
    assert not takes(option)
    assert takes(optional)
    assert not takes(Module())
    assert takes(WithBatch())
    assert takes(WithBatch().forward)
    assert takes(CASES["dice"].loss)
    assert not takes(CASES["clip"].of_rows, row_block=2)
    assert takes(lambda model, outputs, batch, rows: 0, row_block=2)
    assert not takes(lambda model, outputs, rows, temperature=1: 0, row_block=2)
