"""Steps that run other operations from one micro-batch to the next are planned too, or refused by name.

How it could be silently wrong: an exception that is meant for the planner alone reaches the user; a plan is made from
sizes that do not belong together; a size runs for real that may not fit; the search never ends.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.planning import predictor
from anybatch.planning.curve import Fit, NotAligned, Size
from anybatch.planning.memorytrace import Tracer
from anybatch.planning.planner import until_stable
from anybatch.planning.predictor import Predictor, TooLarge
from anybatch.units import parse_bytes
from coupled_models import subject_of as coupled_subject
from planning_referee import alive_in, peak_of
from reference import assert_float64, gradients_of
from sequence_models import subject_of as sequence_subject

ROWS, WIDTH = 48, 32
BUDGETS = ("10MiB", "156KiB", "130KiB")
LossFn = Callable[[nn.Module, Any], Tensor]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, 3)).double()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(ROWS, WIDTH).double(), "y": torch.randint(0, 3, (ROWS,))}


def differing_after(calls: int, *, reads: bool) -> LossFn:
    """A loss that begins to do more with more than two samples once it was called so often."""
    seen = 0

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal seen
        seen += 1
        out = model(batch["x"])
        if reads:
            out.sum().item()
        if seen > calls and len(out) > 2:
            out = out * 1.0
        return F.cross_entropy(out, batch["y"])

    return loss_fn


def reading_after(calls: int) -> LossFn:
    """A loss that runs on fake tensors until it reads a value."""
    seen = 0

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal seen
        seen += 1
        out = model(batch["x"])
        if seen > calls:
            out.sum().item()
        return F.cross_entropy(out, batch["y"])

    return loss_fn


def branching(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Metrics and a loss that depend on values."""
    out = model(batch["x"])
    loss = F.cross_entropy(out, batch["y"])
    if loss.item() > 1.1:
        loss = loss * 1.0
    found = out.detach().amax(-1)
    return loss, {"largest": found.exp() if found.mean().item() > 0 else found}


def outcome(*arguments: Any, **options: Any) -> anybatch.Plan | anybatch.DoesNotFit:
    try:
        return anybatch.plan(*arguments, **options)
    except anybatch.DoesNotFit as error:
        return error


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("calls", [1, 5])
@pytest.mark.parametrize("kind", ["differs", "differs on values", "reads"])
def test_a_plan_is_made_although_the_step_changes(kind: str, calls: int, memory: str) -> None:
    loss_fn = reading_after(calls) if kind == "reads" else differing_after(calls, reads=kind != "differs")
    model = build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    found = outcome(model, loss_fn, batch(), sgd, memory=memory)
    assert isinstance(found, anybatch.Plan)
    assert found.confidence in ("predicted", "measured")
    assert found.peak_bytes <= parse_bytes(memory)


@pytest.mark.parametrize("percent", [101, 90])
def test_the_step_stays_within_and_gives_the_gradient_of_the_whole(percent: int) -> None:
    whole = differing_after(0, reads=True)
    model = build()
    F.cross_entropy(model(batch()["x"]), batch()["y"]).backward()
    wanted = gradients_of(model)
    model = build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    plain = anybatch.TrainStep(model, whole, sgd, micro_batch_size=ROWS)
    rows = batch()
    plain(rows)
    budget = peak_of(lambda: plain(rows), alive_in(model, [sgd], rows)) * percent // 100
    step = anybatch.TrainStep(model, differing_after(4, reads=True), sgd, memory=budget)
    held = peak_of(lambda: step(rows), alive_in(model, [sgd], rows))
    assert held <= budget
    assert_float64(gradients_of(model), wanted)


@pytest.mark.parametrize("memory", ["10MiB", 200_000])
def test_losses_and_metrics_that_depend_on_values_are_planned(memory: int | str) -> None:
    model = build()
    step = anybatch.TrainStep(model, branching, torch.optim.SGD(model.parameters(), lr=0.1), memory=memory)
    out = step(batch())
    assert out.plan is not None
    assert out.plan.confidence == "measured"
    assert len(out.metrics["largest"]) == ROWS


def test_sequences_that_differ_run_for_real_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = sequence_subject("lstm")
    real = subject.batch(4, 40)
    failing_fit(monkeypatch, every=True)
    found = anybatch.plan(subject.model, subject.loss_fn, real, subject.optimizer(), memory="1GiB")
    assert found.confidence == "measured"
    step = subject.step(plan=found)
    step(real)
    held = peak_of(lambda: step(real), alive_in(subject.model, step._optimizers, real))
    assert held <= 1.02 * found.peak_bytes
    assert found.peak_bytes <= 1.3 * held


def failing_fit(monkeypatch: pytest.MonkeyPatch, *, at: int = 0, every: bool = False) -> None:
    seen = 0

    class Failing(Fit):
        def __init__(self, traces: Any, **options: Any) -> None:
            nonlocal seen
            seen += len(traces) > 1
            if len(traces) > 1 and (every or seen == at):
                raise NotAligned("operation 1 is a with 2 samples, and b with 4 samples")
            super().__init__(traces, **options)

    monkeypatch.setattr(predictor, "Fit", Failing)


def failing_tracer(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    seen, trace = 0, Tracer.trace

    def failing(self: Tracer, *args: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == at and self.is_fake:
            self._give_up("a test")
        return trace(self, *args, **options)

    monkeypatch.setattr(Tracer, "trace", failing)


def refusing(monkeypatch: pytest.MonkeyPatch, most: int, at: int) -> None:
    seen, may_run = 0, Predictor._may_run

    def refuses(self: Predictor, size: Size, chunks: Any) -> bool:
        nonlocal seen
        seen += 1
        return may_run(self, size, chunks) and (size.samples == 1 or size.samples <= most or seen < at)

    monkeypatch.setattr(Predictor, "_may_run", refuses)


def subject_and_batch(kind: str) -> tuple[Any, ...]:
    if kind == "coupled":
        coupled = coupled_subject("clip")
        return coupled.model, coupled.loss_fn, coupled.batch(8), coupled.optimizer(), coupled.options
    if kind == "sequence":
        sequence = sequence_subject("cell")
        return sequence.model, sequence.loss_fn, sequence.batch(4, 8), sequence.optimizer(), {}
    model = build()
    loss_fn = differing_after(0, reads=True) if kind == "real" else differing_after(0, reads=False)
    return model, loss_fn, batch(), torch.optim.SGD(model.parameters(), lr=0.1), {}


@settings(max_examples=3, deadline=None)
@given(
    st.sampled_from(["plain", "real", "coupled", "sequence"]),
    st.integers(0, 8),
    st.integers(0, 8),
    st.sampled_from([1, 2, 3, 8, 10**6]),
    st.integers(0, 12),
    st.sampled_from([40_000, 140_000, 160_000, 10**8]),
)
def test_nothing_that_is_meant_for_the_planner_reaches_the_user(
    kind: str, fit: int, tracer: int, most: int, at: int, memory: int
) -> None:
    model, loss_fn, rows, optimizer, options = subject_and_batch(kind)
    with pytest.MonkeyPatch.context() as monkeypatch:
        failing_fit(monkeypatch, at=fit)
        failing_tracer(monkeypatch, tracer)
        refusing(monkeypatch, most, at)
        found = outcome(model, loss_fn, rows, optimizer, memory=memory, **options)
    if isinstance(found, anybatch.DoesNotFit):
        assert memory < 10**8
        assert found.needed is not None
    else:
        assert found.peak_bytes <= memory


def test_a_step_that_no_search_gets_along_with_is_refused_by_name() -> None:
    def search() -> None:
        raise NotAligned("operation 3 is mul with 2 samples, and exp with 4 samples")

    with pytest.raises(anybatch.LossError, match=r"got: operation 3 is mul with 2 samples.*micro_batch_size= instead"):
        until_stable(tuple, lambda: None, search)
    with pytest.raises(anybatch.LossError, match="micro-batch of 8 samples might not fit"):
        until_stable(tuple, lambda: None, lambda: (_ for _ in ()).throw(TooLarge(Size(8))))


def test_the_first_operation_that_differs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    with caplog.at_level("INFO"):
        anybatch.plan(model, differing_after(0, reads=False), batch(), memory="1GiB")
    assert "(operation 15 is _log_softmax with 2 samples, and mul with 4 samples)" in caplog.text
