"""What the recorder says happened did happen, in that order, with the right numbers."""

from typing import Any, TypeVar

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # imported before any doctor is attached
from torch.utils.data import DataLoader, TensorDataset

from anybatch.doctor.recorder import Doctor
from anybatch.records.events import (
    Backward,
    Cleared,
    Clipped,
    Crashed,
    Epoch,
    Forward,
    Loaded,
    Scaler,
    Scheduled,
    Stepped,
    Warned,
)
from anybatch.records.lines import Fact
from anybatch.records.samples import Norms
from anybatch.records.tables import OptimizerFacts
from anybatch.step import TrainStep
from doctor_programs import PROGRAMS

K = TypeVar("K", bound=Fact)


def seen(doctor: Doctor, kind: type[K]) -> list[K]:
    """Returns the facts of one kind; a recorder that failed has none to show."""
    assert doctor.failure == ""
    return list(doctor.run.of(kind))


def letters(doctor: Doctor) -> str:
    """Returns the run as a string of f, b, z, s."""
    kinds = {Forward: "f", Backward: "b", Cleared: "z", Stepped: "s"}
    return "".join(kinds.get(type(fact), "") for fact in doctor.run.facts)


def pair(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a small model and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)


def backward(model: torch.nn.Module, factor: float = 1.0) -> None:
    """Runs a forward and a backward."""
    (model(torch.randn(5, 3)).pow(2).mean() * factor).backward()


@pytest.mark.parametrize("subjects", [True, False])
def test_a_plain_loop_is_written_as_it_ran(subjects: bool) -> None:
    model, optimizer = pair()
    with Doctor(*((model, optimizer) if subjects else ())) as doctor:
        for _ in range(30):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    assert letters(doctor) == "zfbs" * 30
    assert [fact.number for fact in seen(doctor, Stepped)] == list(range(30))
    assert all(fact.with_grad == 4 and fact.lrs == (0.1,) for fact in seen(doctor, Stepped))
    assert all(fact.touched_count == 4 and fact.kept_count == 0 for fact in seen(doctor, Backward))
    assert [fact.step for fact in seen(doctor, Forward)] == list(range(30))
    assert [(fact.parameters, fact.of) for fact in seen(doctor, Cleared)[1:]] == [(4, 4)] * 29
    first = seen(doctor, Backward)[0]
    assert first.touched == (0, 1, 2, 3)
    assert first.file == __file__
    assert first.value is not None
    assert doctor.run.parameters[0].names == ("0.weight",)


def test_gradients_that_nothing_clears_are_kept_from_the_second_step_on() -> None:
    model, optimizer = pair()
    with Doctor() as doctor:
        for _ in range(30):
            backward(model)
            optimizer.step()
    assert [fact.kept_count for fact in seen(doctor, Backward)] == [0] + [4] * 29
    assert letters(doctor) == "fbs" * 30


@pytest.mark.parametrize("way", ["none", "zero_", "data.zero_", "set_to_none=False", "module"])
def test_every_way_of_clearing_counts(way: str) -> None:
    model, optimizer = pair()
    with Doctor() as doctor:
        for _ in range(14):
            backward(model)
            optimizer.step()
            if way == "module":
                model.zero_grad()
            elif way == "set_to_none=False":
                optimizer.zero_grad(set_to_none=False)
            else:
                for parameter in model.parameters():
                    if way == "none":
                        parameter.grad = None
                    elif way == "zero_":
                        parameter.grad.zero_()  # type: ignore[union-attr]
                    else:
                        parameter.grad.data.zero_()  # type: ignore[union-attr]
    assert [fact.kept_count for fact in seen(doctor, Backward)] == [0] * 14
    cleared = seen(doctor, Cleared)
    by = {"module": "module", "set_to_none=False": "optimizer"}.get(way, "hand")
    assert {fact.by for fact in cleared} == {by}
    assert all((fact.parameters, fact.of) == (4, 4) for fact in cleared)


def test_accumulation_inside_a_step_is_not_kept_gradient() -> None:
    with Doctor() as doctor:
        PROGRAMS["accumulating"]()
    assert letters(doctor).replace("z", "") == "fbfbfbs" * 5
    assert all(fact.kept_count == 0 for fact in seen(doctor, Backward))
    assert all(fact.factor == pytest.approx(1 / 3) for fact in seen(doctor, Backward))
    assert {fact.top for fact in seen(doctor, Backward)} == {"NllLossBackward0"}


def test_clearing_before_the_step_leaves_it_without_gradients() -> None:
    model, optimizer = pair()
    with Doctor() as doctor:
        for _ in range(3):
            backward(model)
            optimizer.zero_grad()
            optimizer.step()
    assert [fact.with_grad for fact in seen(doctor, Stepped)] == [0, 0, 0]


@pytest.mark.parametrize(("large", "skipped", "found"), [(False, 3, 27), (True, 3, 50), (True, 5, 28)])
def test_what_the_few_that_are_looked_at_hide_is_found_at_the_next_sample(
    large: bool, skipped: int, found: int
) -> None:
    """Only one layer loses its gradient, late in the run and between two samples."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(40 if large else 6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Doctor(model, optimizer) as doctor:
        for step in range(60):
            optimizer.zero_grad()
            x = torch.ones(1, 2)
            for place, layer in enumerate(model):
                x = x if place == skipped and step >= 27 else layer(x)
            x.sum().backward()
            optimizer.step()
    counts = [fact.touched_count for fact in seen(doctor, Backward)]
    whole = 80 if large else 12
    assert counts[:27] == [whole] * 27
    assert counts[found:] == [whole - 2] * (60 - found)
    assert seen(doctor, Stepped)[-1].with_grad == whole - 2


def test_clipping_is_seen_under_names_that_were_imported_before() -> None:
    model, optimizer = pair()
    with Doctor() as doctor:
        backward(model)
        norm = clip_grad_norm_((p for p in model.parameters()), 0.5)
        torch.nn.utils.clip_grad_norm_(model[0].weight, 0.25)  # type: ignore[index]
        clip_grad_value_(list(model.parameters()), 0.1)
        optimizer.step()
    first, second, third = seen(doctor, Clipped)
    assert (first.by, first.limit, first.tensors) == ("norm", 0.5, 4)
    assert first.norm == pytest.approx(norm.item())
    assert (second.limit, second.tensors) == (0.25, 1)
    assert (third.by, third.limit, third.norm) == ("value", 0.1, None)
    assert not first.scaled
    assert first.file == __file__


def test_a_scaler_and_its_overflow() -> None:
    with Doctor() as doctor:
        PROGRAMS["scaled"]()
    steps = [fact for fact in seen(doctor, Scaler) if fact.call == "step"]
    assert [fact.skipped for fact in steps] == [False, False, True, False, False, False]
    assert len(seen(doctor, Stepped)) == 5
    assert {fact.by for fact in seen(doctor, Stepped)} == {"scaler"}
    assert all(fact.scaled for fact in seen(doctor, Backward))
    assert all(fact.edited == 0 for fact in seen(doctor, Stepped))
    updates = [fact for fact in seen(doctor, Scaler) if fact.call == "update"]
    assert updates[2].after == updates[2].scale / 2
    assert [fact.scaled for fact in seen(doctor, Clipped)] == [False] * 6


def test_clipping_before_unscaling_is_told() -> None:
    model, optimizer = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with Doctor() as doctor:
        loss = model(torch.randn(5, 3)).pow(2).mean()
        scaler.scale(loss / 2).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    (clipped,) = seen(doctor, Clipped)
    assert (clipped.scaled, clipped.scale) == (True, 256.0)
    (ran,) = seen(doctor, Backward)
    assert ran.value == pytest.approx(loss.item() / 2)
    assert (ran.factor, ran.top) == (0.5, "MeanBackward0")
    assert [fact.call for fact in seen(doctor, Scaler)] == ["step", "update"]


def test_gradients_edited_by_hand_are_counted() -> None:
    model, optimizer = pair()
    with Doctor() as doctor:
        backward(model)
        for parameter in model.parameters():
            parameter.grad.div_(4)  # type: ignore[union-attr]
        optimizer.step()
    assert seen(doctor, Stepped)[0].edited == 4


def test_a_closure_counts_as_one_step() -> None:
    with Doctor() as doctor:
        PROGRAMS["lbfgs"]()
    assert len(seen(doctor, Stepped)) == 4
    assert all(fact.closure for fact in seen(doctor, Stepped))
    assert len(seen(doctor, Backward)) > 4


def test_a_recomputed_forward_is_not_another_one() -> None:
    with Doctor() as doctor:
        PROGRAMS["recomputing"]()
    assert letters(doctor) == "zfbs" * 5


def test_modes_of_a_forward() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(2))
    with Doctor(model) as doctor:
        model(torch.ones(4, 2))
        model.eval()
        with torch.no_grad():
            model(torch.ones(4, 2))
        model[2].train()
        with torch.inference_mode():
            model(torch.ones(4, 2))
    one, two, three = seen(doctor, Forward)
    assert (one.training, one.grad, one.trained, one.evaluated, one.rows) == (True, True, 2, 0, 4)
    assert (two.training, two.grad, two.evaluating) == (False, False, ("1", "2"))
    assert (three.inference, three.evaluating, three.trained) == (True, ("1",), 1)


def test_schedules_epochs_loading_and_warnings() -> None:
    model, optimizer = pair()
    loader = DataLoader(TensorDataset(torch.randn(10, 3)), batch_size=4, shuffle=True)
    with Doctor() as doctor:
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 1)],
            milestones=[2],
        )
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            scheduler.step()
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict({"0.weight": torch.zeros(4, 3), "x": torch.zeros(1)}, strict=False)
    scheduled = seen(doctor, Scheduled)
    assert [fact.number for fact in scheduled] == [0, 1, 2]
    assert scheduled[0].before != () != scheduled[0].after
    (facts,) = doctor.run.schedulers.values()
    assert (facts.cls, facts.optimizer) == ("SequentialLR", 0)
    start, end = seen(doctor, Epoch)
    assert (start.batches, start.rows, start.batch_size, start.shuffled) == (3, 10, 4, True)
    assert (end.ended, end.batches) == (True, 3)
    into_optimizer, into_module = seen(doctor, Loaded)
    assert into_optimizer.into == "optimizer"
    assert (into_module.matched, into_module.of, into_module.strict) == (1, 4, False)
    assert (into_module.missing[0], into_module.unexpected) == ("0.bias", ("x",))


def test_a_warning_names_the_users_line_though_wrappers_stand_between() -> None:
    def places() -> list[tuple[str, int]]:
        scheduler = torch.optim.lr_scheduler.StepLR(pair()[1], 1)
        with pytest.warns(UserWarning, match="before `optimizer.step") as shown:
            scheduler.step()
        return [(one.filename, one.lineno) for one in shown]

    plain = places()  # the line in here; torch 2.6 names its own instead
    with Doctor() as doctor:
        assert places() == plain
    assert [(fact.file, fact.line) for fact in seen(doctor, Warned)] == plain


def test_a_new_optimizer_over_the_same_parameters_is_told() -> None:
    model, optimizer = pair()
    with Doctor() as doctor:
        for _ in range(3):
            backward(model)
            optimizer.step()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        line = 8 + test_a_new_optimizer_over_the_same_parameters_is_told.__code__.co_firstlineno - 2
        backward(model)
        optimizer.step()
    first, second = (fact for fact in seen(doctor, OptimizerFacts))
    assert (first.after, second.after) == (0, 3)
    assert second.line == line


def test_norms_are_numbered_by_their_steps() -> None:
    model, optimizer = pair()
    doctor = Doctor(model, optimizer)
    with doctor:
        for _ in range(12):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    assert [fact.number for fact in seen(doctor, Norms)] == list(range(10))


def test_a_crash_is_recorded() -> None:
    model, _ = pair()
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    with pytest.raises(RuntimeError), Doctor() as doctor:
        loss.backward()
    (crashed,) = seen(doctor, Crashed)
    assert crashed.error == "RuntimeError"


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Doctor\(model, optimizer\)"):
        Doctor([1, 2])


def test_a_train_step_attaches_its_recorder() -> None:
    model, optimizer = pair()
    doctor = Doctor()

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch)
        return out.pow(2).mean()

    step = TrainStep(model, loss, optimizer, micro_batch_size=2, recorder=doctor)
    for _ in range(3):
        step(torch.randn(8, 3))
    doctor.close()
    assert len(seen(doctor, Stepped)) == 3
    assert [fact.cls for fact in doctor.run.optimizers.values()] == ["SGD"]
    assert len(seen(doctor, Backward)) == 12
    assert {fact.factor for fact in seen(doctor, Backward)} == {0.25}
    assert len(doctor.run.roots) == 1
