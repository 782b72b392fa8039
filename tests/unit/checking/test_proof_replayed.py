"""The loss of the whole first batch, from what the model gave in its micro-batches.

How this could be wrong: it is silent where it can't look, refuses what only differs in value, or leaves something.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, Batch], Any]
ROWS, SIZE = 64, 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4))


def batch_of() -> Batch:
    torch.manual_seed(1)
    return {"x": torch.randn(ROWS, 6), "y": torch.randint(4, (ROWS,))}


def each(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def hardest(model: Any, batch: Batch) -> torch.Tensor:
    losses = each(model, batch)
    return losses.topk(min(20, len(losses))).values.mean()


def above_a_count(model: Any, batch: Batch) -> torch.Tensor:
    losses, of_one = each(model, batch), batch["y"] == 1
    return losses.mean() + losses[of_one].sum() / len(losses) * (int(of_one.sum()) > 10)


def hardest_yielded(model: Any, batch: Batch) -> Iterator[torch.Tensor]:
    losses = each(model, batch)
    yield losses.topk(min(20, len(losses))).values.mean()
    yield each(model, batch).mean()


def hardest_of_two(model: Any, batch: Batch) -> torch.Tensor:
    losses = each(model, batch) + each(model, {**batch, "x": -batch["x"]})
    return losses.topk(min(20, len(losses))).values.mean()


class Centred(torch.autograd.Function):
    """Has the value of what it is given, and of many samples another gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return gradient - 0.5 * gradient.mean(0) if len(gradient) > 20 else gradient


def of_many_in_the_gradient(model: Any, batch: Batch) -> torch.Tensor:
    centred: torch.Tensor = Centred.apply(model(batch["x"]))  # type: ignore[no-untyped-call]
    return F.cross_entropy(centred, batch["y"])


def of_another_call_if_many(model: Any, batch: Batch) -> torch.Tensor:
    """What the second call gives has no gradient in micro-batches."""
    loss, other = each(model, batch).mean(), model(-batch["x"])
    return loss + 0.1 * other.std(0).mean() if len(batch["x"]) > 20 else loss


@pytest.mark.parametrize(
    "loss_fn",
    [hardest, above_a_count, hardest_yielded, hardest_of_two, of_many_in_the_gradient, of_another_call_if_many],
)
@pytest.mark.parametrize("verb", ["step", "backward"])
def test_what_only_many_samples_show_is_stopped_before_the_first_update(loss_fn: Loss, verb: str) -> None:
    model, batch = net(), batch_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=SIZE)
    for _ in range(2):  # and again if it is tried again
        torch.manual_seed(3)
        drawn = torch.get_rng_state()
        with pytest.raises(anybatch.NotSplittable, match="The loss of all 64 samples"):
            step(batch) if verb == "step" else anybatch.backward(model, loss_fn, batch, micro_batch_size=SIZE)
        assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    assert not model._forward_hooks
    assert "forward" not in vars(model)
    assert step.updates == 0


class Chosen(nn.Module):
    """Gives some of the samples nothing: a number of them, or a share."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.net, self.most = net(), most

    def forward(self, x: torch.Tensor) -> Any:
        out = self.net(x)
        chosen = out.sum(1).topk(min(len(x), self.most)).indices
        return torch.zeros_like(out).index_copy(0, chosen, out[chosen])


def test_a_model_that_takes_a_number_of_samples() -> None:
    with pytest.raises(anybatch.NotSplittable, match="couples the samples"):
        anybatch.backward(Chosen(20), lambda m, b: each(m, b).mean(), batch_of(), micro_batch_size=SIZE)
    result = anybatch.backward(Chosen(99), lambda m, b: each(m, b).mean(), batch_of(), micro_batch_size=SIZE)
    assert result.proof is not None
    assert result.proof.exact


def test_what_the_short_last_micro_batch_alone_shows() -> None:
    """Half a percent of the gradient."""

    def larger_if_few(model: Any, batch: Batch) -> torch.Tensor:
        return each(model, batch).mean() * (1.03 if len(batch["x"]) < 12 else 1.0)

    model = net()
    step = anybatch.TrainStep(model, larger_if_few, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=27)
    with pytest.raises(anybatch.NotSplittable, match="The loss of all 64 samples"):
        step(batch_of())


def test_what_the_short_last_micro_batch_shows_that_calls_the_model_less_often() -> None:
    def penalised_if_many(model: Any, batch: Batch) -> torch.Tensor:
        loss = each(model, batch).mean()
        return loss + 0.1 * model(batch["x"]).square().mean() if len(batch["x"]) >= 12 else loss

    model = net()
    step = anybatch.TrainStep(
        model, penalised_if_many, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=27
    )
    with pytest.raises(anybatch.NotSplittable, match=r"as 27 \+ 10 than whole"):
        step(batch_of())


def of_parts(model: Any, batch: Batch) -> torch.Tensor:
    """Runs what is within the model, so that nothing stands in for it."""
    return F.cross_entropy(model[3](model[1](model[0](batch["x"]))), batch["y"])


def of_some_rows(model: Any, batch: Batch) -> Any:
    chosen = batch["y"] > 1
    losses = F.cross_entropy(model(batch["x"][chosen]), batch["y"][chosen], reduction="sum")
    return anybatch.Mean(losses, int(chosen.sum()))


def twice_where_some_are(model: Any, batch: Batch) -> Any:
    """Calls the model once more in some of the micro-batches."""
    losses, chosen = each(model, batch).sum(), (batch["y"] == 1) & (batch["x"][:, 0] > 1)
    if chosen.any():
        losses = losses + each(model, {name: value[chosen] for name, value in batch.items()}).sum()
    return anybatch.Mean(losses, len(batch["x"]))


def twice_by_chance(model: Any, batch: Batch) -> torch.Tensor:
    loss = each(model, batch).mean()
    return loss + 0.1 * model(batch["x"]).square().mean() if torch.rand(()) < 0.5 else loss


def with_noise(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]) + 0.1 * torch.randn(len(batch["x"]), 4), batch["y"])


def with_a_value_beside(model: Any, batch: Batch) -> torch.Tensor:
    out = model(batch["x"])
    return F.cross_entropy(out, batch["y"]) + (out.std() - out.std()).detach()  # type: ignore[no-any-return]


def in_another_order(model: Any, batch: Batch) -> torch.Tensor:
    order = batch["y"].argsort()
    return F.cross_entropy(model(batch["x"][order])[order.argsort()], batch["y"])


def in_low_precision(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"]).to(torch.bfloat16)


def on_a_shared_input(model: Any, batch: Batch) -> torch.Tensor:
    """Calls a model of two inputs, one of which is no sample's."""
    losses = F.cross_entropy(model(batch["x"], torch.eye(4)), batch["y"], reduction="none")
    return losses.topk(min(20, len(losses))).values.mean()


def in_place(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).mul_(2), batch["y"])


@pytest.mark.parametrize(
    "loss_fn",
    [
        of_parts, of_some_rows, twice_where_some_are, twice_by_chance, with_noise, with_a_value_beside,
        in_another_order, in_low_precision, in_place,
    ],
)  # fmt: skip
def test_a_mean_over_the_samples_passes(loss_fn: Loss) -> None:
    model = net()
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=SIZE)
    for _ in range(2):
        result = step(batch_of())
        assert result.proof is not None
        assert result.proof.outcome == "exact"
    assert not model._forward_hooks


def test_an_input_that_all_micro_batches_share() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
            return self.net(x) @ turn  # type: ignore[no-any-return]

    with pytest.raises(anybatch.NotSplittable, match="The loss of all 64 samples"):
        anybatch.backward(Turned(), on_a_shared_input, batch_of(), micro_batch_size=SIZE)


def test_it_is_the_same_step_bit_for_bit() -> None:
    def run(verify: Any) -> list[torch.Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
            return each(model, batch).mean()

        step = anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=SIZE, verify=verify)
        torch.manual_seed(5)
        for _ in range(3):
            step(batch_of() | {"x": torch.randn(ROWS, 6)})
        return [one.detach() for one in model.parameters()]

    assert all(map(torch.equal, run("first"), run("off")))


def test_a_warning_instead_where_that_is_asked_for() -> None:
    with pytest.warns(anybatch.AnyBatchWarning, match="The loss of all 64 samples"):
        anybatch.backward(net(), hardest, batch_of(), micro_batch_size=SIZE, verify="warn")


def test_a_loss_in_low_precision_is_not_refused_for_its_rounding() -> None:
    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        return each(model, batch).mean()

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=SIZE, autocast=torch.bfloat16)
    assert step(batch_of()).micro_batches == ROWS // SIZE


def test_an_output_that_can_not_be_kept_disturbs_nothing() -> None:
    """A tensor made in inference mode has no versions."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.inference_mode():
                beside = x.sum(1)
            return self.net(x), beside

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"])[0], batch["y"])

    proof = anybatch.backward(Beside(), loss_fn, batch_of(), micro_batch_size=SIZE).proof
    assert proof is not None
    assert proof.exact
