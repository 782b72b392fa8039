"""Questions to copies of models: faulty ones are found, healthy ones and those that may be meant are not accused."""

import asyncio
import copy
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

from anybatch import Doctor
from anybatch.doctor.ask.asking import run_probes
from anybatch.records.lossfacts import Probed
from probe_models import Made, Recorder, made


def answers(name: str) -> dict[str, Probed]:
    return {one.probe: one for one in run_probes(made(name))}


@pytest.mark.parametrize(
    ("name", "op", "module"),
    [
        ("softmax over dim 0", "softmax", ""),
        ("softmax layer over dim 0", "softmax", "1"),
        ("normalize over dim 0", "normalize", ""),
        ("view for transpose", "view", ""),
        ("view of tokens", "view", ""),
        ("batch_first forgotten", "gru", "layers.0"),
        ("batch_first forgotten, loaded", "lstm", "layers.0"),
        ("batch_first forgotten, in a model that gives its loss", "multi_head_attention_forward", "mix.self_attn"),
    ],
)
def test_samples_that_mix_are_found(name: str, op: str, module: str) -> None:
    found = answers(name)["batch"]
    assert (found.answer, found.evidence["op"], found.module) == ("yes", op, module), found
    assert found.evidence["confirmed"] is not False
    if not module:
        assert found.file.endswith("probe_models.py")


@pytest.mark.parametrize(
    "name",
    ["mlp", "conv net", "transpose", "batch norm", "batch_first", "time first, transposed", "rows by time", "stateful",
     "dropout", "dict output", "loss of rows", "loss of noise, which comes first", "causal", "causal layer", "lstm",
     "flat logits"],
)  # fmt: skip
def test_samples_that_do_not_mix_are_cleared(name: str) -> None:
    found = answers(name)
    assert found["batch"].answer == "no", found["batch"]
    assert found["input"].answer == "no"
    assert found["modes"].answer == "no"


@pytest.mark.parametrize("name", ["causal, shifted in a loss", "loss of statistics"])
def test_a_model_that_gives_a_loss_of_parts_is_not_accused(name: str) -> None:
    found = answers(name)
    assert "yes" not in (found["time"].answer, found["input"].answer, found["batch"].answer), found


def test_a_model_that_gives_its_loss_is_cleared_by_what_the_loss_compares() -> None:
    assert answers("loss")["batch"].answer == "no"


@pytest.mark.parametrize(
    "name",
    ["no statistics", "time first", "lstm with a state, time first",
     "lstm with a table of the samples, time first", "groups of rows in a loss", "transformer with places, time first",
     "attention over time, time first", "transformer, time first", "graph",
     "graph, normalised", "edges", "set attention", "centred", "one row"],
)  # fmt: skip
def test_mixing_that_may_be_meant_is_not_called_a_fault(name: str) -> None:
    found = answers(name)["batch"]
    assert found.answer == "unknown", found
    assert found.detail


@pytest.mark.parametrize(
    ("name", "answer"),
    [("no mask", "yes"), ("no mask, layer", "yes"), ("both directions", "yes"), ("causal", "no"),
     ("heads first", "yes"), ("heads behind", "no"),
     ("causal layer", "no"), ("lstm", "no"), ("flat logits", "no"), ("encoder", "unknown"), ("mlp", "unknown")],
)  # fmt: skip
def test_a_leak_from_later_tokens_is_found_where_the_next_is_predicted(name: str, answer: str) -> None:
    assert answers(name)["time"].answer == answer


def test_the_layer_that_looks_ahead_is_named() -> None:
    assert answers("no mask, layer")["time"].module == "layer.self_attn"
    assert answers("both directions")["time"].module == "layers.1"
    assert answers("heads first")["time"].evidence["op"] == "reshape"
    leak = answers("no mask")["time"]
    assert leak.evidence["op"] == "matmul"
    assert leak.line > 0


def test_an_ignored_input_is_found() -> None:
    assert answers("collapsed")["input"].answer == "yes"
    assert answers("one row")["input"].answer == "unknown"


@pytest.mark.parametrize(("name", "op"), [("always dropping", "dropout"), ("sampling", "randn_like")])
def test_evaluations_that_differ_are_found_with_the_operation(name: str, op: str) -> None:
    found = answers(name)["modes"]
    assert (found.answer, found.evidence["op"]) == ("yes", op)


def test_a_model_that_can_not_be_copied_is_no_fault() -> None:
    recorder = made("softmax over dim 0")
    recorder.last_inputs[0][0].generator = (one for one in range(3))  # type: ignore[assignment]
    found = run_probes(recorder)
    assert {one.answer for one in found} == {"unknown"}
    assert "copied" in found[0].detail


def test_the_time_is_kept() -> None:
    def slow(layers: Any, rows: torch.Tensor) -> Any:
        time.sleep(0.2)
        return layers[0](rows)

    started = time.perf_counter()
    found = run_probes(Recorder(Made(slow, nn.Linear(6, 3)), torch.randn(16, 6)), seconds=0.3)
    assert time.perf_counter() - started < 2
    assert any("no time" in one.detail for one in found)
    assert {one.answer for one in found} <= {"unknown", "no"}


def test_a_model_that_fails_or_changes_its_form_is_survived() -> None:
    def fails(layers: Any, rows: torch.Tensor) -> Any:
        raise ValueError("not now")

    calls: list[int] = []

    def changes(layers: Any, rows: torch.Tensor) -> Any:
        calls.append(0)
        return [layers[0](rows)] * len(calls)

    for function in (fails, changes):
        found = run_probes(Recorder(Made(function, nn.Linear(6, 3)), torch.randn(16, 6)))
        assert {one.answer for one in found} == {"unknown"}
    assert run_probes(object()) == []
    assert run_probes(Recorder(None)) != []  # type: ignore[arg-type]


def test_a_model_that_prints_or_leaves_does_neither_here(capsys: pytest.CaptureFixture[str]) -> None:
    def leaves(layers: Any, rows: torch.Tensor) -> Any:
        print("forward")  # noqa: T201
        if len(rows) < 16:
            sys.exit(3)
        return layers[0](rows)

    found = run_probes(Recorder(Made(leaves, nn.Linear(6, 3)), torch.randn(16, 6)))
    assert found[0].answer == "no"
    assert capsys.readouterr().out == ""
    assert run_probes(Recorder(Made(lambda m, x: sys.exit(3), nn.Linear(6, 3)), torch.randn(16, 6)))[0].detail


def test_what_a_question_fails_with_is_logged_and_leaves_the_others_theirs(caplog: pytest.LogCaptureFixture) -> None:
    def cancelled(layers: Any, rows: torch.Tensor) -> Any:
        raise asyncio.CancelledError("no more")

    found = run_probes(Recorder(Made(cancelled, nn.Linear(6, 3)), torch.randn(16, 6)))
    assert len(found) > 1
    assert {one.answer for one in found} == {"unknown"}
    assert "the probe batch failed: CancelledError: no more" in caplog.text


def test_a_model_that_gives_other_values_each_time_is_not_accused() -> None:
    calls: list[int] = []

    def counts(layers: Any, rows: torch.Tensor) -> Any:
        calls.append(0)
        return layers[0](rows) + len(calls)

    found = {one.probe: one for one in run_probes(Recorder(Made(counts, nn.Linear(6, 3)), torch.randn(16, 6)))}
    assert (found["batch"].answer, "differ" in found["batch"].detail) == ("unknown", True)
    assert found["modes"].answer == "yes"


def test_nothing_of_the_users_is_touched() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    rows = torch.randn(8, 6)
    model(rows).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    versions = [p._version for p in model.parameters()]
    state, kept = torch.get_rng_state(), rows.clone()
    with torch.no_grad():
        run_probes(Recorder(model, rows), active=True)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(rows, kept)
    assert rows.grad is None
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p._version for p in model.parameters()] == versions
    assert all(p.grad is one for p, (one, _) in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(one, copied) for one, copied in gradients)


def test_the_last_inputs_of_a_recorder_are_asked() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Softmax(dim=0))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with Doctor(net, sgd) as doctor:
        for _ in range(3):
            sgd.zero_grad()
            net(torch.randn(16, 6)).pow(2).sum().backward()
            sgd.step()
    facts = len(doctor.run.facts)
    found = {one.probe: one for one in run_probes(doctor)}
    assert (found["batch"].answer, found["batch"].module) == ("yes", "1")
    assert len(doctor.run.facts) == facts


@pytest.mark.parametrize(("batch_first", "expected"), [(False, "yes"), (True, "no")])
def test_a_ctc_loss_shows_which_dim_has_the_samples(batch_first: bool, expected: str) -> None:
    torch.manual_seed(0)

    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.out = nn.GRU(4, 6, batch_first=batch_first), nn.Linear(6, 3)

        def forward(self, sound: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.out(self.gru(sound)[0]).log_softmax(2)
            return scores.transpose(0, 1)

    net, lengths = Speech(), torch.full((8,), 11)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with Doctor(net, sgd) as doctor:
        for _ in range(3):
            sgd.zero_grad()
            targets = torch.randint(1, 3, (8, 4))
            nn.functional.ctc_loss(net(torch.randn(8, 11, 4)), targets, lengths, torch.full((8,), 4)).backward()
            sgd.step()
    assert next(one for one in run_probes(doctor) if one.probe == "batch").answer == expected
