"""What a loss function may return, and which parameters get a gradient from it."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
import reference
from anybatch import CountError, LossError, Mean

Batch = dict[str, torch.Tensor]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch_of(rows: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return {
        "x": torch.randn(rows, 3, dtype=torch.float64, generator=generator),
        "y": torch.randint(0, 2, (rows,), generator=generator),
        "mask": torch.tensor([0, 1, 1, 0, 0, 1, 1])[:rows],
    }


def cross_entropy(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def total_cross_entropy(model: Any, batch: Batch) -> Mean:
    return Mean(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


def in_a_generator(model: Any, batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    yield "loss", cross_entropy(model, batch)


WAYS = [cross_entropy, total_cross_entropy, in_a_generator]


# Names and values.


def test_names_of_losses() -> None:
    def names(loss_fn: Any) -> list[str]:
        model = net()
        out = anybatch.backward(model, loss_fn, batch_of(), micro_batch_size=3)
        assert set(out.counts) == set(out.losses)
        return list(out.losses)

    def unnamed(model: Any, batch: Batch) -> Iterator[Any]:
        yield cross_entropy(model, batch)
        yield "named", cross_entropy(model, batch)
        yield cross_entropy(model, batch)

    assert names(cross_entropy) == ["loss"]
    assert names(lambda model, batch: {"b": cross_entropy(model, batch), "a": cross_entropy(model, batch)}) == [
        "b",
        "a",
    ]
    assert names(lambda model, batch: MappingProxyType({"m": cross_entropy(model, batch)})) == ["m"]
    assert names(unnamed) == ["loss_0", "named", "loss_2"]


def test_the_loss_is_the_sum_of_the_losses() -> None:
    model, batch = net(), batch_of()
    out = anybatch.backward(
        model, lambda model, batch: {"a": cross_entropy(model, batch), "b": 2 * cross_entropy(model, batch)}, batch
    )
    reference.assert_value64(out.loss, 3 * cross_entropy(model, batch).item())
    reference.assert_value64(out.losses["b"], 2 * cross_entropy(model, batch).item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_losses_of_any_floating_point_type(dtype: torch.dtype) -> None:
    model, batch = net(), batch_of()
    expected, _ = reference.whole_gradients(model, cross_entropy, batch)
    tolerance = 2 * torch.finfo(dtype).eps
    for loss_fn in (cross_entropy, total_cross_entropy):

        def low(model: Any, batch: Batch, loss_fn: Any = loss_fn) -> Any:
            loss = loss_fn(model, batch)
            return Mean(loss.total.to(dtype), loss.count) if isinstance(loss, Mean) else loss.to(dtype)

        reference.clear(model)
        out = anybatch.backward(model, low, batch, micro_batch_size=2)
        assert reference.distance(reference.gradients_of(model), expected) <= tolerance * reference.norm(expected)
        assert out.loss == pytest.approx(cross_entropy(model, batch).item(), rel=2 * tolerance)


@pytest.mark.parametrize(
    "kind", [int, float, torch.tensor, lambda n: torch.tensor(float(n)), lambda n: torch.tensor(n).int()]
)
def test_counts_of_any_kind(kind: Any) -> None:
    model, batch = net(), batch_of()

    def loss_fn(model: Any, batch: Batch) -> Mean:
        return Mean(total_cross_entropy(model, batch).total, kind(len(batch["y"])))

    reference.assert_exact_at_every_size(model, loss_fn, batch, 7)
    reference.assert_exact_at_every_size(model, cross_entropy, batch, 7, count=lambda batch: kind(len(batch["y"])))
    out = anybatch.backward(model, loss_fn, batch, micro_batch_size=2)
    assert out.count == 7


def test_a_mean_without_gradient_in_some_micro_batches_keeps_its_value() -> None:
    def loss_fn(model: Any, batch: Batch) -> Mean:
        if not batch["mask"].any():
            return Mean(torch.tensor(3.0, dtype=torch.float64), len(batch["y"]))
        return Mean(total_cross_entropy(model, batch).total, len(batch["y"]))

    for rows in (batch_of(7), {name: leaf.flip(0) for name, leaf in batch_of(7).items()}):
        model = net()
        parts = [{name: leaf[i : i + 1] for name, leaf in rows.items()} for i in range(7)]
        means = [loss_fn(model, part) for part in parts]
        expected = torch.autograd.grad(
            sum(m.total for m in means if m.total.requires_grad) / 7, list(model.parameters())
        )
        out = anybatch.backward(model, loss_fn, rows, micro_batch_size=1, verify="off")  # whole it is another loss
        reference.assert_float64(reference.gradients_of(model), list(expected))
        reference.assert_value64(out.loss, sum(mean.total.item() for mean in means) / 7)


def test_a_mapping_may_leave_out_a_loss_that_has_no_items() -> None:
    def loss_fn(model: Any, batch: Batch) -> dict[str, Mean]:
        out = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        losses = {"all": Mean(out.sum(), len(out))}
        if batch["mask"].any():
            losses["masked"] = Mean((out * batch["mask"]).sum(), batch["mask"].sum())
        return losses

    reference.assert_exact_at_every_size(net(), loss_fn, batch_of(), 7, count="forward")
    counts = {"all": lambda batch: len(batch["y"]), "masked": lambda batch: batch["mask"].sum()}
    reference.assert_exact_at_every_size(net(), loss_fn, batch_of(), 7, count=counts)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("kind", ["sum", "weighted", "stack", "itself"])
def test_a_sum_beside_its_summands_is_refused(kind: str, shape: tuple[int, ...]) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        losses = parts(model, batch)
        return {name: loss.reshape(shape) for name, loss in losses.items()} if shape else losses

    def parts(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        a, b = out.square().mean(), out.abs().mean()
        both = {"sum": a + b, "weighted": (a + 0.1 * b) / 2, "stack": torch.stack([a, b]).sum(), "itself": a}
        return {"a": a, "b": b, "loss": both[kind]} if kind != "itself" else {"a": a, "loss": a}

    model = nn.Linear(3, 2)
    with pytest.raises(LossError, match="would count twice") as caught:
        anybatch.backward(model, loss_fn, {"x": torch.randn(4, 3)})
    assert caught.value.name in ("loss", "a")
    assert model.weight.grad is None


def test_losses_that_share_what_is_under_them_are_no_sums() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        a, b = out.square().mean(), out.abs().mean()
        return {"a": a, "b": b, "both": a * b, "root": (a + b).sqrt(), "logged": (a + b).detach() + b * 0}

    model = nn.Linear(3, 2)
    anybatch.backward(model, loss_fn, {"x": torch.randn(4, 3)})
    assert model.weight.grad is not None


def test_one_graph_under_all_losses_of_a_mapping() -> None:
    model, batch = net(), batch_of()

    def loss_fn(model: Any, batch: Batch) -> Mapping[str, torch.Tensor]:
        logits = model(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        return {"loss": loss, "again": loss, "size": logits.square().mean()}

    reference.assert_exact_at_every_size(model, loss_fn, batch, 7)


# Metrics.


def test_metrics_of_a_generator() -> None:
    def loss_fn(model: Any, batch: Batch) -> Any:
        logits = model(batch["x"])
        yield F.cross_entropy(logits, batch["y"])
        return {"right": Mean((logits.argmax(1) == batch["y"]).sum(), len(logits)), "guess": logits.argmax(1)}

    model, batch = net(), batch_of()
    out = anybatch.backward(model, loss_fn, batch, micro_batch_size=3)
    guess = model(batch["x"]).argmax(1)
    assert out.metrics["guess"].tolist() == guess.tolist()
    assert out.metrics["right"] == (guess == batch["y"]).double().mean().item()
    assert out.to_dict()["metrics"] == {"right": out.metrics["right"]}


ODD_METRICS: dict[str, Any] = {
    "one row": lambda batch: torch.zeros(1),
    "too many rows": lambda batch: torch.zeros(5, 2),
    "pad rows of different lengths": lambda batch: torch.zeros(len(batch["y"]), 1 + int(batch["y"].sum())),
    "a Mean of a vector": lambda batch: Mean(torch.zeros(3), 1),
    "a Mean over a vector": lambda batch: Mean(1.0, torch.ones(2)),
    "a Mean of a text": lambda batch: Mean("a", 1),
    "a tensor without dimensions": lambda batch: torch.zeros(()),
    "a number": lambda batch: 3,
    "a list": lambda batch: [1, 2],
}


@pytest.mark.parametrize("metric", ODD_METRICS.values(), ids=ODD_METRICS)
def test_a_metric_that_does_not_fit_is_refused_before_anything_changed(metric: Any) -> None:
    model, batch = net(), batch_of(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = anybatch.TrainStep(
        model, lambda model, batch: (cross_entropy(model, batch), {"odd": metric(batch)}), optimizer, micro_batch_size=2
    )
    before = reference.everything(model, optimizer, step, with_gradients=False)
    with pytest.raises(LossError, match=r"metric 'odd'.*expected") as caught:
        step(batch)
    assert caught.value.name == "odd"
    reference.assert_unchanged(reference.everything(model, optimizer, step, with_gradients=False), before)


@pytest.mark.parametrize("of", [cross_entropy, lambda model, batch: {"a": cross_entropy(model, batch)}])
def test_a_loss_of_one_entry_is_the_loss_and_one_for_each_sample_is_refused(of: Any) -> None:
    def with_entry(model: Any, batch: Any) -> Any:
        found = of(model, batch)
        return {"a": found["a"].reshape(1)} if isinstance(found, dict) else found.reshape(1)

    model, batch = net(), batch_of(6)
    expected, _ = reference.whole_gradients(model, cross_entropy, batch)
    reference.clear(model)
    out = anybatch.backward(model, with_entry, batch, micro_batch_size=4)
    reference.assert_float64(reference.gradients_of(model), expected)
    assert out.micro_batches == 2
    assert isinstance(out.loss, float)
    with pytest.raises(LossError, match=r"shape \(4,\).*\.mean\(\)"):
        anybatch.backward(
            model, lambda model, batch: cross_entropy(model, batch).expand(len(batch["y"])), batch, micro_batch_size=4
        )


# Counts that must agree.


def test_counts_of_means_must_be_those_that_were_given() -> None:
    model, batch = net(), batch_of()

    def loss_fn(model: Any, batch: Batch) -> dict[str, Mean]:
        return {"a": Mean(total_cross_entropy(model, batch).total, 2 * len(batch["y"]))}

    with pytest.raises(CountError, match=r"'a'.*14.*7.*expected the same"):
        anybatch.backward(model, loss_fn, batch, micro_batch_size=3, count={"a": anybatch.count_samples})
    assert reference.gradients_of(model) == [None] * 4


def test_a_forward_that_counts_runs_without_a_graph_and_before_the_first_backward() -> None:
    model, batch = net(), batch_of()
    seen: list[bool] = []

    def loss_fn(model: Any, batch: Batch) -> dict[str, Mean]:
        seen.append(torch.is_grad_enabled())
        return {"a": total_cross_entropy(model, batch), "b": total_cross_entropy(model, batch)}

    anybatch.backward(model, loss_fn, batch, micro_batch_size=3, count="forward")
    assert seen == [False] * 3 + [True] * 3


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_exception_of_the_loss_itself_comes_through(error: type[BaseException]) -> None:
    model, batch = net(), batch_of()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    calls: list[int] = []

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise error
        return cross_entropy(model, batch) * torch.rand(())

    before = reference.everything(model)
    with pytest.raises(error):
        anybatch.backward(model, loss_fn, batch, micro_batch_size=2)
    reference.assert_unchanged(reference.everything(model), before)


@pytest.mark.parametrize("verb", ["backward", "step", "planned", "check"])
def test_a_loss_of_an_output_and_a_target_is_told_how_it_is_called(verb: str) -> None:
    model, batch = nn.Linear(4, 3), (torch.randn(8, 4), torch.randint(3, (8,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(out: Any, target: Any) -> torch.Tensor:
        return F.cross_entropy(out, target)

    verbs: dict[str, Any] = {
        "backward": lambda: anybatch.backward(model, loss_fn, batch, micro_batch_size=4),
        "step": lambda: anybatch.TrainStep(model, loss_fn, optimizer)(batch),
        "planned": lambda: anybatch.TrainStep(model, loss_fn, optimizer, memory="64MiB")(batch),
        "check": lambda: anybatch.check(model, loss_fn, batch),
    }
    with pytest.raises(TypeError) as caught:
        verbs[verb]()
    (note,) = caught.value.__notes__
    assert "its 'out' is the model, its 'target' the batch" in note


def test_an_error_of_the_model_itself_gets_no_note_on_the_arguments() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(x)  # type: ignore[operator]
            return found

    def loss_fn(network: Any, batch: Any) -> torch.Tensor:
        return network(batch).mean()  # type: ignore[no-any-return]

    def unknown(model: Any, batch: Any) -> torch.Tensor:
        return model.encode(batch).mean()  # type: ignore[no-any-return]

    for function in (loss_fn, unknown):
        with pytest.raises(AttributeError) as caught:
            anybatch.backward(Broken(), function, torch.randn(4, 2))
        assert not hasattr(caught.value, "__notes__")
