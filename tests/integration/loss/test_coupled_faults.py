"""A coupled loss when memory runs out at any operation, when user code fails in either pass, and with NaN."""

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.tensors.graph import is_recomputing
from coupled_losses import CASES, Towers, clip, run, samples, towers
from faults import OutOfMemoryAt, different, facts, quick_collections
from reference import assert_float64, gradients_of


@pytest.fixture(autouse=True, scope="module")
def collections() -> Iterator[None]:
    with quick_collections():
        logging.disable()  # a warning for each of hundreds of retries
        yield
        logging.disable(logging.NOTSET)


class Network(nn.Module):
    """Draws from all three generators and changes buffers."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = 1 + 0.1 * (random.random() + float(np.random.rand()))
        return F.dropout(self.linear(x * noise) * (1 + 0.1 * self.calls), 0.3, self.training)


def encode(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    z = model(batch["image"])
    return z, batch["label"]


def loss(model: Any, outputs: Any, rows: slice | None = None) -> Any:
    z, label = outputs
    rows = rows or slice(0, len(z))
    logits = (z @ z.T * model.scale)[rows]
    same = (label[rows, None] == label).float()
    return -(logits.log_softmax(1) * same).sum(1).mean(), {"label": label[rows]}


class Bench:
    """A model, an optimizer and a batch that are always the same at the start."""

    def __init__(self, coupled: anybatch.Coupled, size: int, *, rows: int = 6, fp16: bool = False) -> None:
        self.model = Network()
        self.batch = {
            key: value.float() if value.is_floating_point() else value
            for key, value in samples(rows).items() if key in ("image", "label")
        }  # fmt: skip
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if fp16 else None
        self.step = anybatch.TrainStep(
            self.model, coupled, self.optimizer, micro_batch_size=size, clip_norm=0.5,
            autocast=torch.float16 if fp16 else None, scaler=self.scaler, verify="off",  # a buffer counts its forwards
        )  # fmt: skip
        torch.manual_seed(7), random.seed(7), np.random.seed(7)

    def facts(self, out: anybatch.StepResult) -> dict[str, Any]:
        found = facts(self.model, [self.optimizer], step=self.step, scaler=self.scaler)
        return {**found, "loss": out.loss, "norm": out.grad_norm, "label": out.metrics["label"]}


@pytest.mark.parametrize(
    ("options", "fp16"), [({"keep": 0}, False), ({"keep": 1, "row_block": 2}, True)], ids=["again", "rows-fp16"]
)
def test_out_of_memory_at_every_operation(options: dict[str, Any], fp16: bool) -> None:
    def bench(size: int) -> Bench:
        return Bench(anybatch.Coupled(encode, loss, **options), size, rows=4, fp16=fp16)

    references = {}
    for size in (2, 1):
        ours = bench(size)
        references[size] = ours.facts(ours.step(ours.batch))
    wrong: dict[str, list[str]] = {}
    recovered = interrupted = 0
    for number in itertools.count(1):
        ours = bench(2)
        memory = OutOfMemoryAt(number)
        try:
            with memory:
                out = ours.step(ours.batch)
            names = different(references[int(out.attempts[-1].micro_batch_size)], ours.facts(out))
            recovered += 1
            if names:
                wrong[f"{number} {memory.operations[number - 1]}"] = names
        except anybatch.UpdateInterrupted:  # optimizer.step has changed a parameter before: not a matter of the loss
            interrupted += 1
        if not memory.has_raised:
            break
    assert not wrong, f"{len(wrong)} of {number}: {dict(itertools.islice(wrong.items(), 4))}"
    assert recovered > 150
    assert interrupted < 20


class Bomb(Exception):
    pass


def test_an_exception_in_either_pass_or_in_the_loss_leaves_everything_as_it_was() -> None:
    for at in range(1, 8):  # 3 + 2 calls of encode, 2 of the loss
        calls = itertools.count(1)

        def ticking(model: Any, batch: Any) -> Any:
            outputs = encode(model, batch)
            if next(calls) == at:  # noqa: B023
                raise Bomb
            return outputs

        def bang(model: Any, outputs: Any, rows: slice) -> Any:
            result = loss(model, outputs, rows)
            if next(calls) == at:  # noqa: B023
                raise Bomb
            return result

        coupled = anybatch.Coupled(ticking, bang, row_block=4)
        ours = Bench(coupled, 2)
        before = facts(ours.model, [ours.optimizer], step=ours.step)
        with pytest.raises(Bomb):
            ours.step(ours.batch)
        assert not different(before, facts(ours.model, [ours.optimizer], step=ours.step))
        calls = itertools.count(1)
        with pytest.raises(Bomb):  # and in a loop of the user's own
            anybatch.backward(ours.model, coupled, ours.batch, micro_batch_size=2, verify="off")
        assert not different(before, facts(ours.model, [ours.optimizer], step=ours.step))
    assert next(calls) == at + 1


def test_a_loss_that_is_nan_is_skipped_or_shown() -> None:
    def poisoned(model: Any, outputs: Any) -> Tensor:
        return clip(model, outputs) * torch.nan

    model, batch = Towers(), samples(8)
    found = run(anybatch.Coupled(towers, poisoned), model, batch, 3)
    assert all(g is not None and bool(g.isnan().all()) for g in found)


def test_outputs_that_are_nan_are_no_other_values() -> None:
    """NaN in both passes is the same; the comparison of the two passes has nothing to say about it."""

    def encode(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        image, text = towers(model, batch)
        return image * torch.nan, text

    assert all(
        bool(g.isnan().any()) for g in run(anybatch.Coupled(encode, clip), Towers(), samples(8), 3) if g is not None
    )


def test_what_the_encoder_reads_must_not_change_between_the_passes() -> None:
    def sneaky(model: Any, outputs: Any) -> Tensor:
        with torch.no_grad():
            model.text[0].bias += 1
        return clip(model, outputs)

    with pytest.raises(anybatch.AnyBatchError, match=r"encode of Coupled.*a parameter was changed"):
        run(anybatch.Coupled(towers, sneaky), Towers(), samples(8), 3)


def test_a_parameter_that_is_replaced_or_changed_by_encode() -> None:
    def replacing(model: Any, outputs: Any) -> Tensor:
        model.text[0].bias = nn.Parameter(model.text[0].bias.detach() + 1)
        return clip(model, outputs)

    def changing(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            model.text[0].bias += 1
        return towers(model, batch)

    with pytest.raises(anybatch.AnyBatchError, match="changed or replaced between the forward and backward pass"):
        run(anybatch.Coupled(towers, replacing), Towers(), samples(8), 3)
    with pytest.raises(anybatch.AnyBatchError, match="changed by the forward pass itself"):
        run(anybatch.Coupled(changing, clip), Towers(), samples(8), 3)


def test_rounding_between_the_passes_is_no_other_value() -> None:
    """Kernels need not give the same bits twice."""

    def rounded(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        image, text = towers(model, batch)
        return image * (1 + off * is_recomputing()), text

    for dtype, small, large in ((torch.float64, 1e-10, 1e-5), (torch.float32, 1e-6, 1e-2), (torch.bfloat16, 0.0, 0.5)):
        model = Towers().to(dtype)
        batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in samples(8).items()}
        batch["image"] = batch["image"].abs() + 1  # sums that do not cancel
        off = small
        run(anybatch.Coupled(rounded, clip), model, batch, 3)
        off = large
        with pytest.raises(anybatch.LossError, match="has different values"):
            run(anybatch.Coupled(rounded, clip), model, batch, 3)


def test_an_encoder_that_does_not_learn_under_a_loss_that_does() -> None:
    model, batch = Towers(), samples(8)
    for parameter in [*model.image.parameters(), *model.text.parameters()]:
        parameter.requires_grad_(False)
    clip(model, towers(model, batch)).backward()
    expected = gradients_of(model)
    for size in (None, 3):
        for keep in (0, 1, 99):
            model.zero_grad()
            assert_float64(run(CASES["clip"].coupled(keep=keep), model, batch, size), expected)


def test_a_loss_that_writes_in_place_to_an_output() -> None:
    def in_place(model: Any, outputs: Any) -> Tensor:
        outputs[0].mul_(2)
        return clip(model, outputs)

    for size in (None, 3):
        with pytest.raises(anybatch.LossError, match="changed in place"):
            run(anybatch.Coupled(towers, in_place), Towers(), samples(8), size)


def test_a_loss_without_gradient() -> None:
    def cut_off(model: Any, batch: Any) -> Any:
        return tuple(z.detach() for z in towers(model, batch))

    model, batch = Towers(), samples(8)
    for size in (None, 3):
        for keep in (0, 1):
            with pytest.raises(anybatch.LossError, match="no gradient"):
                anybatch.backward(
                    model, anybatch.Coupled(towers, lambda m, o: o[0].detach().sum(), keep=keep), batch,
                    micro_batch_size=size,
                )  # fmt: skip
            with pytest.raises(anybatch.LossError, match="no gradient"):
                anybatch.backward(
                    model, anybatch.Coupled(cut_off, lambda m, o: o[0].sum(), keep=keep), batch, micro_batch_size=size
                )
    assert gradients_of(model) == [None] * 7


def test_parts_of_the_model_that_do_not_learn() -> None:
    """A locked tower, as in LiT: its outputs need no gradient, and it gets none."""
    batch = samples(8)
    for keep in (0, 1, 99):
        model = Towers()
        for parameter in model.image.parameters():
            parameter.requires_grad_(False)
        whole = Towers()
        clip(whole, towers(whole, batch)).backward()
        found = run(CASES["clip"].coupled(keep=keep), model, batch, 3)
        assert [g is None for g in found] == [False, True, True, True, True, False, False]
        torch.testing.assert_close(found[5], whole.text[0].weight.grad, rtol=1e-10, atol=1e-12)
