"""An end of text that is the padding as well, and that the configuration of a model names."""

from types import SimpleNamespace
from typing import Any

import pytest

from number_runs import fires, silent
from test_rules_deceiving import Speaker, ignoring, nothing_was_compiled, of, texts, train

__all__ = ["nothing_was_compiled"]


@pytest.mark.parametrize(("end", "told"), [(1, True), ([2, 1], True), (2, False), (None, False)])
def test_class_uncounted_fires_on_rows_of_one_width_where_the_model_knows_its_end(end: Any, told: bool) -> None:
    def speak() -> None:
        net = Speaker()
        net.config = SimpleNamespace(eos_token_id=end)  # type: ignore[assignment]
        train(net, texts(1, 1, 9), 200, ignoring())

    run = of(speak, ask=True)
    if told:
        assert "where to end" in fires(run, "CLASS_UNCOUNTED", "warning").message
    else:
        silent(run, "CLASS_UNCOUNTED")
