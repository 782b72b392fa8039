"""Fixes made as edits and tried: the patch is the change that is asked for, and the script is clean with it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from anybatch.doctor.fixes.scene import MAKERS, Maker, Scene, edits
from anybatch.doctor.fixes.source import Edit, UserSource
from anybatch.doctor.fixes.trying import Tried, shown, steps_for, tried, worse
from anybatch.records.diagnoses import Diagnosis
from anybatch.records.events import Backward, Ended, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run
from anybatch.records.tables import OptimizerFacts
from fix_running import fixed, trial
from fix_scripts import FAULTY


@pytest.mark.slow  # each runs a script twice; what the edits are is tested beside this, and two trials by the command
@pytest.mark.parametrize("case", FAULTY)
def test_a_fault_is_mended_by_an_edit_that_was_tried(case: str, tmp_path: Path) -> None:
    name, text, line = FAULTY[case]
    path = tmp_path / "train.py"
    finding, outcome, _ = fixed(path, text)
    assert finding.name == name, finding
    assert outcome.edit is not None, outcome.said
    assert outcome.edit.before == text
    assert outcome.edit.lines.startswith(line.strip()), outcome.edit.lines
    assert any(one.startswith(line) for one in outcome.edit.after.splitlines())
    assert outcome.said.startswith("tried: ")
    again = trial(path, outcome.edit.after, steps=100_000)
    assert again.code == 0
    assert not [one for one in again.diagnosis.causes if one.name == name]


def test_there_are_edits_for_twenty_findings_at_least() -> None:
    assert len({name for name, _, _ in FAULTY.values()}) >= 20


def _rate(text: str) -> Maker:
    """Something that makes edits with another rate."""

    def make(scene: Scene) -> Iterator[Edit]:
        source, _, call = scene.construction()
        yield source.edit([source.keyword(call, "lr", text)])

    return make


def test_an_edit_that_makes_it_worse_is_left_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, text, line = FAULTY["nothing cleared"]
    good = MAKERS[name][0]

    def with_a_huge_rate(scene: Scene) -> Iterator[Edit]:
        (edit,) = good(scene)
        yield Edit(edit.path, edit.before, edit.after.replace("lr=0.05", "lr=1e12"))

    def with_a_crash(scene: Scene) -> Iterator[Edit]:
        (edit,) = good(scene)
        yield Edit(edit.path, edit.before, edit.after.replace("self.opt.zero_grad()", "self.opt.clear()"))

    monkeypatch.setitem(MAKERS, name, [with_a_huge_rate, with_a_crash, _rate("0.04")])
    _, outcome, _ = fixed(tmp_path / "train.py", text)
    assert outcome.edit is None
    assert outcome.said.startswith("3 edits were tried and are no good: ")
    assert "the script fails with it" in outcome.said
    assert f"{name} is still found" in outcome.said
    monkeypatch.setitem(MAKERS, name, [with_a_huge_rate, good])
    _, outcome, _ = fixed(tmp_path / "train.py", text)
    assert outcome.edit is not None
    assert line.strip() == outcome.edit.lines


def test_of_several_rates_the_one_with_the_lowest_loss_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, text, _ = FAULTY["rate too low"]
    monkeypatch.setitem(MAKERS, name, [_rate(rate) for rate in ("0.0007", "0.02", "0.002")])
    _, outcome, _ = fixed(tmp_path / "train.py", text)
    assert outcome.edit is not None, outcome.said
    assert "lr=0.02," in outcome.edit.lines


UNCLEAR = {
    "two statements on a line": ("loss.backward()\n            self.opt.step()", "loss.backward(); self.opt.step()"),
    "a step that a function is given": ("self.opt.step()", "step()"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_what_is_not_clear_is_not_tried(case: str, tmp_path: Path) -> None:
    _, text, _ = FAULTY["nothing cleared"]
    old, new = UNCLEAR[case]
    text = text.replace(old, new).replace(
        "for step in range(steps):", "step = self.opt.step\n        for _ in range(steps):"
    )
    _, outcome, _ = fixed(tmp_path / "train.py", text)
    assert outcome.edit is None
    assert outcome.said == "no edit of the source is clear enough to be tried"


def _run(*losses: float, steps: int = 60, code: int = 0, names: tuple[str, ...] = (), **more: object) -> Tried:
    """A run that was tried, with these losses and findings."""
    facts: list[object] = []
    for number in range(steps):
        loss = losses[min(number * len(losses) // steps, len(losses) - 1)]
        facts += [
            Backward(value=loss, at=2 * number, step=number),
            Stepped(optimizer=0, number=number, at=2 * number + 1, step=number),
        ]
    facts.append(Ended(exit_code=code, at=2 * steps, step=steps))
    found = tuple(Finding("It is.", severity="error", name=name) for name in names)
    verdict = "faults" if names else "learning"
    return Tried(Diagnosis(found, steps=steps, verdict=verdict), Run(facts), code=code, **more)  # type: ignore[arg-type]


WITHOUT = _run(2.3, names=("A",))
REASONS: dict[str, tuple[Tried, str]] = {
    "good": (_run(2.3, 1.0), ""),
    "as before": (_run(2.3, 2.29), ""),
    "still there": (_run(2.3, 1.0, names=("A",)), "A is still found"),
    "another one": (_run(2.3, 1.0, names=("B",)), "B is found with it"),
    "a crash": (_run(2.3, 1.0, code=1), "the script fails with it"),
    "not finite": (_run(2.3, 1.0, float("nan")), "the loss is not finite with it"),
    "the loss rises": (_run(2.3, 9.0), "the loss ends at 9.00 with it, at 2.30 without"),
    "the loop ends early": (_run(2.3, 1.0, steps=20), "only 20 steps are done with it"),
    "the time is over": (_run(2.3, 1.0, late=True), "it takes too long"),
    "it does more than it may": (_run(2.3, 1.0, refused="start rm"), "the script would start rm"),
}


@pytest.mark.parametrize("case", REASONS)
def test_an_edit_is_judged_by_its_outcome(case: str) -> None:
    after, reason = REASONS[case]
    assert worse(WITHOUT.diagnosis.findings[0], WITHOUT, after) == reason


def _called(tried_: Tried, *values: float, function: str = "nll_loss") -> Tried:
    """The same with the values of a loss function."""
    calls = [LossCall(function=function, value=value, at=3, step=1) for value in values]
    return replace(tried_, run=Run([*tried_.run.facts[:3], *calls, *tried_.run.facts[3:]]))


def test_an_edit_with_which_the_loss_leaves_its_bound_is_no_good() -> None:
    finding = Finding("It is.", name="A", code="AB601")
    before, after = _called(WITHOUT, -0.2, -0.3), _called(_run(0.03, -0.6), -0.01, -0.6)
    assert worse(finding, before, after) == "nll_loss is below its bound with it"
    assert worse(Finding("It is.", name="A", code="AB501"), before, after) != "nll_loss is below its bound with it"
    assert worse(finding, WITHOUT, after) == "nll_loss is below its bound with it"


def test_a_loss_that_was_below_its_bound_is_nothing_to_fall_as_far_as() -> None:
    before, after = _called(_run(-0.2, -0.9, names=("A",)), -0.2, -0.9), _called(_run(1.4, 1.2), 1.4, 1.2)
    assert worse(Finding("It is.", name="A", code="AB601"), before, after) == ""


def test_a_loss_that_becomes_another_quantity_and_falls_below_0_is_no_good() -> None:
    finding = Finding("It is.", name="A")
    assert "another quantity" in worse(finding, WITHOUT, _run(0.03, -0.6))
    assert worse(finding, WITHOUT, _run(2.3, -0.6)) == ""
    assert "which is another quantity" in shown(finding, WITHOUT, _run(0.6, 0.2))
    assert "which is another quantity" not in shown(finding, WITHOUT, _run(2.3, 0.2))


def test_what_was_a_note_before_does_not_count_against_an_edit() -> None:
    noted = Tried(Diagnosis((*WITHOUT.diagnosis.findings, Finding("It is.", severity="info", name="B"))), WITHOUT.run)
    assert worse(WITHOUT.diagnosis.findings[0], noted, _run(2.3, 1.0, names=("B",))) == ""
    follows = Finding("It is.", severity="warning", name="C", consequence_of="B")
    after = Tried(Diagnosis((follows,), verdict="learning"), _run(2.3, 1.0).run)
    assert worse(WITHOUT.diagnosis.findings[0], noted, after) == ""


LOGARITHMS = {
    "a method": ("loss = F.nll_loss(net(x).softmax(-1), y)\n", "loss = F.nll_loss(net(x).log_softmax(-1), y)\n"),
    "a function": ("loss = F.kl_div(F.softmax(s, 1), q)\n", "loss = F.kl_div(F.log_softmax(s, 1), q)\n"),
    "a name": ("loss = F.kl_div(softmax(s, 1), q)\n", "loss = F.kl_div(softmax(s, 1).log(), q)\n"),
    "an attribute": ("loss = F.kl_div(self.softmax(s), q)\n", "loss = F.kl_div(self.softmax(s).log(), q)\n"),
    "a module": (
        "loss = F.nll_loss(net(x), y)\nnet = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))\n",
        "loss = F.nll_loss(net(x), y)\nnet = nn.Sequential(nn.Linear(2, 2), nn.LogSoftmax(-1))\n",
    ),
    "a loss with a softmax of its own": (
        "loss = F.cross_entropy(net(x).softmax(-1), y)\n",
        "loss = F.cross_entropy(net(x), y)\n",
    ),
}


@pytest.mark.parametrize("case", LOGARITHMS)
def test_a_loss_of_logarithms_gets_these_and_no_raw_scores(case: str) -> None:
    before, after = LOGARITHMS[case]
    function = before.split("F.")[1].split("(")[0]
    finding = Finding("It is.", Place(file="t.py", line=1), name="DOUBLE_ACTIVATION", evidence={"function": function})
    assert [one.after for one in edits(finding, Run([]), lambda path: UserSource("t.py", before))][:1] == [after]


def test_a_loss_that_falls_less_far_is_worse_but_where_a_fault_made_it_easy() -> None:
    before, after = _run(2.0, 0.1, names=("A",)), _run(2.0, 1.5)
    assert worse(Finding("It is.", name="A"), before, after) == "the loss ends at 1.50 with it, at 0.1 without"
    easy = _run(2.0, 0.1, names=("EVAL_IN_TRAINING",))
    assert worse(Finding("It is.", name="EVAL_IN_TRAINING"), easy, after) == ""
    assert worse(Finding("It is.", name="EVAL_IN_TRAINING"), easy, _run(2.0, 3.0)) != ""


@pytest.mark.parametrize(
    ("without", "said"),
    [
        (_run(2.3, refused="start rm", names=("ZERO_GRAD_MISSING",)), "not tried: the script would start rm"),
        (_run(2.3, late=True, names=("ZERO_GRAD_MISSING",)), "not tried: it takes too long"),
        (_run(2.3), "not tried: in a trial without the fix it is not found either"),
        (_run(2.3, code=1), "not tried: the script fails in a trial, without any edit"),
    ],
)
def test_nothing_is_concluded_where_the_run_without_the_edit_tells_nothing(without: Tried, said: str) -> None:
    text = "loss.backward()\nopt.step()\n"
    at = [
        Backward(value=1.0, file="t.py", line=1),
        Stepped(optimizer=0, file="t.py", line=2, at=1),
        Ended(exit_code=0, at=2),
    ]
    run = Run([OptimizerFacts(optimizer=0, variable="opt", cls="SGD"), *at])
    finding = Finding("It is.", Place(file="t.py", line=1), name="ZERO_GRAD_MISSING")
    source = UserSource("t.py", text)
    outcome = tried(finding, run, lambda path: source, lambda: without, lambda edit: _run(2.3, 1.0), 4)
    assert (outcome.edit, outcome.said) == (None, said)


def test_a_trial_is_as_long_as_the_symptom_takes() -> None:
    assert steps_for([Finding("Early.", step=3)]) == 60
    assert steps_for([Finding("Early.", step=3), Finding("Late.", step=300)]) == 320
