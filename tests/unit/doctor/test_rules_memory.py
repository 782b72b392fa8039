"""Rules of the family memory: each fires on a run that has the fault, and is quiet on one that only looks like it."""

from collections.abc import Sequence

import torch

from anybatch import Doctor
from anybatch.records.lossfacts import Walk
from anybatch.records.runs import Run
from anybatch.records.samples import Memory
from rule_runs import LINES, RunBuilder, findings, simple


def walked(nodes: Sequence[int], *, previous: bool = True, retain: bool = False) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for index, count in enumerate(nodes):
        built.clear()
        built.forward()
        built.add(Walk(nodes=count, previous=("hidden (8, 16)",) if previous and index else ()))
        built.backward(numbers, retain=retain)
        built.step()
    return built


def test_graph_grows_fires_on_steady_growth_into_earlier_steps() -> None:
    (one,) = findings(walked([20, 40, 60, 80, 100, 120]), "GRAPH_GROWS")
    assert one.place.line == LINES["backward"]
    assert "hidden (8, 16)" in one.message
    assert findings(walked([20, 40, 60, 80, 100], previous=False, retain=True), "GRAPH_GROWS")


def test_graph_grows_is_quiet_on_windows_that_are_cut_and_on_longer_sequences() -> None:
    assert not findings(walked([20, 40, 60, 20, 40, 60, 20, 40]), "GRAPH_GROWS")
    assert not findings(walked([20, 40, 60, 80, 100, 120], previous=False), "GRAPH_GROWS")
    assert not findings(walked([50] * 8), "GRAPH_GROWS")
    assert not findings(walked([20, 21, 60, 61, 200, 201]), "GRAPH_GROWS")


def by_hand(nodes: Sequence[int]) -> RunBuilder:
    """Backwards of a model without an optimizer; only some of their graphs are looked at."""
    built = RunBuilder()
    numbers = built.model()
    for index in range(nodes.index(nodes[-1]) + 21):
        if index < len(nodes) - 1 or index == len(nodes) + 19:
            built.add(Walk(nodes=nodes[min(index, len(nodes) - 1)], reached=numbers))
        built.backward(numbers, retain=True)
    return built


def test_graph_grows_fires_where_the_updates_are_by_hand_and_few_graphs_are_looked_at() -> None:
    (one,) = findings(by_hand([90, 180, 270, 360, 360 + 21 * 90]), "GRAPH_GROWS")
    assert "360" in str(one.evidence["nodes"])


def test_graph_grows_is_quiet_where_graphs_by_hand_differ_and_grow_by_no_rule() -> None:
    assert not findings(by_hand([90, 180, 270, 360, 100000]), "GRAPH_GROWS")
    assert not findings(by_hand([90, 90, 90, 90, 90]), "GRAPH_GROWS")


def alive(graphs: Sequence[int]) -> RunBuilder:
    built = simple(1)
    for count in graphs:
        built.train((0, 1, 2, 3), 1)
        built.add(Memory(graphs=count))
    return built


def test_graph_kept_in_log_fires_on_losses_that_are_added_up() -> None:
    (one,) = findings(alive(range(9)), "GRAPH_KEPT_IN_LOG")
    assert ".item()" in one.fix


def test_graph_kept_in_log_is_quiet_on_a_bounded_history() -> None:
    assert not findings(alive([0, 1, 2, 3, 4, 5, 6, 6, 6, 6]), "GRAPH_KEPT_IN_LOG")
    assert not findings(alive([0, 1, 0, 1, 0, 1, 0, 1]), "GRAPH_KEPT_IN_LOG")
    assert not findings(alive([0] * 9), "GRAPH_KEPT_IN_LOG")


def test_retain_graph_fires_as_a_remark() -> None:
    (one,) = findings(walked([20] * 5, retain=True, previous=False), "RETAIN_GRAPH")
    assert one.severity == "info"


def played(*, shared: bool) -> Run:
    """A discriminator and a generator; the second loss goes through the sample of the first one, or through its own."""
    torch.manual_seed(0)
    generator, critic = torch.nn.Linear(4, 2), torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 1))
    first, second = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (critic, generator))
    with Doctor() as doctor:
        for _ in range(5):
            fake = generator(torch.randn(6, 4))
            first.zero_grad()
            second.zero_grad()
            critic(fake).mean().backward(retain_graph=True)
            critic(fake if shared else generator(torch.randn(6, 4))).square().mean().neg().backward()
            first.step()
            second.step()
    return doctor.run


def test_retain_graph_is_quiet_where_a_later_backward_shares_a_part() -> None:
    assert not findings(played(shared=True), "RETAIN_GRAPH")
    assert findings(played(shared=False), "RETAIN_GRAPH")
    built = walked([20] * 5, retain=True, previous=False)
    built.add(Walk(nodes=20, again=3))
    assert not findings(built, "RETAIN_GRAPH")


def test_retain_graph_is_quiet_on_two_backwards_of_one_forward() -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for _ in range(4):
        built.clear()
        built.forward()
        built.backward(numbers, retain=True, line=41)
        built.backward(numbers, line=42)
        built.step()
    assert not findings(built, "RETAIN_GRAPH")
