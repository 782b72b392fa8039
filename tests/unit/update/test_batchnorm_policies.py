"""BatchNorm in a split batch: refused, or by micro-batch with running statistics as one update, or frozen."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import anybatch
from faults import different, facts


def mean_of(model: Any, batch: torch.Tensor) -> Any:
    return model(batch).pow(2).mean()


def train(model: nn.Module, batch: torch.Tensor, size: int | None, loss: Any = mean_of, **options: Any) -> Any:
    """One step that changes no weights."""
    options = {"batch_norm": "ghost", **options}
    step = anybatch.TrainStep(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=size, **options
    )
    return step(batch)


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same_statistics(model: nn.Module, reference: nn.Module) -> None:
    torch.testing.assert_close(statistics(model), statistics(reference), rtol=1e-12, atol=1e-12)


TEN = torch.tensor([[0.0], [0.0], [10.0], [10.0]])


def network(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    layers = (nn.BatchNorm1d(3, **options), nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 1))
    return nn.Sequential(*layers).to(dtype)


# --- refuse ----------------------------------------------------------------------------------------------------------


def test_a_split_is_refused_with_the_modules_and_the_choices() -> None:
    model, batch = network(), torch.randn(4, 3).double()
    before = facts(model)
    with pytest.raises(anybatch.NotSplittable) as caught:
        train(model, batch, 2, batch_norm="refuse")
    assert caught.value.modules == ("0", "2")
    for text in (
        "0, 2 (2 BatchNorm1d) are in training mode",
        'batch_norm="ghost"',
        'batch_norm="frozen"',
        "The whole batch at once",
    ):
        assert text in str(caught.value)
    assert not different(before, facts(model))


def test_what_is_not_split_or_not_in_training_mode_is_not_refused() -> None:
    model = network()
    assert train(model, torch.randn(4, 3).double(), 4, batch_norm="refuse").micro_batches == 1
    model.eval()
    assert train(model, torch.randn(4, 3).double(), 2, batch_norm="refuse").micro_batches == 2


def test_only_modules_that_couple_samples_are_named() -> None:
    model = nn.ModuleDict(
        {
            "group": nn.GroupNorm(1, 4), "layer": nn.LayerNorm(4), "instance": nn.InstanceNorm1d(4),
            "tracking": nn.InstanceNorm1d(4, track_running_stats=True), "batch": nn.BatchNorm1d(4),
            "no statistics": nn.BatchNorm1d(4, track_running_stats=False), "quiet": nn.BatchNorm1d(4).eval(),
        }
    )  # fmt: skip
    with pytest.raises(anybatch.NotSplittable) as caught:
        anybatch.backward(model, lambda model, x: model["layer"](x).mean(), torch.randn(4, 4), micro_batch_size=2)
    assert caught.value.modules == ("batch", "no statistics")  # InstanceNorm takes each sample by itself


def test_memory_that_runs_out_does_not_split_what_may_not_be_split() -> None:
    model = network()
    calls = []

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        calls.append(len(batch))
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return mean_of(model, batch)

    batch = torch.randn(4, 3).double()
    before = facts(model)
    with pytest.raises(anybatch.NotSplittable):
        train(model, batch, None, loss, batch_norm="refuse")
    assert not different(before, facts(model))


# --- ghost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_statistics_are_those_of_the_whole_batch(dtype: torch.dtype) -> None:
    """[0, 0, 10, 10] as 2 + 2 at momentum 0.1: the mean 5 gives 0.5; two updates would give 1.0."""
    model: Any = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).to(dtype)
    train(model, TEN.to(dtype), 2)
    assert model[0].running_mean.item() == pytest.approx(0.5, rel=1e-6)
    assert model[0].running_var.item() == pytest.approx(0.9 + 0.1 * 100 / 3, rel=1e-6)
    assert model[0].num_batches_tracked.item() == 1


@pytest.mark.parametrize("rows", [6, 7, 10])
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_the_first_layer_sees_what_the_whole_batch_shows_it(rows: int, momentum: float | None) -> None:
    model = network(momentum=momentum)
    whole = copy.deepcopy(model)
    for _ in range(3):
        batch = torch.randn(rows, 3).double() * 3 + 1
        whole(batch)
        out = train(model, batch, 4)
        assert out.micro_batches == -(-rows // 4)
        torch.testing.assert_close(statistics(model[0]), statistics(whole[0]), rtol=1e-12, atol=1e-12)
        assert model[2].num_batches_tracked.item() == whole[2].num_batches_tracked.item()


def test_later_layers_merge_the_activations_that_they_saw() -> None:
    model = network()
    reference = copy.deepcopy(model)
    seen: list[torch.Tensor] = []
    model[1].register_forward_hook(lambda module, args, result: seen.append(result.detach()))
    train(model, torch.randn(10, 3).double(), 4, verify="off")
    reference[2](torch.cat(seen))
    assert_same_statistics(model[2], reference[2])


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 2, 2), (6, 3, 2, 2, 2)])
def test_every_kind_of_batch_norm(shape: tuple[int, ...]) -> None:
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](3).double()
    whole = copy.deepcopy(norm)
    batch = torch.randn(shape).double()
    whole(batch)
    train(norm, batch, 4)
    assert_same_statistics(norm, whole)


def test_a_module_that_is_called_directly() -> None:
    """A loss may go through parts of the model without calling the model itself."""
    model = network()
    whole = copy.deepcopy(model)
    batch = torch.randn(6, 3).double()
    whole[0](batch)
    train(model, batch, 2, lambda model, batch: model[1](model[0](batch)).mean())
    assert_same_statistics(model[0], whole[0])


def shared(model: Any, batch: torch.Tensor) -> Any:
    norm = model[0]
    return model[1](norm(norm(batch) * 2 + 1)).mean()


def two_views(model: Any, batch: torch.Tensor) -> Any:
    return (model(batch) - model(batch * 3 + 1)).pow(2).mean()


class Twice(nn.Module):
    """One BatchNorm at two places of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.norm(x) * 2 + 1))
        return y


def test_a_module_that_is_called_twice_in_a_forward_counts_two_batches() -> None:
    torch.manual_seed(0)
    model: Any = Twice().double()
    batch = torch.cat([torch.randn(4, 3)] * 2).double()  # both halves alike, so that the second call sees the same
    whole = copy.deepcopy(model)
    whole(batch)
    train(model, batch, 4)
    assert model.norm.num_batches_tracked.item() == 2
    torch.testing.assert_close(model.norm.running_mean, whole.norm.running_mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss", [shared, two_views])
def test_a_loss_that_calls_the_model_twice_counts_two_batches(loss: Any) -> None:
    model = network()
    batch = torch.randn(4, 3).double()
    whole = copy.deepcopy(model)
    loss(whole, torch.cat([batch] * 2))
    train(model, torch.cat([batch] * 2), 4, loss)
    assert model[0].num_batches_tracked.item() == whole[0].num_batches_tracked.item() == 2
    torch.testing.assert_close(model[0].running_mean, whole[0].running_mean, rtol=1e-9, atol=1e-9)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


@pytest.mark.parametrize("size", [2, 6], ids=["split", "whole"])
def test_a_checkpoint_does_not_count_twice(size: int) -> None:
    model = Checkpointed(network())
    plain = network()
    batch = torch.randn(6, 3).double()
    train(model, batch, size)
    train(plain, batch, size)
    assert_same_statistics(model.inner, plain)


def test_a_pass_that_counts_does_not_count_as_a_batch() -> None:
    def loss(model: Any, batch: torch.Tensor) -> Any:
        y = model(batch)
        yield "one", anybatch.Mean(y.sum(), len(y))
        yield "other", anybatch.Mean(model[3].weight.sum() * len(y), len(y))

    model, plain = network(), network()
    batch = torch.randn(6, 3).double()
    train(model, batch, 2, loss, count="forward")
    train(plain, batch, 2)
    assert_same_statistics(model, plain)


@pytest.mark.parametrize("policy", ["refuse", "ghost"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_instance_norm_does_not_couple_samples_but_has_running_statistics(policy: str, momentum: float | None) -> None:
    norm = nn.InstanceNorm1d(2, momentum=momentum, track_running_stats=True)  # type: ignore[arg-type]
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(6, 1)).double()
    whole = copy.deepcopy(model)
    batch = torch.randn(7, 2, 3).double()
    whole(batch)
    train(model, batch, 2, batch_norm=policy)
    assert_same_statistics(model, whole)


def test_a_module_that_is_not_called_keeps_its_statistics() -> None:
    model = network()
    before = statistics(model[2])
    train(model, torch.randn(6, 3).double(), 2, lambda model, batch: model[0](batch).mean())
    torch.testing.assert_close(statistics(model[2]), before, rtol=0, atol=0)


# --- what is put back ------------------------------------------------------------------------------------------------


def put_back(model: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in facts(model).items() if name.startswith(("module", "requires"))}


@pytest.mark.parametrize("policy", ["ghost", "frozen"])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_modes_momentum_and_hooks_are_put_back(policy: Any, error: type[BaseException] | None) -> None:
    model = network(momentum=0.3)
    model[2].momentum = None
    model[0].eval() if policy == "ghost" else model[2].eval()
    calls = []

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        calls.append(1)
        result = mean_of(model, batch)
        if error is not None and len(calls) == 2:
            raise error("user")
        return result

    batch = torch.randn(6, 3).double()
    before = facts(model)
    if error is None:
        train(model, batch, 2, loss, batch_norm=policy)
        assert put_back(model) == {name: before[name] for name in put_back(model)}
    else:
        with pytest.raises(error, match="user"):
            train(model, batch, 2, loss, batch_norm=policy, verify="off")
        assert not different(before, facts(model))
    assert len(calls) == (3 if error is None else 2)


# --- frozen ----------------------------------------------------------------------------------------------------------


def test_frozen_normalises_by_running_statistics_and_leaves_them_alone() -> None:
    model = network()
    for norm in (model[0], model[2]):
        norm.running_mean.uniform_()
        norm.running_var.uniform_(0.5, 2.0)
    batch = torch.randn(7, 3).double()
    whole = copy.deepcopy(model).eval()
    mean_of(whole, batch).backward()
    before = statistics(model)
    train(model, batch, 3, batch_norm="frozen")
    torch.testing.assert_close(statistics(model), before, rtol=0, atol=0)
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [2, 6])
def test_frozen_is_frozen_at_every_size(size: int) -> None:
    """Whether a batch is split or not must not show."""
    model = network()
    before = statistics(model)
    train(model, torch.randn(6, 3).double(), size, batch_norm="frozen")
    torch.testing.assert_close(statistics(model), before, rtol=0, atol=0)


def test_frozen_leaves_the_statistics_of_instance_norm_alone_too() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 1)).double()
    before = statistics(model)
    train(model, torch.randn(6, 2, 3).double(), 2, batch_norm="frozen")
    torch.testing.assert_close(statistics(model), before, rtol=0, atol=0)


def test_dropout_stays_on_where_batch_norm_is_frozen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    modes = []
    model.register_forward_pre_hook(lambda *_: modes.append([module.training for module in model]))
    anybatch.backward(
        model, mean_of, torch.ones(4, 3), micro_batch_size=2, batch_norm="frozen", inputs=list(model.parameters()),
        verify="off",
    )  # fmt: skip
    assert modes == [[False, True], [False, True]]
