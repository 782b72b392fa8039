"""What a remedy has shown on a copy is said with the finding that it is for."""

import pytest

from anybatch.doctor.proofs import PROOFS, with_proofs
from anybatch.doctor.rules.registry import all_rules
from anybatch.records.findings import Finding
from anybatch.records.lines import from_line, to_line
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

RATE = {"lr": 0.4, "before": 23.7, "after": float("inf"), "after_tenth": 14.1, "steps": 20}


def of_record(probed: Probed) -> Run:
    """A run that was written and read again."""
    read = from_line(to_line(probed))
    assert read is not None
    return Run([read])


def test_a_proof_with_a_number_that_is_not_finite_is_said() -> None:
    run = of_record(Probed(probe="learning rate", answer="yes", evidence=RATE))
    (proved,) = with_proofs([Finding("Too high.", name="LR_TOO_HIGH")], run)
    assert proved.proof.endswith("at lr 0.4 took the loss from 23.7 to inf; at lr 0.04 to 14.1.")


@pytest.mark.parametrize("answer", ["no", "unknown"])
def test_what_has_not_gone_away_is_no_proof(answer: str) -> None:
    run = of_record(Probed(probe="learning rate", answer=answer, evidence=RATE))
    (finding,) = with_proofs([Finding("Too high.", name="LR_TOO_HIGH")], run)
    assert finding.proof == ""


def test_a_proof_belongs_to_its_finding_alone_and_a_strange_record_to_none() -> None:
    others = [Finding("Another.", name="OPT_PARAM_MISSING"), Finding("Clipped.", name="CLIP_BEFORE_UNSCALE")]
    assert with_proofs(others, of_record(Probed(probe="learning rate", answer="yes", evidence=RATE))) == tuple(others)
    strange = of_record(Probed(probe="learning rate", answer="yes", evidence={"lr": "high"}))
    assert with_proofs([Finding("Too high.", name="LR_TOO_HIGH")], strange)[0].proof == ""


def test_proofs_are_for_rules_that_there_are() -> None:
    assert set(PROOFS) <= set(all_rules())
