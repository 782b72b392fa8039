"""What is said when BatchNorm may not be split, and what is refused that would go wrong in silence."""

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import anybatch
from anybatch.batch.batches import Part, Splittable, sizes_of
from anybatch.batch.counting import count_samples
from anybatch.options import Options
from anybatch.update.batchnorm import batch_norm_as, coupling_modules, refuse_to_split
from anybatch.update.passes import Task
from anybatch.update.refusals import WhySplit, named
from batchnorm_models import ResNet, assert_bitwise, image_loss, left, norms_of, pictures, plain
from faults import different, facts


def message(cause: WhySplit | None = None, model: nn.Module | None = None) -> str:
    with pytest.raises(anybatch.NotSplittable) as caught:
        refuse_to_split([ResNet() if model is None else model], 3, lambda: cause or WhySplit())
    return str(caught.value)


def cause_of(splittable: Splittable, parts: list[Part], asked: float | None = None) -> WhySplit:
    """What a step says of these parts, whose user asked for this size."""
    options = Options(model=nn.Linear(1, 1), loss_fn=image_loss)
    return Task(options.model, options.loss_fn, count_samples, options.settings(), "refuse", splittable, asked).cause(
        parts
    )


# --- the message -----------------------------------------------------------------------------------------------------


def test_many_modules_are_named_by_the_first_and_the_last() -> None:
    text = message()
    assert text.startswith("stem.1 ... layer4.1.bn2 (17 BatchNorm2d) are in training mode: ")
    assert len(text.splitlines()) <= 14
    with pytest.raises(anybatch.NotSplittable) as caught:
        refuse_to_split([ResNet()], 2)
    assert len(caught.value.modules) == 17


def test_modules_are_grouped_by_kind() -> None:
    models = {f"b{i}": nn.BatchNorm2d(1) for i in range(53)} | {"h": nn.BatchNorm1d(1), "s": nn.SyncBatchNorm(1)}
    assert named(models) == "b0 ... b52 (53 BatchNorm2d), h (BatchNorm1d) and s (SyncBatchNorm)"
    assert named({"a": nn.BatchNorm2d(1), "b": nn.BatchNorm2d(1)}) == "a, b (2 BatchNorm2d)"


CAUSES = {
    "size": (WhySplit("TrainStep", 8, (8, 8, 6)), "micro_batch_size=8 cuts these 22 samples into 3 micro-batches"),
    "size of a window": (WhySplit("TrainStep", 8, (8, 3, 8), batches=2), "micro_batch_size=8 cuts these 19 samples"),
    "memory": (
        WhySplit("backward", None, (8, 8, 6), ran_out=True),
        "Memory ran out with larger pieces: these 22 samples",
    ),
    "memory under a plan": (
        WhySplit("TrainStep", 22, (8, 8, 6), ran_out=True, planned=True),
        "ran out .* under the plan",
    ),
    "window": (WhySplit("TrainStep", None, (4, 4, 4), batches=3), "The window has 3 batches"),
    "plan": (WhySplit("TrainStep", 8, (8, 8, 6), planned=True), "The given plan cuts these 22 samples"),
    "time": (WhySplit(over_time=True), "OverTime cuts the sequences into chunks"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_said(name: str) -> None:
    cause, expected = CAUSES[name]
    text = message(cause)
    assert re.search(expected, text)
    assert sum(bool(re.search(other, text)) for _, other in CAUSES.values()) == 1


def code_in(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("       ")]


@pytest.mark.parametrize("name", CAUSES)
def test_the_lines_of_code_run(name: str) -> None:
    """What is offered is pasted as it is, on what the user has."""
    cause, _ = CAUSES[name]
    lines = code_in(message(cause))
    assert len(lines) == (3 if name == "time" else 4)
    for text in lines:
        line = f"anybatch.backward(model, loss_fn, batch, micro_batch_size=8, {text})" if text[:5] == "batch" else text
        torch.manual_seed(0)
        model, batch = ResNet(), pictures(22, dtype=torch.float32)
        names: dict[str, Any] = {
            "anybatch": anybatch, "torch": torch, "model": model, "loss_fn": image_loss, "batch": batch,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        }  # fmt: skip
        if "memory=" in line:
            compile(line, name, "eval")  # planning takes seconds
            continue
        exec(f"result = {line}" if "=" not in line.split("(")[0] else line, names)
        if isinstance(names.get("result"), anybatch.TrainStep):
            names["result"](batch)
        if "GroupNorm" in line:
            assert sum(isinstance(module, nn.GroupNorm) for module in model.modules()) == 1
            model(batch["x"])


@pytest.mark.parametrize(("channels", "groups"), [(16, 4), (64, 16), (256, 32), (12, 1), (24, 2), (3, 1), (18, 1)])
def test_a_group_has_several_channels(channels: int, groups: int) -> None:
    """A GroupNorm of as many groups as channels would be an InstanceNorm."""
    text = message(model=nn.Sequential(nn.Conv2d(3, channels, 1), nn.BatchNorm2d(channels)))
    assert f"torch.nn.GroupNorm({groups}, {channels})" in text
    nn.GroupNorm(groups, channels)
    assert "For the first" not in text
    assert "For the first, and likewise for each of the 17:" in message()


def test_the_choices_come_in_order() -> None:
    text = message(CAUSES["size"][0])
    order = [
        "1. The whole batch",
        'memory="free"',
        '2. "ghost"',
        "nn.DataParallel",
        '3. "frozen"',
        "4. A different",
        "Sync",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert 'micro_batch_size=8, batch_norm="ghost"' in text
    assert "Replace micro_batch_size=8" in text


def test_frozen_is_not_offered_where_there_is_nothing_to_freeze_to() -> None:
    text = message(model=nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)))
    assert '"frozen" can\'t be chosen here, since 1 (BatchNorm1d) keeps no running statistics' in text
    assert 'batch_norm="frozen"' not in text


@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 50)), st.integers(1, 50))
def test_memory_is_blamed_only_for_what_is_smaller_than_was_asked_for(rows: int, asked: int | None, tried: int) -> None:
    splittable = Splittable([torch.zeros(rows, 1)])
    size = tried if asked is None else min(asked, tried)
    cause = cause_of(splittable, splittable.plan(size), asked)
    assert cause.sizes == tuple(sizes_of(rows, size))
    assert cause.ran_out == (min(size, rows) < min(rows, asked or rows))


def test_a_window_and_raw_samples_have_causes() -> None:
    window = Splittable([torch.zeros(3, 1), torch.zeros(5, 1)])
    assert cause_of(window, window.plan(None)) == WhySplit(sizes=(3, 5), batches=2)
    assert cause_of(window, window.plan(2)).ran_out
    raw = Splittable([[1.0, 2.0, 3.0]], collate=torch.tensor, cost=float)
    assert not cause_of(raw, raw.plan(4), 4).ran_out
    assert cause_of(raw, raw.plan(4)).ran_out


# --- what would be wrong in silence ----------------------------------------------------------------------------------


def test_evaluation_mode_without_running_statistics_couples_the_samples() -> None:
    """Then torch normalises by the batch in both modes."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval()
    assert list(coupling_modules(model)) == ["1"]
    for policy in ("refuse", "frozen"):
        with pytest.raises(anybatch.NotSplittable, match="running statistics"):
            anybatch.backward(
                model, lambda m, x: m(x).square().mean(), torch.randn(4, 3), micro_batch_size=2, batch_norm=policy
            )
    assert "is in evaluation mode without running statistics" in message(model=model)


def test_modules_of_one_name_in_model_and_loss_are_both_found() -> None:
    """Frozen must reach both."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()

    class Loss(nn.Sequential):
        def forward(self, model: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            y: Tensor = self[1](model(x)).square().mean()
            return y

    loss = Loss(nn.Identity(), nn.BatchNorm1d(3).double())
    assert list(coupling_modules(model, loss)) == ["1", "Loss.1"]
    x = torch.randn(6, 3).double()
    before = left(loss)
    anybatch.backward(model, loss, x, micro_batch_size=2, batch_norm="frozen")
    assert_bitwise({n: v for n, v in left(loss).items() if n.startswith("buffer")},
                   {n: v for n, v in before.items() if n.startswith("buffer")})  # fmt: skip


@pytest.mark.parametrize("policy", ["refuse", "ghost"])
def test_a_loss_that_calls_train_is_refused(policy: Any) -> None:
    model, batch = ResNet().double().eval(), pictures()

    def loss(model: Any, batch: Any) -> Tensor:
        model.train()
        return image_loss(model, batch)

    before = left(model)
    with pytest.raises(anybatch.NotSplittable, match=r"stem.1 \(BatchNorm2d\) was in evaluation mode when"):
        anybatch.backward(model, loss, batch, micro_batch_size=4, batch_norm=policy)
    assert_bitwise(left(model), before)
    assert all(not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("is_training", [False, True])
def test_frozen_stays_frozen_when_the_loss_calls_train(is_training: bool) -> None:
    model, batch = ResNet().double().train(is_training), pictures()
    expected = plain(copy.deepcopy(model).eval(), image_loss, batch)

    def loss(model: Any, batch: Any) -> Tensor:
        model.train()
        return image_loss(model, batch)

    anybatch.backward(model, loss, batch, micro_batch_size=4, batch_norm="frozen")
    found = left(model)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_forward_in_evaluation_mode_within_a_loss_sees_the_statistics_from_before(order: str) -> None:
    """Pseudo-labels: under ghost they must not be computed with the statistics of a micro-batch."""
    torch.manual_seed(0)
    model, batch = ResNet().double(), pictures()
    for norm in norms_of(model):
        norm.running_mean.uniform_(), norm.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(batch["x"])
    seen = []

    def quietly(model: Any, batch: Any) -> None:
        model.eval()
        with torch.no_grad():
            seen.append(model(batch["x"]))
        model.train()

    def loss(model: Any, batch: Any) -> Tensor:
        if order == "before":
            quietly(model, batch)
        result = image_loss(model, batch)
        if order == "after":
            quietly(model, batch)
        return result

    whole = copy.deepcopy(model)
    anybatch.backward(model, loss, batch, micro_batch_size=4, batch_norm="ghost")
    torch.testing.assert_close(torch.cat(seen), expected, rtol=1e-12, atol=1e-12)
    anybatch.backward(whole, image_loss, batch, micro_batch_size=4, batch_norm="ghost")
    assert_bitwise(left(model), left(whole))  # and it does not count as a batch


def test_memory_that_ran_out_is_the_cause_that_is_said() -> None:
    """Until callers give a cause the text names none, and nothing that is wrong."""
    model, batch = ResNet(), pictures(dtype=torch.float32)
    calls = []

    def loss(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return image_loss(model, batch)

    before = facts(model)
    with pytest.raises(anybatch.NotSplittable) as caught:
        anybatch.backward(model, loss, batch)
    assert "micro_batch_size" not in str(caught.value)
    assert not different(before, facts(model))


# --- one value a channel ---------------------------------------------------------------------------------------------


def test_a_single_row_at_the_end_is_refused_in_clear_words() -> None:
    model, batch = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(9, 3)
    before = facts(model)
    with pytest.raises(
        anybatch.NotSplittable, match=r"1 \(BatchNorm1d\) gets an input of shape \(1, 3\): one value per channel"
    ):
        anybatch.backward(model, lambda m, x: m(x).mean(), batch, micro_batch_size=4, batch_norm="ghost")
    assert not different(before, facts(model))


def test_a_single_image_has_a_variance_and_is_not_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
    out = anybatch.backward(
        model, lambda m, x: m(x).mean(), torch.randn(3, 3, 8, 8), micro_batch_size=1, batch_norm="ghost"
    )
    assert out.micro_batches == 3


@given(st.integers(3, 60), st.integers(2, 30))
def test_the_sizes_that_are_offered_leave_no_single_row(rows: int, size: int) -> None:
    sizes = sizes_of(rows, size)
    if sizes[-1] != 1 or len(sizes) == 1:
        return
    model = nn.BatchNorm1d(2)
    cause = WhySplit(micro_batch_size=size, sizes=tuple(sizes))
    with batch_norm_as("ghost", [model], len(sizes), lambda: cause), pytest.raises(anybatch.NotSplittable) as caught:
        model(torch.ones(1, 2))
    found = re.search(r"micro_batch_size=([0-9 or]+) leaves", str(caught.value))
    offered = [] if found is None else [int(word) for word in found[1].split(" or ")]
    for one in offered:
        assert 1 not in sizes_of(rows, one)
    assert offered or all(1 in sizes_of(rows, one) for one in range(2, rows))
