"""Rules of the family probes fire on their fault and are quiet on what only looks like it."""

import pytest

from anybatch.records.lossfacts import Probed
from anybatch.records.tables import ModuleFacts, Root
from number_runs import Training, call, falling, fires, found, quiet, sample, silent


def probed(probe: str, answer: str, **values: object) -> Training:
    """A training of which a question was asked afterwards."""
    one = Probed(probe=probe, answer=answer, **{"evidence": {"gradient": 0.3}, **values})  # type: ignore[arg-type]
    return Training(call=call(shift=1), after=(one,))


def test_batch_mixing_fires_where_samples_mix() -> None:
    one = fires(probed("batch", "yes", module="mixer", file="net.py", line=4).run(), "BATCH_MIXING", "warning")
    assert (one.place.module, one.place.line) == ("mixer", 4)
    assert one.at == 10  # the first backward


def test_batch_mixing_is_quiet_for_sets_graphs_and_time() -> None:
    silent(probed("batch", "no").run(), "BATCH_MIXING")
    silent(probed("batch", "unknown").run(), "BATCH_MIXING")
    graph = probed("batch", "yes")
    graph.every = lambda step: [sample(name="1", shape=(2, 90), dtype="int64", mean=None, std=None)]
    quiet(graph.run(), "BATCH_MIXING")
    lstm = ModuleFacts(name="lstm", cls="LSTM", kind="recurrent", options={"batch_first": False})
    time = probed("batch", "yes")
    time.after = (*time.after, Root(root=0, variable="model", modules=(lstm,)))
    quiet(time.run(), "BATCH_MIXING")


def test_batch_mixing_is_no_note_where_an_evaluation_has_more_rows() -> None:
    mixed = probed("batch", "yes")
    mixed.every = lambda step: [sample(shape=(400, 8))] if step == 9 else []
    fires(mixed.run(), "BATCH_MIXING", "warning")


def test_time_leak_fires_in_a_model_of_the_next_token() -> None:
    assert "causal" in fires(probed("time", "yes", module="attention").run(), "TIME_LEAK", "error").fix


def test_time_leak_fires_and_names_a_reshape_of_heads() -> None:
    run = probed("time", "yes", evidence={"op": "reshape"}).run()
    assert "transpose(1, 2)" in fires(run, "TIME_LEAK", "error").fix


def test_time_leak_is_quiet_for_encoders() -> None:
    encoder = probed("time", "yes")
    encoder.call = call()
    silent(encoder.run(), "TIME_LEAK")
    silent(probed("time", "no").run(), "TIME_LEAK")


def flat(step: int) -> float:
    """A loss that does not fall."""
    return 2.3 + 0.01 * (step % 3)


def test_input_ignored_fires_where_all_outputs_are_one() -> None:
    run = Training(loss=flat, spread=lambda step: 0.5 if step < 4 else 1e-9).run()
    assert fires(run, "INPUT_IGNORED", "warning").step == 4
    asked = probed("input", "no")
    asked.loss = flat
    fires(asked.run(), "INPUT_IGNORED", "warning")


@pytest.mark.parametrize(
    "healthy",
    {
        "spread": Training(loss=flat),
        "at the start only": Training(loss=flat, spread=lambda step: 1e-9 if step == 0 else 0.5),
        "converged": Training(loss=lambda step: 2.0 * 0.3**step, spread=lambda step: 1e-9),
        "an input of equal rows": Training(loss=flat, spread=lambda s: 1e-9, input=sample(std=0.0)),
        "given the same symbol": Training(
            loss=flat, spread=lambda s: 0.0, input=sample(dtype="int64", mean=None, std=None, alike=True)
        ),
        "small": Training(loss=falling, spread=lambda step: 1e-3),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_input_ignored_is_quiet(healthy: tuple[str, Training]) -> None:
    silent(healthy[1].run(), "INPUT_IGNORED")


def test_initial_loss_fires_far_above_the_prior() -> None:
    assert "14.2" in fires(probed("prior", "no", detail="14.2, a guess has 2.3").run(), "INITIAL_LOSS", "info").message


def test_initial_loss_is_quiet_near_the_prior() -> None:
    silent(probed("prior", "yes").run(), "INITIAL_LOSS")


def test_cannot_fit_batch_fires_where_a_copy_does_not_learn() -> None:
    assert fires(probed("one batch", "no").run(), "CANNOT_FIT_BATCH", "warning").evidence


def test_cannot_fit_batch_is_quiet_where_it_does() -> None:
    assert found(probed("one batch", "yes").run(), "CANNOT_FIT_BATCH") == []
