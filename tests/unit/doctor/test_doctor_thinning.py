"""What keeps the recorder cheap loses nothing that it should not lose."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from anybatch.doctor.recorder import Doctor
from anybatch.doctor.recording.numbering import Numbering
from anybatch.doctor.recording.recordings import Sampling
from anybatch.doctor.samples.activations import ActivationSampler
from anybatch.doctor.samples.norms import NormSampler
from anybatch.records.lossfacts import Followed, LossCall
from anybatch.records.runs import load_run
from anybatch.records.samples import Norms, Tied
from loss_calls import patched


def wanted(sampling: Sampling, steps: int, *, own: float, step: float) -> list[int]:
    """Runs a loop in which a sample takes ``own`` seconds and a step ``step``."""
    found, spent, total = [], 0.0, 0.0
    for number in range(steps):
        sampled = sampling.wants(number)
        if sampled:
            found.append(number)
            spent += own
            total += own
        total += step
        sampling.review(number + 1, own=spent, total=total, sampled=sampled)
    return found


def test_cheap_samples_are_all_taken() -> None:
    sampling = Sampling()
    assert wanted(sampling, 200, own=1e-4, step=1e-1) == [*range(10), 25, 50, 75, 100, 125, 150, 175]
    assert sampling.thinned == 0


def test_dear_samples_are_left_out_until_there_is_time_for_them() -> None:
    sampling = Sampling()
    found = wanted(sampling, 5000, own=0.05, step=0.01)
    assert found[:14] == [*range(10), 25, 50, 100, 200]
    assert {400, 800, 1600, 3200} <= set(found)
    assert sampling.thinned == sum(1 for step in range(25, 5001, 25) if step not in found)
    assert 0.05 * len(found) <= 0.01 * (50 + 0.05 * len(found)) + 8 * 0.05  # at most the rare ones are above the share


def test_a_short_run_has_all_its_samples() -> None:
    assert wanted(Sampling(), 120, own=1e-3, step=1e-4)[10:] == [25, 50, 75, 100]


def test_what_the_doctor_takes_is_counted_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Doctor(model, optimizer) as doctor:
        for _ in range(12):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(4, 4)), torch.zeros(4, 2)).backward()
            optimizer.step()
        samplers = list(doctor._samplers._activations.values())
        parts = [one.seconds for _, one in samplers if one is not None]
        assert min(parts) > 0
        assert doctor._own() >= doctor._recording.own + sum(parts)
    assert doctor._own() > doctor._recording.own  # and not forgotten when the hooks are off


def test_a_loss_like_one_before_is_recorded_as_if_it_were_the_first() -> None:
    calls: list[LossCall] = []
    torch.manual_seed(0)
    with patched(calls.append) as recording:
        for _ in range(3):
            logits = torch.randn(6, 3, requires_grad=True)
            value = F.cross_entropy(logits, torch.tensor([0, 1, 2, 0, 1, 2]))
            again = F.mse_loss(logits, torch.zeros(6, 3))
            recording.sampled_much = False
            assert (calls[-2].value, calls[-1].value) == (value.item(), again.item())
    for call in calls[2:]:
        same = calls[0] if call.function == "cross_entropy" else calls[1]
        for name in ("input_shape", "target_shape", "reduction", "weighted", "classes", "line"):
            assert name == "line" or getattr(call, name) == getattr(same, name)
    assert [call.items for call in calls if call.function == "mse_loss"] == [18] * 3
    assert [call.ignored for call in calls if call.function == "cross_entropy"] == [0, -1, -1]


def test_ignored_targets_are_counted_in_each_call_once_there_were_some() -> None:
    calls: list[LossCall] = []
    with patched(calls.append) as recording:
        for count in (1, 2, 3):
            target = torch.tensor([-100] * count + [0] * (5 - count))
            F.cross_entropy(torch.zeros(5, 2, requires_grad=True), target)
            recording.sampled_much = False
    assert [call.items for call in calls] == [4, 3, 2]


def test_a_loss_that_is_not_finite_is_looked_at_again() -> None:
    calls: list[LossCall] = []
    with patched(calls.append) as recording:
        for target in (torch.zeros(3).long(), torch.full((3,), -100)):
            F.cross_entropy(torch.zeros(3, 2, requires_grad=True), target)
            recording.sampled_much = False
    assert (calls[1].items, calls[1].ignored) == (0, 3)


def test_a_tie_is_seen_before_the_first_step_breaks_it() -> None:
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    model = nn.ModuleList([embedding, head])
    head.weight.data.copy_(embedding.weight.data)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, ids: torch.Tensor) -> Any:
            return self.parts[1](self.parts[0](ids))

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with Doctor() as doctor:
        net(torch.tensor([1, 2])).pow(2).sum().backward()
        optimizer.step()
    assert [(fact.pairs, fact.differ) for fact in doctor.run.of(Tied)] == [(((0, 1),), ()), (((0, 1),), ((0, 1),))]


def test_detaching_leaves_everything_in_the_file(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    doctor = Doctor(model, optimizer, path=tmp_path / "run.jsonl")
    doctor.attach()
    for _ in range(15):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    doctor.detach()
    assert load_run(tmp_path / "run.jsonl").steps == 15
    doctor.close()


@pytest.mark.parametrize("layers", [5, 40, 100])
def test_of_a_large_model_some_modules_stand_for_all_and_none_is_said_to_be_unused(layers: int) -> None:
    model = nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(4, 4), nn.Tanh())])
    numbering = Numbering(lambda fact: None)
    sampler = ActivationSampler(numbering.models[numbering.root(model)])
    names = []
    for _ in range(2):
        with sampler.attached():
            model(torch.ones(2, 4))
        result = sampler.result()
        assert result is not None
        assert result.uncalled == ()
        names.append([one.module for one in result.modules])
    assert names[0] == names[1]
    assert {"0", str(2 * layers - 1), ""} <= set(names[0])
    assert len(names[0]) == min(2 * layers + 1, 64) or 60 <= len(names[0]) <= 66
    assert not any(module._forward_hooks for module in model.modules())


def test_a_large_output_is_read_in_part_and_still_tells_dead_units() -> None:
    layer = nn.Conv2d(1, 8, 1)
    model = nn.Sequential(layer, nn.ReLU())
    assert layer.bias is not None
    with torch.no_grad():
        layer.bias[:3] = -100.0
        layer.bias[3:] = 100.0
    numbering = Numbering(lambda fact: None)
    sampler = ActivationSampler(numbering.models[numbering.root(model)])
    with sampler.attached():
        model(torch.rand(4, 1, 80, 80))
    result = sampler.result()
    assert result is not None
    assert next(one.dead for one in result.modules if one.module == "1") == 3 / 8


def test_sampled_entries_of_large_matrices_and_rows_of_embeddings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30_000, 4), nn.Flatten(), nn.Linear(4, 30_000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbering = Numbering(lambda fact: None)
    numbering.root(model)
    sampler = NormSampler(numbering)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.tensor([[17]])).pow(2).mean().backward()
    sampler.before(optimizer)
    optimizer.step()
    norms: Norms = sampler.after(optimizer)
    for position, (old, new) in enumerate(zip(before, model.parameters(), strict=True)):
        assert norms.update[position] == pytest.approx(float((new.detach() - old).norm()), rel=0.05)
        assert norms.weight[position] == pytest.approx(float(old.norm()), rel=1e-5)
        assert new.grad is not None
        assert norms.grad[position] == pytest.approx(float(new.grad.norm()), rel=1e-5)
    assert norms.update[0] > 0  # one row of 30000
    assert norms.unchanged[0] < 1.0


class Template(nn.Module):
    """Its input does not reach its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Makes logits of a template."""
        h = torch.relu(self.embed(x))
        return cast(torch.Tensor, self.out(torch.zeros(16).expand(len(h), -1)))


def test_what_samplers_do_is_none_of_the_steps_that_are_followed() -> None:
    model = Template()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Doctor(model, optimizer) as doctor:
        for _ in range(30):
            x = torch.randn(32, 6)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
    assert _get_current_function_mode_stack() == []  # the backward that it was left in was an operation, too
    followed = list(doctor.run.of(Followed))
    assert followed
    ops = {stop["op"] for one in followed for stop in one.paths["stopped"].values()}
    assert ops <= {"left out", "unused", "unknown"}, ops
