"""Terms of a loss that the script has turned into numbers."""

import ast

import pytest

from answer_runs import asked
from anybatch.doctor.ask.source import number_terms
from number_runs import fires, quiet

LOOP = """
for x, y in loader:
    out = model(x)
    fit = mse(out, y)
    penalty = critic(out).mean(){}
    loss = {}
    loss.backward()
"""


@pytest.mark.parametrize(
    ("made", "loss", "found"),
    [
        (".item()", "fit + 0.1 * penalty", ["penalty"]),
        (".detach().item()", "fit + weight * penalty", ["penalty"]),
        (".item()", "fit + other(x).sum() + penalty", ["penalty"]),
        ("", "fit + 0.1 * penalty", []),
        (".item()", "fit", []),
        (".item()", "fit * penalty", []),  # a weight may be a number
        (".item()", "fit + other(x) * penalty", []),
        (".item()", "fit - penalty", []),  # which a baseline may be
    ],
)
def test_a_summand_that_item_made_a_number_is_found(made: str, loss: str, found: list[str]) -> None:
    assert [name for name, _ in number_terms(ast.parse(LOOP.format(made, loss)))] == found


def test_a_name_that_is_a_tensor_again_is_none() -> None:
    text = LOOP.format(".item()", "fit + penalty").replace("    loss =", "    penalty = critic(x).mean()\n    loss =")
    assert not list(number_terms(ast.parse(text)))


def test_loss_term_cut_fires_on_a_number() -> None:
    assert "adversarial" in fires(asked("number term", "yes").run(), "LOSS_TERM_CUT", "warning").message


def test_loss_term_cut_is_quiet_without_one() -> None:
    quiet(asked("number term", "no").run(), "LOSS_TERM_CUT")
