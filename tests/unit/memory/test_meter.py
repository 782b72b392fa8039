"""Live bytes are counted once a storage, from the operation that made it until it is gone."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.memory.measuring import measure
from anybatch.memory.meter import BEFORE, OverBudget, Recording, resident_bytes, storages_of
from anybatch.records.memory import CATEGORIES, Memory
from anybatch.tensors.fakes import Fakes
from live_bytes import LiveBytes
from planning_referee import alive_in, peak_of

KIB = 1024


@pytest.fixture(autouse=True)
def quiet_collector() -> Iterator[None]:
    """A collection in the middle of a measurement would free what reference cycles hold."""
    gc.disable()
    yield
    gc.enable()


def kibibytes(count: int) -> Tensor:
    return torch.zeros(count * KIB, dtype=torch.uint8)


def views() -> None:
    kept = kibibytes(8)
    several = [kept[:10], kept.view(2, -1), kept.detach(), kept.split(1024)]
    del several


def in_place() -> None:
    kept = kibibytes(8)
    kept.add_(1).mul_(2).relu_()
    kept[3:5].zero_()


def freed_between() -> None:
    one = kibibytes(3)
    del one
    two, three = kibibytes(2), kibibytes(5) + 1  # both operands are alive with the sum
    del two, three
    kibibytes(4)


def grows() -> None:
    kept = torch.empty(16, dtype=torch.uint8)
    kept.resize_(4 * KIB)
    kept.add_(1)


def grows_from_nothing() -> None:
    out = torch.empty(0, dtype=torch.uint8)
    torch.add(kibibytes(4), 1, out=out)


def shrinks_never() -> None:
    kept = kibibytes(4)
    kept.resize_(10)  # torch keeps the storage
    kibibytes(1)


def several_outputs() -> None:
    values, places = kibibytes(4).sort()
    del values
    places.sum()


def lists_of_tensors() -> None:
    ones = [kibibytes(1) for _ in range(3)]
    torch._foreach_add_(torch._foreach_add(ones, 1), ones)


def sparse() -> None:
    table = torch.eye(64).to_sparse()
    (table + table).coalesce().to_dense()


def compressed() -> None:
    torch.eye(64).to_sparse_csr().to_dense()


def graph() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    (torch.ones(32, 64) @ weight).tanh().square().sum().backward()


def strided_again() -> None:
    torch.ones(64).expand(64, 64).contiguous().t().as_strided((4, 4), (1, 4)).sum()


WORK: list[Callable[[], None]] = [
    views, in_place, freed_between, grows, grows_from_nothing, shrinks_never, several_outputs, lists_of_tensors, graph,
    strided_again,
]  # fmt: skip


@pytest.mark.parametrize("work", WORK)
def test_both_meters_agree_with_the_referee(work: Callable[[], None]) -> None:
    truth = peak_of(work, [])
    with LiveBytes() as live:
        work()
    with Recording() as recording:
        work()
    assert live.peak == truth
    assert max(recording.live_bytes()) == truth
    assert live.current == 0
    assert recording.by_category() == {}


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("work", [sparse, compressed])
def test_tensors_made_of_others_count_with_all_their_parts(work: Callable[[], None]) -> None:
    with LiveBytes():
        work()  # what torch imports at the first sparse tensor keeps it in a cycle
    gc.collect()
    with LiveBytes() as live:
        work()
    with Recording() as recording:
        work()
    dense = 64 * 64 * 4
    assert live.peak == max(recording.live_bytes()) > dense
    assert live.current == 0
    assert recording.by_category() == {}


def test_a_storage_resized_behind_the_back_counts_anew_at_its_next_use() -> None:
    with Recording() as recording:
        kept = kibibytes(8)
        kept.untyped_storage().resize_(0)
        kept.untyped_storage().resize_(4 * KIB)
        kept.resize_(4 * KIB).add_(1)
        assert recording.by_category() == {"activations": 4 * KIB}


def test_what_was_alive_before_counts_from_the_start() -> None:
    told, untold = kibibytes(5), kibibytes(7)
    recording = Recording()
    recording.register([told, told[3:], told.view(5, -1), None, "no tensor"], "inputs")
    with recording:
        early = kibibytes(10)
        del early
        untold.sum()
        told.sum()
    assert max(recording.live_bytes()) == (5 + 7 + 10) * KIB
    assert recording.by_category() == {"inputs": 5 * KIB, "other": 7 * KIB}
    assert [one.born for one in recording.allocations].count(BEFORE) == 2


def test_live_bytes_count_what_they_are_told_of_until_it_is_gone() -> None:
    kept = [kibibytes(5)]
    with LiveBytes([kept[0], kept[0][1:]]) as live:
        assert live.current == 5 * KIB
        kept.clear()
        assert live.current == 0
        kibibytes(4)
    assert live.peak == 5 * KIB


def test_what_is_registered_as_not_counted_stays_uncounted() -> None:
    kept = kibibytes(5)
    with Recording() as recording:
        recording.register([kept], "inputs", counted=False)
        kept.add_(1)
        kept[2:].sum()
    assert recording.by_category() == {}
    assert max(recording.live_bytes()) == 8  # of the sum


def test_a_tensor_that_dies_between_operations_is_not_alive_in_the_next() -> None:
    with Recording() as recording:
        kept = kibibytes(3)
        del kept
        kibibytes(1)
        kibibytes(1)
    assert recording.live_bytes() == [3 * KIB, KIB, KIB]
    assert [one.died for one in recording.allocations] == [1, 2, 3]


def test_an_input_that_dies_with_its_operation_still_counts_in_it() -> None:
    with Recording() as recording:
        kept = kibibytes(3).sum()
        kept.add_(1)
    assert recording.operations[1:] == ["sum", "add_"]
    assert recording.live_bytes() == [3 * KIB, 3 * KIB + 8, 8]


def test_the_backward_is_noted_where_it_first_reads() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    with Recording() as recording:
        hidden = weight.exp()
        loss = hidden.sin().sum()
        forward = recording.now
        loss.backward()
        by_hidden = recording.allocations_of([hidden, None, 3])
    assert len(by_hidden) == 1
    assert by_hidden[0].back is not None
    assert by_hidden[0].back >= forward
    assert recording.allocations_of([weight])[0].back is None


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), max_size=25))
def test_live_bytes_are_the_sum_of_what_is_held(script: list[tuple[int, int]]) -> None:
    """Any order of making, dropping and viewing, beside a count by hand."""
    held: dict[int, Tensor] = {}
    by_hand, peak = 0, 0
    with Recording() as recording, LiveBytes() as live:
        for slot, size in script:
            if slot in held:
                by_hand -= held.pop(slot).nbytes
            if size % 3:
                made = torch.zeros(size)
                held[slot] = made.view(-1)
                del made
                by_hand += size * 4
                peak = max(peak, by_hand)
            assert sum(recording.by_category().values()) == live.current == by_hand
    assert live.peak == max(recording.live_bytes(), default=0) == peak


@given(st.integers(0, 5000), st.sampled_from([1, 2, 512]))
def test_sizes_are_rounded_up_to_the_granularity(size: int, granularity: int) -> None:
    with Recording(granularity=granularity) as recording:
        kept = torch.zeros(size, dtype=torch.uint8)
        found = sum(recording.by_category().values())
    assert kept.nbytes <= found < kept.nbytes + granularity
    assert found % granularity == 0


def test_only_the_asked_device_counts() -> None:
    with Recording(device_type="cuda") as recording:
        kibibytes(3)
    assert recording.memory() == Memory(0, 0, {}, {}, "zeros")


def test_tensors_without_numbers_count_only_if_asked() -> None:
    fakes = Fakes()
    for counts in (False, True):
        with Recording(counts_fakes=counts) as recording:
            torch.empty(100, device="meta") + 1
            with fakes.mode:
                torch.empty(100) + 1
        assert max(recording.live_bytes()) == (800 if counts else 0)
    with LiveBytes() as live:
        torch.empty(100, device="meta") + 1
    assert live.peak == 0


@pytest.mark.parametrize("mode", [LiveBytes, Recording])
def test_modes_within_each_other_see_the_same(mode: Any) -> None:
    with mode() as outer, mode() as inner:
        freed_between()
    if mode is LiveBytes:
        assert outer.peak == inner.peak == 12 * KIB
    else:
        assert outer.operations == inner.operations
        assert outer.live_bytes() == inner.live_bytes()


def test_nothing_stays_after_an_exception() -> None:
    with pytest.raises(ValueError, match="bomb"), Recording(), LiveBytes():
        raise ValueError("bomb")
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(10**6),
        lambda: torch.randn(10**6),
        lambda: torch.ones(1000, 1) * torch.ones(1, 1000),
        lambda: torch.ones(1000, 1) @ torch.ones(1, 1000),
        lambda: torch.ones(1, 1000).expand(1000, 1000).contiguous(),
    ],
)
def test_what_would_go_over_a_limit_does_not_run(make: Callable[[], Tensor]) -> None:
    recording, drawn = Recording(limit=10**5), torch.get_rng_state()
    with pytest.raises(OverBudget) as caught, recording:
        make()
    assert caught.value.needed >= 4 * 10**6
    assert recording.most <= 10**5
    assert torch.equal(drawn, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_storages_of_every_layout() -> None:
    assert [s.nbytes() for s in storages_of(torch.zeros(3)[1:])] == [12]
    assert [s.nbytes() for s in storages_of(torch.eye(4).to_sparse())] == [64, 16]
    for table in (torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_csc()):
        assert [s.nbytes() for s in storages_of(table)][::2] == [40, 16]
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    assert sum(s.nbytes() for s in storages_of(jagged)) == 6 * 3 * 4 + 3 * 8


class Network(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x) * self.scale)
        return y


WEIGHT = 64 * 64 * 4


@pytest.mark.parametrize("tied", [False, True])
def test_measure_tells_categories_apart_in_the_first_step(tied: bool) -> None:
    model = Network()
    if tied:
        model.last.weight = model.first.weight
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(8, 64)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()

    memory = measure(step, model=model, optimizer=optimizer, batch=batch)
    weights = WEIGHT * (1 if tied else 2)
    assert memory.at_end["parameters"] == memory.at_end["gradients"] == weights
    assert memory.at_end["optimizer state"] == 2 * weights + 4 * (1 if tied else 2)
    assert memory.at_end["inputs"] == 8 * 64 * 4
    assert memory.at_end["buffers"] == 64 * 4
    assert memory.at_peak["gradients"] == weights
    assert memory.at_peak["optimizer state"] > weights
    assert sum(memory.at_peak.values()) == memory.peak_bytes
    assert sum(memory.at_end.values()) == memory.end_bytes
    assert set(memory.at_peak) <= set(CATEGORIES)


def test_measure_agrees_with_the_referee() -> None:
    model = Network()
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(8, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()

    step()
    truth = peak_of(step, alive_in(model, [optimizer], batch))
    assert measure(step, model=model, optimizer=optimizer, batch=batch).peak_bytes == truth
    assert measure(step, optimizer=optimizer, batch=batch).peak_bytes <= truth
    assert measure(step, model=model).peak_bytes <= truth


def test_measure_knows_gradients_that_are_gone_at_the_end() -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    memory = measure(step, model=model, optimizer=optimizer)
    assert memory.at_peak["gradients"] > 0
    assert "gradients" not in memory.at_end


def test_measure_takes_a_function() -> None:
    with pytest.raises(TypeError, match=r"got a Tensor; expected a function, as in measure\(lambda: step\(batch\)\)"):
        measure(torch.ones(2).sum())  # type: ignore[arg-type]


def test_measure_counts_gradients_that_were_there() -> None:
    model = Network()
    model(torch.ones(8, 64)).sum().backward()
    memory = measure(lambda: None, model=model)
    assert memory.peak_bytes == memory.end_bytes == 4 * WEIGHT + 64 * 4
    assert memory.at_end["gradients"] == 2 * WEIGHT


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_measure_takes_its_hooks_off_whatever_happens(error: type[BaseException]) -> None:
    model = Network()
    optimizer = torch.optim.Adam(model.parameters())

    def bomb() -> None:
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        raise error("bomb")

    with pytest.raises(error):
        measure(bomb, model=model, optimizer=optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert torch._C._len_torch_dispatch_stack() == 0


def test_measure_within_measure() -> None:
    inner: list[Memory] = []
    outer = measure(lambda: inner.append(measure(freed_between)))
    assert outer.peak_bytes == inner[0].peak_bytes == 12 * KIB


def test_measure_of_nothing() -> None:
    memory = measure(lambda: None)
    assert memory == Memory(0, 0)
    assert "nothing" in str(memory)


@pytest.mark.parametrize(("uses", "linear", "in_place"), [(2, False, 1), (3, False, 2), (2, True, 0), (3, True, 1)])
def test_sums_that_torch_writes_in_place_without_a_mode(uses: int, linear: bool, in_place: int) -> None:
    """Not the first one of the weight of linear layers: its gradient is a transposed view, which holds its base."""
    weight, inputs = torch.randn(8, 8, requires_grad=True), torch.randn(uses, 4, 8)
    with Recording() as recording:
        losses = [(F.linear(one, weight) if linear else one @ weight).sum() for one in inputs]
        torch.stack(losses).sum().backward()
    assert len(recording.sums) == in_place


def test_the_memory_of_the_process_is_0_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resident_bytes() > 2**20

    def refused(process: Any) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_info", refused)
    assert resident_bytes() == 0
