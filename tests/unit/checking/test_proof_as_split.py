"""What only micro-batches as large as the step's own show, or samples of unlike lengths, and what is said of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Batch = dict[str, Any]


def net(outputs: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs))


def batch_of(rows: int = 96) -> Batch:
    drawn = torch.Generator().manual_seed(1)
    return {"x": torch.randn(rows, 6, generator=drawn), "y": torch.randint(4, (rows,), generator=drawn)}


def of_each(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def hardest_twenty(model: Any, batch: Batch) -> torch.Tensor:
    return of_each(model, batch).sort(descending=True).values[:20].mean()


def without_outliers(model: Any, batch: Batch) -> torch.Tensor:
    each = of_each(model, batch)
    return each[each <= each.kthvalue(min(12, len(each))).values].mean()


def capped_at_ten_by_class(model: Any, batch: Batch) -> torch.Tensor:
    each = of_each(model, batch)
    kept = [each[batch["y"] == label][:10] for label in range(4)]
    return torch.cat(kept).mean()


def more_than_forty(model: Any, batch: Batch) -> torch.Tensor:
    each = of_each(model, batch)
    return each.mean() if len(each) <= 40 else each.square().mean()


@pytest.mark.parametrize("loss_fn", [hardest_twenty, without_outliers, capped_at_ten_by_class, more_than_forty])
def test_what_begins_with_more_samples_than_a_few_is_refused(loss_fn: Any) -> None:
    with pytest.raises(anybatch.NotSplittable, match="24 \\+ 24"):
        anybatch.backward(net(), loss_fn, batch_of(), micro_batch_size=24)


def test_a_bound_that_only_some_micro_batches_reach_is_refused() -> None:
    model, batch = net(1), batch_of()
    batch["y"] = torch.linspace(0.2, 0.9, 96)  # few samples, of both ends, have a mean as the whole batch has

    def bounded(model: Any, batch: Batch) -> torch.Tensor:
        mean: torch.Tensor = (
            (0 * model(batch["x"]).squeeze(1) + batch["y"] - model[2].bias + 9).abs().mean().clamp(min=9.6)
        )
        return mean

    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(model, bounded, batch, micro_batch_size=8)


def noisy(rows: int = 96) -> Batch:
    batch = batch_of(rows)
    batch["value"] = batch["x"][:, 0] + 0.1 * batch["x"][:, 1]
    batch["value"][rows // 3] = 9.0  # one of all samples, and not in the first or last micro-batch
    return batch


def errors_of(model: Any, batch: Batch) -> torch.Tensor:
    error: torch.Tensor = model(batch["x"]).squeeze(1) - batch["value"]
    return error


def all_by_the_largest(model: Any, batch: Batch) -> torch.Tensor:
    error = errors_of(model, batch)
    return error.abs().mean() if (error.abs() > 6).any() else error.square().mean()


def no_more_than(model: Any, batch: Batch) -> torch.Tensor:
    loss = errors_of(model, batch).square().mean()
    return loss * (3 / loss.item()) if loss.item() > 3 else loss


def in_scale(model: Any, batch: Batch) -> torch.Tensor:
    error = errors_of(model, batch)
    return (error / max(6.0, error.abs().max().item())).square().mean()


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("loss_fn", [all_by_the_largest, no_more_than, in_scale])
def test_a_branch_that_most_micro_batches_take_alike_is_refused(loss_fn: Any, size: int) -> None:
    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(net(1), loss_fn, noisy(), micro_batch_size=size)


def each_by_its_own(model: Any, batch: Batch) -> torch.Tensor:
    error = errors_of(model, batch).abs()
    if (error > 6).any():
        return torch.where(error > 6, 12 * error - 36, error.square()).mean()
    return error.square().mean()


def without_missing(model: Any, batch: Batch) -> Any:
    kept = batch["value"] < 6
    if kept.all():
        return anybatch.Mean(errors_of(model, batch).square().sum(), len(kept))
    some = {name: value[kept] for name, value in batch.items()}
    return anybatch.Mean(errors_of(model, some).square().sum(), kept.sum())


def noise_of_each(model: Any, batch: Batch) -> torch.Tensor:
    moved = {**batch, "x": batch["x"] + 0.1 * torch.randn_like(batch["x"])}
    if not torch.isfinite(error := errors_of(model, moved)).all():
        return 0 * error.nan_to_num().sum()
    return error.square().mean()


def longest_first(model: Any, batch: Batch) -> torch.Tensor:
    order = batch["value"].argsort(descending=True)
    return errors_of(model, {name: value[order] for name, value in batch.items()})[order.argsort()].square().mean()


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("loss_fn", [each_by_its_own, without_missing, noise_of_each, longest_first])
def test_guards_around_parts_of_a_sum_pass_in_any_order(loss_fn: Any, size: int) -> None:
    proof = anybatch.backward(net(1), loss_fn, noisy(), micro_batch_size=size).proof
    assert proof is not None
    assert (proof.outcome, proof.by, proof.note) == ("exact", "comparison", "")


def critic(model: Any, batch: Batch) -> torch.Tensor:
    scores = model(batch["x"])[:, 0]
    mean: torch.Tensor = 1000 * (scores - scores.detach()).mean()
    return mean


def penalty(model: Any, batch: Batch) -> torch.Tensor:
    points = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    mean: torch.Tensor = (slope.norm(dim=1) - 1).square().mean()
    return mean


def bounded_by_itself(model: Any, batch: Batch) -> torch.Tensor:
    weights: torch.Tensor = model[0].weight.abs().sum().clamp(max=2)
    return of_each(model, batch).clamp(max=1.2).mean() + weights


@pytest.mark.parametrize("loss_fn", [critic, penalty, bounded_by_itself])
def test_what_adds_up_passes_also_where_its_value_is_nothing_or_can_not_be_had_alone(loss_fn: Any) -> None:
    model, twin, batch = net(), net().double(), batch_of()
    out = anybatch.backward(model, loss_fn, batch, micro_batch_size=24)
    loss_fn(twin, {"x": batch["x"].double(), "y": batch["y"]}).backward()
    assert out.proof is not None
    assert out.proof.exact
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        if one.grad is not None or other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, check_dtype=False, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", [67, 68])
def test_a_mean_over_padding_is_refused_whatever_its_lengths(seed: int) -> None:
    """The longest of the raw samples may be many, so that both parts of a few have one."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 15, (64,), generator=drawn).tolist()
    raw = [torch.randint(1, 20, (length,), generator=drawn) for length in lengths]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 20))

    def padded(samples: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def over_all(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    with pytest.raises(anybatch.NotSplittable, match="padded"):
        anybatch.backward(model, over_all, raw, micro_batch_size=8, collate=padded)


@pytest.mark.parametrize("missing", [float("nan"), -999.0])
def test_the_count_of_numbers_that_are_not_missing_is_found(missing: float) -> None:
    batch = batch_of()
    values = torch.randn(96, 4)
    values[torch.rand(96, 4) < torch.linspace(0.1, 0.9, 96)[:, None]] = missing
    batch["target"] = values

    def there(target: torch.Tensor) -> torch.Tensor:
        return ~target.isnan() if missing != missing else target != missing

    def mean_of_those(model: Any, batch: Batch) -> torch.Tensor:
        taken = there(batch["target"])
        return F.smooth_l1_loss(model(batch["x"])[taken], batch["target"][taken])

    with pytest.raises(anybatch.NotSplittable, match="With the count below") as caught:
        anybatch.backward(net(), mean_of_those, batch, micro_batch_size=12)
    line = str(caught.value).rpartition("count=")[2]
    found = eval(line, {"torch": torch})
    model, twin = net(), net()
    anybatch.backward(model, mean_of_those, batch, micro_batch_size=12, count=found)
    mean_of_those(twin, batch).backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_an_error_of_one_micro_batch_says_what_was_cut() -> None:
    batch = {"x": torch.randn(12, 6), "near": torch.rand(12, 12), "y": torch.randint(4, (12,))}

    def graph(model: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(batch["near"] @ model(batch["x"]), batch["y"])

    with pytest.raises(RuntimeError) as caught:
        anybatch.backward(net(), graph, batch, micro_batch_size=4, verify="off")
    (note,) = caught.value.__notes__
    assert "micro-batch 1 of 3" in note
    assert "batch['near'] (12, 12)" in note
    assert "broadcast=" in note
    with pytest.raises(RuntimeError) as caught:
        anybatch.backward(net(), lambda m, b: m(b["x"].T).mean(), batch)  # whole, so nothing was cut
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("kept", [0, 2, 30])
def test_micro_batches_that_count_nothing_show_nothing(kept: int) -> None:
    batch = batch_of()
    batch["y"] = torch.where(torch.arange(96) < kept, batch["y"], -100)

    def labelled(model: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    model, twin = net(), net()
    anybatch.backward(model, labelled, batch, micro_batch_size=6, count=anybatch.count_tokens("y"))
    if kept:
        labelled(twin, batch).backward()
        torch.testing.assert_close(model[2].weight.grad, twin[2].weight.grad)


def test_a_number_that_is_not_finite_shows_nothing() -> None:
    batch = batch_of()
    batch["x"][-1] = float("inf")  # in the last micro-batch, not among the few

    def mean(model: Any, batch: Batch) -> torch.Tensor:
        nothing: torch.Tensor = 0 * batch["x"].sum()
        return of_each(model, batch).mean() + nothing

    optimizer = torch.optim.SGD((model := net()).parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    assert anybatch.TrainStep(model, mean, optimizer, micro_batch_size=12, scaler=scaler)(batch).skipped


def near_samples(model: Any, batch: Batch) -> torch.Tensor:
    near = torch.cdist(batch["x"], batch["x"]).topk(3, largest=False).indices
    out: torch.Tensor = model(batch["x"])
    return (out[:, None] - out[near]).square().mean()


def views(model: Any, batch: Batch) -> torch.Tensor:
    first, second = model(batch["x"]).view(2, -1, 4)
    return F.mse_loss(first, second)


def neighbours(model: Any, batch: Batch) -> torch.Tensor:
    out = model(batch["x"])
    return F.mse_loss(out[0::2], out[1::2])


@pytest.mark.parametrize(
    ("loss_fn", "size", "said"), [(near_samples, 5, "gradient together than in parts"), (views, 8, "as chunk.2. does")]
)
def test_a_loss_that_runs_no_smaller_part_is_compared_in_its_own_micro_batches(
    loss_fn: Any, size: int, said: str
) -> None:
    batch = {name: value[:24] for name, value in batch_of().items()}
    with pytest.raises(anybatch.NotSplittable, match=f"{said}(.|\\n)*no micro_batch_size"):
        anybatch.backward(net(), loss_fn, batch, micro_batch_size=size)


def test_pairs_that_stay_together_are_proved_by_their_gradients() -> None:
    batch = {name: value[:24] for name, value in batch_of().items()}
    proof = anybatch.backward(net(), neighbours, batch, micro_batch_size=8).proof
    assert proof is not None
    assert (proof.outcome, proof.by, proof.group) == ("exact", "comparison", 2)


class LargestSoFar(nn.Module):
    """Divides by the largest loss so far, which only a larger one changes."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, model: Any, batch: Batch) -> torch.Tensor:
        losses = of_each(model, batch)
        self.largest = torch.maximum(self.largest, losses.detach().max())
        return (losses / self.largest).mean()


@pytest.mark.parametrize("seed", range(4))
def test_a_largest_value_so_far_is_refused_whichever_micro_batch_has_it(seed: int) -> None:
    batch = {name: value[seed * 16 : seed * 16 + 16] for name, value in batch_of().items()}
    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(net(), LargestSoFar(), batch, micro_batch_size=5)


class EveryFourth(nn.Module):
    """Does something in every fourth call: another loss, or only a note of it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.calls, self.noted = factor, 0, torch.zeros(())

    def forward(self, model: Any, batch: Batch) -> torch.Tensor:
        self.calls += 1
        loss = of_each(model, batch).mean()
        if self.calls % 4:
            return loss
        self.noted = loss.detach()
        return self.factor * loss


@pytest.mark.parametrize("size", [4, 12])
def test_a_counter_is_refused_that_matters_only_in_a_later_call(size: int) -> None:
    with pytest.raises(anybatch.NotSplittable, match=r"`self\.calls` of EveryFourth was counted"):
        anybatch.backward(net(), EveryFourth(0.5), batch_of(), micro_batch_size=size)
    proof = anybatch.backward(net(), EveryFourth(1.0), batch_of(), micro_batch_size=size).proof
    assert proof is not None
    assert (proof.outcome, proof.by, proof.note) == ("exact", "comparison", "")


@pytest.mark.parametrize("loss_fn", [EveryFourth(0.5), EveryFourth(1.0), all_by_the_largest, each_by_its_own])
@pytest.mark.usefixtures("constant_times")
def test_a_plan_compares_as_many_losses_as_it_has_room_for(loss_fn: Any) -> None:
    model, batch = net(1 if loss_fn in (all_by_the_largest, each_by_its_own) else 4), noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    most = anybatch.plan(model, loss_fn, batch, optimizer, memory="1GiB", verify="off")
    step = anybatch.TrainStep(
        model, loss_fn, optimizer, memory=most.smallest_bytes + (most.peak_bytes - most.smallest_bytes) // 4
    )
    if loss_fn is all_by_the_largest or getattr(loss_fn, "factor", 1.0) < 1:
        with pytest.raises(anybatch.NotSplittable):
            step(batch)
    else:
        assert (out := step(batch)).proof is not None
        assert out.micro_batches > 1
        assert out.proof.exact


def test_pairs_are_not_parted_to_count_further() -> None:
    calls = []

    def counted_pairs(model: Any, batch: Batch) -> torch.Tensor:
        calls.append(len(batch["x"]))
        return neighbours(model, batch)

    batch = {name: value[:24] for name, value in batch_of().items()}
    proof = anybatch.backward(net(), counted_pairs, batch, micro_batch_size=12).proof
    assert proof is not None
    assert proof.exact
    assert calls == [12, 12]  # nothing of the proof is left


def by_class(model: Any, batch: Batch) -> torch.Tensor:
    counts = torch.bincount(batch["y"], minlength=4).clamp(min=1)
    return F.cross_entropy(model(batch["x"]), batch["y"], weight=1 / counts)


def hardest_of_each(model: Any, batch: Batch) -> torch.Tensor:
    out = F.normalize(model(batch["x"]), dim=1)
    apart, same = torch.cdist(out, out), batch["y"][:, None] == batch["y"]
    return F.relu((apart * same).amax(1) - (apart + 9 * same).amin(1) + 0.3).mean()


@pytest.mark.parametrize("loss_fn", [by_class, hardest_of_each])
@pytest.mark.parametrize("size", [1, 2])
def test_what_shows_among_more_than_two_samples_is_refused(loss_fn: Any, size: int) -> None:
    batch = {name: value[:16] for name, value in batch_of().items()}
    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(net(), loss_fn, batch, micro_batch_size=size)


def penalised(each: Callable[[torch.Tensor, int], torch.Tensor], *, after: int = 0) -> Any:
    """A loss that differentiates by its inputs, from a call on."""
    calls = [0]

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        losses = F.cross_entropy(model(x), batch["y"], reduction="none")
        (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        calls[0] += 1
        penalty: torch.Tensor = 0.1 * slope.square().sum(1).mean() * (calls[0] > after)
        return each(losses, len(x)) + penalty

    return loss_fn


@pytest.mark.parametrize("size", [12, 24])
def test_a_loss_that_differentiates_is_compared_in_its_own_micro_batches(size: int) -> None:
    def hardest(losses: torch.Tensor, rows: int) -> torch.Tensor:
        return losses.topk(min(10, rows)).values.mean()

    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(net(), penalised(hardest), batch_of(), micro_batch_size=size)
    result = anybatch.backward(net(), penalised(lambda losses, _: losses.mean()), batch_of(), micro_batch_size=size)
    assert result.proof is not None
    assert (result.proof.exact, result.proof.by) == (True, "comparison")


def test_a_counter_in_a_loss_that_differentiates_is_seen_where_it_matters_in_a_later_call() -> None:
    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(net(), penalised(lambda losses, _: losses.mean(), after=5), batch_of(), micro_batch_size=8)
