"""Calls of loss functions and dropouts as they are seen, and that nobody else can tell that they are."""

import copy
import inspect
import math
import pickle
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import cross_entropy as imported_before
from torch.utils.checkpoint import checkpoint

from anybatch.doctor.recorder import Doctor
from anybatch.doctor.samples.losscalls import DROPOUTS, LOSSES, CurrentRoot
from anybatch.records.events import DropoutCall
from anybatch.records.lossfacts import Evaluated, LossCall
from anybatch.report.series import series_of
from loss_calls import patched


@contextmanager
def seen(root: CurrentRoot | None = None, *, values: bool = True) -> Iterator[list[Any]]:
    found: list[Any] = []
    with patched(found.append, root) as recording:
        recording.sampled_much = values
        yield found


def one(call: Callable[[], object], root: CurrentRoot | None = None, *, values: bool = True) -> LossCall:
    with seen(root, values=values) as found:
        call()
    assert len(found) == 1
    fact = found[0]
    assert isinstance(fact, LossCall)
    return fact


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_a_mean_over_classes_with_ignored_targets() -> None:
    x, y = logits(6, 4), torch.tensor([0, 1, -100, 3, -100, 1])
    fact = one(lambda: nn.CrossEntropyLoss()(x, y))
    assert (fact.function, fact.input_shape, fact.target_shape, fact.classes) == ("cross_entropy", (6, 4), (6,), 4)
    assert (fact.items, fact.ignored, fact.target_classes, fact.reduction) == (4, 2, 3, "mean")
    assert fact.value == pytest.approx(float(F.cross_entropy(x, y).detach()))
    assert fact.target_mean == pytest.approx(1.25)
    assert fact.low == pytest.approx(float(x.detach().min()))
    assert not fact.normalised
    assert not fact.log_normalised
    assert fact.file == __file__
    line = inspect.getsource(test_a_mean_over_classes_with_ignored_targets).splitlines().index(
        "    fact = one(lambda: nn.CrossEntropyLoss()(x, y))"
    )  # fmt: skip
    assert fact.line == inspect.getsourcelines(test_a_mean_over_classes_with_ignored_targets)[1] + line


def test_probabilities_and_their_logarithms_are_told() -> None:
    x, y = logits(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    assert one(lambda: F.cross_entropy(x.softmax(-1), y)).normalised is True
    assert one(lambda: F.cross_entropy(x.log_softmax(-1), y)).log_normalised is True
    assert one(lambda: F.nll_loss(x.log_softmax(-1), y)).log_normalised is True
    assert one(lambda: F.nll_loss(x, y)).log_normalised is False
    assert one(lambda: F.cross_entropy(x.softmax(0), y)).normalised is False
    maps = logits(2, 3, 5, 5)
    assert one(lambda: F.cross_entropy(maps.softmax(1), torch.zeros(2, 5, 5).long())).normalised is True
    zeros = torch.zeros(6, 4)
    assert one(lambda: F.binary_cross_entropy_with_logits(x.sigmoid(), zeros)).normalised is True
    assert one(lambda: F.binary_cross_entropy_with_logits(x, zeros)).normalised is False


def test_all_ignored_is_counted_even_where_values_are_not_read() -> None:
    fact = one(lambda: F.cross_entropy(logits(3, 4), torch.full((3,), -100)), values=False)
    assert (fact.items, fact.ignored) == (0, 3)
    assert fact.value is not None
    assert math.isnan(fact.value)
    many = torch.full((1 << 17,), -100)
    assert one(lambda: F.cross_entropy(logits(1 << 17, 2), many), values=False).items == 0
    many[:] = 1
    assert one(lambda: F.cross_entropy(logits(1 << 17, 2), many), values=False).items == -1


def test_shapes_that_broadcast_are_recorded_as_they_are() -> None:
    with pytest.warns(UserWarning, match="target size"):
        fact = one(lambda: F.mse_loss(logits(6, 1), torch.zeros(6)))
    assert (fact.input_shape, fact.target_shape, fact.items) == ((6, 1), (6,), 36)
    assert one(lambda: F.mse_loss(logits(6), torch.zeros(6))).items == 6


def test_reduction_as_old_arguments_say_it() -> None:
    assert one(lambda: F.l1_loss(logits(6), torch.zeros(6), reduction="sum")).reduction == "sum"
    with pytest.warns(UserWarning, match="deprecated"):
        assert one(lambda: F.l1_loss(logits(6), torch.zeros(6), size_average=False)).reduction == "sum"
    assert one(lambda: F.cross_entropy(logits(2, 3), torch.zeros(2).long(), reduction="none")).value is None


def test_targets_with_a_gradient() -> None:
    other = nn.Linear(4, 4)
    flowing = one(lambda: F.mse_loss(logits(6, 4), 0.5 + 0.9 * other(torch.ones(6, 4))))
    assert flowing.target_requires_grad
    assert flowing.target_top[:3] == ("AddBackward0", "MulBackward0", "AddmmBackward0")
    assert not one(lambda: F.mse_loss(logits(6, 4), other(torch.ones(6, 4)).detach())).target_requires_grad
    assert not one(lambda: F.mse_loss(logits(6, 4), torch.ones(6, 4, requires_grad=True))).target_requires_grad


TOKENS = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_by_how_much_targets_are_shifted(shift: int, cut: bool, padded: bool) -> None:
    """The loop shifts by one and gives equal lengths, the model cuts its predictions, or it pads the targets."""
    length = 10
    tokens = TOKENS[:, :length]
    targets = TOKENS[:, shift : shift + length].clone()
    if cut:
        targets = targets[:, : length - 1]
    if padded:
        targets[:, 0] = -100
    root = CurrentRoot(0, (tokens.clone(),), {"labels": targets.clone(), "attention_mask": torch.ones(3, length)})
    x = logits(targets.numel(), 50)
    assert one(lambda: F.cross_entropy(x, targets.reshape(-1)), root).shift == shift
    named = CurrentRoot(0, ({"input_ids": tokens, "labels": targets},), {})
    assert one(lambda: F.cross_entropy(x, targets.reshape(-1)), named).shift == shift


def test_unrelated_or_ambiguous_targets_have_no_shift() -> None:
    x = logits(30, 50)
    root = CurrentRoot(0, (TOKENS[:, :10],), {})
    assert one(lambda: F.cross_entropy(x, TOKENS.flip(0)[:, :10].reshape(-1)), root).shift is None
    same = torch.full((3, 10), 7)
    assert one(lambda: F.cross_entropy(x, same.reshape(-1)), CurrentRoot(0, (same,), {})).shift is None
    assert one(lambda: F.cross_entropy(logits(3, 4), torch.tensor([1, 2, 3])), root).shift is None
    assert (
        one(lambda: F.cross_entropy(x, TOKENS[:, 1:11].reshape(-1)), CurrentRoot(0, (logits(3, 10),), {})).shift is None
    )


def test_only_calls_with_autograd_on_count_and_each_once() -> None:
    x, y = logits(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    with seen() as found:
        with torch.no_grad():
            F.cross_entropy(x, y)
        assert found == []
        checkpoint(lambda a: F.cross_entropy(a, y), x, use_reentrant=False).backward()
        assert len(found) == 1
        F.multilabel_soft_margin_loss(x, torch.zeros(6, 4))
        F.smooth_l1_loss(x, torch.zeros(6, 4), beta=0.0)  # calls l1_loss in some versions
        assert len(found) == 3
        imported_before(x, y)
        assert len(found) == 4


def test_all_functions_take_what_they_took_and_give_what_they_gave() -> None:
    x, y = logits(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    signs = torch.ones(6)
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: F.cross_entropy(x, y, label_smoothing=0.1),
        lambda: F.cross_entropy(x, x.detach().softmax(-1)),
        lambda: F.nll_loss(x, y, torch.ones(4), ignore_index=1),
        lambda: F.kl_div(x, x.detach().softmax(-1), reduction="batchmean"),
        lambda: F.gaussian_nll_loss(x, torch.zeros(6, 4), torch.ones(6, 4)),
        lambda: F.poisson_nll_loss(x, torch.ones(6, 4)),
        lambda: F.margin_ranking_loss(x[:, 0], x[:, 1], signs),
        lambda: F.hinge_embedding_loss(x[:, 0], signs),
        lambda: F.triplet_margin_loss(x, x * 2, x + 1),
        lambda: F.cosine_embedding_loss(x, x * 2, signs),
        lambda: F.huber_loss(x, torch.zeros(6, 4), delta=0.5),
        lambda: F.multi_margin_loss(x, y),
        lambda: F.ctc_loss(x.log_softmax(-1).unsqueeze(1), y[1:3], torch.tensor([6]), torch.tensor([2])),
        lambda: nn.BCELoss(weight=torch.ones(4))(x.sigmoid(), torch.zeros(6, 4)),
    ]
    plain = [call() for call in calls]
    with seen() as found:
        again = [call() for call in calls]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert len(found) == len(calls)
    assert all(fact.value == pytest.approx(float(a.detach())) for fact, a in zip(found, plain, strict=True))
    with seen(), pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(x, y[:3])


def test_everything_is_put_back() -> None:
    before = {name: (getattr(F, name), getattr(F, name).__code__) for name in (*LOSSES, *DROPOUTS)}
    attention, names = F.scaled_dot_product_attention, set(vars(F))
    with seen(), seen():
        assert F.scaled_dot_product_attention is attention
    with pytest.raises(KeyError), seen():
        raise KeyError
    assert all(getattr(F, name) is f and f.__code__ is code for name, (f, code) in before.items())
    assert set(vars(F)) == names


def test_two_at_once_each_see_one_call() -> None:
    with seen() as outer, seen() as inner:
        F.mse_loss(logits(3), torch.zeros(3))
    assert len(outer) == len(inner) == 1


def test_others_meet_the_functions_they_know() -> None:
    signature = inspect.signature(F.cross_entropy)
    kept = types.SimpleNamespace(loss=F.cross_entropy, dropout=F.dropout)
    with seen() as found:
        assert inspect.signature(F.cross_entropy) == signature
        assert pickle.loads(pickle.dumps(kept)).loss is F.cross_entropy is imported_before
        pickle.loads(pickle.dumps(nn.TransformerEncoderLayer(4, 2)))
        copy.deepcopy(nn.CrossEntropyLoss())
        assert inspect.getsource(F.cross_entropy).startswith("def cross_entropy")
        x = logits(6, 4)

        class Seen(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                names.append(func)
                return func(*args, **(kwargs or {}))

        names: list[Any] = []
        with Seen():
            F.mse_loss(x, torch.zeros(6, 4))
        assert F.mse_loss in names
        assert len(found) == 1
        batched = torch.func.vmap(lambda a: F.mse_loss(a, torch.zeros(4)))(x)
        assert batched.shape == (6,)
        traced = torch.fx.symbolic_trace(Scripted())
        assert torch.equal(traced(x), Scripted()(x))


class Scripted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.0, False).sum() + F.mse_loss(x, torch.zeros_like(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripting_and_compiling_are_unharmed() -> None:
    x = logits(6, 4)
    expected = Scripted()(x)
    with seen():
        assert torch.equal(torch.jit.script(Scripted())(x), expected)
        compiled = torch.compile(Scripted(), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)


class Block(nn.Module):
    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always, self.drop = always, nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.drop(F.dropout(x, 0.5, training=self.always or self.training))
        return y


def test_a_dropout_in_another_mode_than_its_module() -> None:
    x = torch.ones(1, 2, 3, 4)
    for always, training, expected in ((True, False, 1), (False, False, 0), (False, True, 1), (True, True, 1)):
        block = Block(always=always).train(training)
        with seen(CurrentRoot(0, (), {}, "block", block)) as found:
            block(x)
            if training:
                block(x)  # of a mode that is followed it is told once
        assert len(found) == expected
        if found:
            assert {fact.function for fact in found} == {"dropout"}
            assert all(isinstance(fact, DropoutCall) and fact.training for fact in found)
            assert (found[0].file, found[0].root_training) == (__file__, training)
    never = nn.Sequential(nn.Linear(4, 4)).train()
    with seen(CurrentRoot(0, (), {}, "", never)) as found:
        F.dropout(x, 0.5, training=False)
    assert [fact.training for fact in found] == [False]


def test_a_part_in_another_mode_than_its_root_is_not_told() -> None:
    root = nn.Sequential(Block(always=False).eval(), nn.MultiheadAttention(4, 1, dropout=0.5).eval())
    root.training = True
    with seen(CurrentRoot(0, (), {}, "", root)) as found:
        root[0](torch.ones(1, 2, 3, 4))
        root[1](*[torch.ones(2, 3, 4)] * 3)
    assert found == []


def test_the_random_numbers_are_those_of_a_run_that_nobody_sees() -> None:
    block, x = Block(always=True), torch.ones(1, 2, 3, 4)
    torch.manual_seed(1)
    expected = block(x), torch.rand(2)
    torch.manual_seed(1)
    with seen(CurrentRoot(0, (), {}, "", block)):
        got = block(x), torch.rand(2)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_two_that_end_in_any_order_leave_nothing() -> None:
    code, names = F.mse_loss.__code__, set(vars(F))
    first: list[Any] = []
    second: list[Any] = []
    one, other = patched(first.append), patched(second.append)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    F.mse_loss(logits(3), torch.zeros(3))
    assert (len(first), len(second)) == (0, 1)
    other.__exit__(None, None, None)
    assert F.mse_loss.__code__ is code
    assert set(vars(F)) == names


def test_warnings_name_the_line_of_the_caller() -> None:
    with seen(), pytest.warns(UserWarning, match="target size") as caught:
        F.mse_loss(logits(6, 1), torch.zeros(6))
    assert caught[0].filename == __file__


def test_a_fault_of_its_own_does_not_reach_the_caller() -> None:
    def fail(fact: object) -> None:
        raise ValueError("a fault")

    with patched(fail) as recording:
        value = F.mse_loss(logits(3), torch.zeros(3))
        F.mse_loss(logits(3), torch.zeros(3))
    assert value.requires_grad
    assert recording.failure == "ValueError: a fault"
    assert recording.own > 0


def test_targets_that_all_count_have_the_figures_of_those_beside_ignored_ones() -> None:
    torch.manual_seed(0)
    scores, labels = torch.randn(6, 9, 8), torch.randint(9, (6, 9))[:, 1:]
    all_count = one(lambda: F.cross_entropy(scores, labels))
    padded = torch.cat([labels, torch.full((6, 1), -100)], 1)
    beside = one(lambda: F.cross_entropy(F.pad(scores, (0, 1)), padded))
    many = one(lambda: F.cross_entropy(torch.randn(4000, 9), torch.randint(9, (4000,))))
    assert (all_count.ignored, beside.ignored, all_count.items) == (0, 6, 48)
    assert all_count.target_classes == beside.target_classes == len(labels.unique())
    assert (all_count.target_mean, all_count.target_std) == (beside.target_mean, beside.target_std)
    assert all_count.target_mean == pytest.approx(float(labels.double().mean()))
    assert many.target_classes == 9


def test_losses_of_an_evaluation_are_told_on_average_and_those_of_a_training_are_not() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    values = []
    with Doctor(model, optimizer) as doctor:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                F.cross_entropy(model(x), y)  # of a model in training: a baseline, say
            model.eval()
            with torch.no_grad():
                values += [F.cross_entropy(model(x[half]), y[half]).item() for half in (slice(0, 4), slice(4, 8))]
            model.train()
    found = list(doctor.run.of(Evaluated))
    assert [one.step for one in found] == [1, 2, 3]
    assert [one.calls for one in found] == [2, 2, 2]
    assert [one.value for one in found] == pytest.approx([sum(values[i : i + 2]) / 2 for i in (0, 2, 4)])
    assert {Path(one.file).name for one in found} == {Path(__file__).name}
    curves = series_of(doctor.run).losses
    assert [curve.name.startswith("evaluation, ") for curve in curves] == [False, True]
