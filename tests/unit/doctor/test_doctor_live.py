"""Findings while a run goes on, within its own process: ``Doctor(on_finding=...)``, and what hears of them."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import anybatch
from anybatch.doctor import live
from anybatch.doctor.live import AfterStep, Judge, is_met
from anybatch.integrations import loggers
from anybatch.records.events import Backward, Stepped
from anybatch.records.findings import Finding
from anybatch.records.runs import Run, load_run
from anybatch.records.tailing import Tail
from number_runs import Training, call, falling


def train(doctor: anybatch.Doctor, steps: int, *, forgotten: bool = True, nan_at: int = -1) -> torch.nn.Module:
    torch.manual_seed(0)
    body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(body, torch.nn.Tanh(), head)
    optimizer = torch.optim.SGD((body if forgotten else model).parameters(), lr=0.1)
    with doctor:
        for step in range(steps):
            x = torch.randn(8, 4)
            if step == nan_at:
                x[0, 0] = float("nan")
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.arange(8) % 3).backward()
            optimizer.step()
    return model


def hooks() -> int:
    """How many hooks torch has for all optimizers."""
    return len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks)


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judgement may take all the time there is."""
    monkeypatch.setattr(live, "_SHARE", 1e9)


def test_a_finding_is_told_once_and_when_it_becomes_true(cheap: None) -> None:
    told: list[tuple[int, str]] = []
    doctor = anybatch.Doctor(on_finding=lambda one: told.append((doctor.step, one.code)))
    train(doctor, 120)
    assert told == [(10, "AB101")]


def test_the_first_number_that_is_not_finite_is_told_in_its_step() -> None:
    told: list[tuple[int, str]] = []
    doctor = anybatch.Doctor(on_finding=lambda one: told.append((doctor.step, one.code)))
    train(doctor, 60, forgotten=False, nan_at=17)
    assert told[0] == (18, "AB555")


def test_what_was_not_told_is_told_at_the_end() -> None:
    told: list[str] = []
    doctor = anybatch.Doctor(on_finding=lambda one: told.append(one.code))
    train(doctor, 30)
    assert told == ["AB101"]


def test_what_the_callback_raises_ends_the_run(cheap: None) -> None:
    def stop(one: Finding) -> None:
        raise RuntimeError(one.code)

    doctor = anybatch.Doctor(on_finding=stop)
    with pytest.raises(RuntimeError, match="AB101"):
        train(doctor, 120)
    assert doctor.step == 10
    assert not hooks()


def test_the_run_is_the_same_and_the_hook_goes(cheap: None) -> None:
    plain = train(anybatch.Doctor(), 40)
    told = train(anybatch.Doctor(on_finding=lambda one: None), 40)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), told.parameters(), strict=True))
    assert not hooks()


def test_judging_costs_nothing_between_the_steps_at_which_it_is_done(
    cheap: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[int] = []
    news = Judge.news

    def counted(self: Judge, run: Run, step: int, *, has_ended: bool) -> tuple[Finding, ...]:
        judged.append(step)
        return news(self, run, step, has_ended=has_ended)

    monkeypatch.setattr(Judge, "news", counted)
    train(anybatch.Doctor(on_finding=lambda one: None), 320)
    assert judged == [10, 30, 100, 300, 320]


def test_a_dear_judgement_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_SHARE", 0.0)
    told: list[int] = []
    doctor = anybatch.Doctor(on_finding=lambda one: told.append(doctor.step))
    train(doctor, 40)
    assert told == [40]  # the end


def test_hooks_of_the_doctor_are_in_no_pickle() -> None:
    with anybatch.Doctor() as doctor:
        hook = AfterStep(doctor, lambda step: None)
        assert type(pickle.loads(pickle.dumps(hook))).__name__ == "SimpleNamespace"
        hook.detach()


def at_a_guess(step: int) -> float:
    return 2.3 + 0.01 * (step % 3)


def test_that_nothing_is_learned_is_told_when_it_is_still_so_later() -> None:
    """A task that is hard at first, as a parity, stays at a guess for long before it is learned."""
    begun = Training(steps=120, loss=at_a_guess, call=call(guess=2.3)).run()
    stays, learns = (Training(steps=360, loss=loss, call=call(guess=2.3)).run() for loss in (at_a_guess, falling))
    for later, told in ((stays, ["NOT_LEARNING"]), (learns, [])):
        judge = Judge()
        assert judge.news(begun, 120) == ()
        assert [one.name for one in judge.news(later, 360)] == told
    assert [one.name for one in Judge().news(begun, 120, has_ended=True)] == ["NOT_LEARNING"]


def test_a_step_that_has_begun_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = anybatch.Doctor()
    train(doctor, 20, forgotten=False)
    facts = [one for one in doctor.run.facts if one.step < 19 or not isinstance(one, Stepped)]
    assert any(isinstance(one, Backward) and one.step == 19 for one in facts)
    seen: list[Run] = []
    monkeypatch.setattr(live, "diagnose", lambda run, policy: seen.append(run) or ())  # type: ignore[func-returns-value]
    assert Judge().news(Run(facts), 19) == ()
    assert isinstance(seen[0].facts[-1], Stepped)


@pytest.mark.parametrize(
    ("stop_on", "met"),
    [(["NAN"], False), (["ERROR"], True), (["AB1"], True), (["OPT_PARAM_MISSING"], True), (["AB5", "NAN"], False)],
)
def test_which_findings_end_a_run(stop_on: list[str], met: bool) -> None:
    assert is_met(Finding("", code="AB101", name="OPT_PARAM_MISSING", severity="error"), stop_on) == met


def test_a_record_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    train(anybatch.Doctor(path=path), 60)
    text = path.read_bytes()
    grown, tail = tmp_path / "grown.jsonl", Tail(tmp_path / "grown.jsonl")
    assert not tail.read()
    for start in range(0, len(text), 1000):
        with grown.open("ab") as file:
            file.write(text[start : start + 1000])
        tail.read()
    assert tail.whole().facts == load_run(path).facts
    assert (tail.step, tail.ended is not None, tail.not_finite) == (60, True, False)
    recent = tail.recent()
    assert recent.facts[-200:] == tail.whole().facts[-200:]
    assert (recent.parameters, recent.roots) == (tail.whole().parameters, tail.whole().roots)


def test_a_record_that_is_written_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    first, second, seen = tmp_path / "first.jsonl", tmp_path / "second.jsonl", tmp_path / "run.jsonl"
    train(anybatch.Doctor(path=first), 30, nan_at=17)
    train(anybatch.Doctor(path=second), 60)  # longer, so that its size says nothing
    tail = Tail(seen)
    seen.write_bytes(first.read_bytes())
    tail.read()
    assert (tail.step, tail.not_finite, tail.renewals) == (30, True, 0)
    seen.write_bytes(first.read_bytes()[:400])  # the same file, emptied and begun again
    tail.read()
    assert (tail.step, tail.ended, tail.not_finite, tail.renewals) == (0, None, False, 1)
    second.replace(seen)
    tail.read()
    assert tail.whole().facts == load_run(seen).facts
    assert (tail.step, tail.renewals) == (60, 2)
    content = seen.read_bytes()
    seen.unlink()
    assert not tail.read()
    seen.write_bytes(content)  # a file system may give it the number of the one before
    tail.read()
    assert tail.whole().facts == load_run(seen).facts
    assert tail.renewals == 3


class Alerts:
    """What ``wandb.init`` gives, as far as alerts go."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []

    def alert(self, **what: Any) -> None:
        self.alerts.append(what)


def test_alerts_reach_weights_and_biases_and_tensorboard(cheap: None) -> None:
    run = Alerts()
    written: list[tuple[Any, ...]] = []
    writer = type("Writer", (), {"add_text": lambda self, *what: written.append(what), "flush": lambda self: None})()
    wandb, board = loggers.WandB(run), loggers.TensorBoard(writer)

    def both(one: Finding) -> None:
        wandb.alert(one)
        board.alert(one)

    train(anybatch.Doctor(on_finding=both), 40)
    assert [one["title"] for one in run.alerts] == ["AB101 OPT_PARAM_MISSING"]
    assert run.alerts[0]["level"] == "ERROR"
    assert run.alerts[0]["text"].startswith("step 0: error AB101 model.2.weight, model.2.bias")
    assert [(tag, step) for tag, _, step in written] == [("anybatch/findings", 0)]


def test_the_callbacks_of_trainers_hand_it_on(cheap: None) -> None:
    from anybatch.integrations.attached import AttachedDoctor

    told: list[str] = []
    watching = AttachedDoctor(on_finding=lambda one: told.append(one.code))
    watching.begin()
    assert watching.doctor is not None
    train(watching.doctor, 30)
    assert told == ["AB101"]
