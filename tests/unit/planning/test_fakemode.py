"""Remembered operations give what torch's own fake tensors give, down to strides, storages and views."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.batch.batches import Part, Splittable
from anybatch.loss.accumulate import Settings
from anybatch.memory.meter import Recording
from anybatch.planning.blocks import blocks_of
from anybatch.planning.memorytrace import PassTrace, Tracer
from anybatch.planning.recipe import Recipe
from anybatch.planning.subjects import Subject
from anybatch.tensors.dispatch import TorchDispatchMode
from anybatch.tensors.fakes import NAME as CONSTANT
from anybatch.tensors.fakes import Constants, QuickFakeMode
from planning_models import FACTORIES, NAMES

CPU = torch.device("cpu")


def traced(name: str, rows: int) -> PassTrace:
    subject = FACTORIES[name]()
    splittable = Splittable(
        [subject.make_batch(8)], **{k: v for k, v in subject.options.items() if k in ("collate", "cost")}
    )
    planned = Subject(subject.model, subject.loss_fn, Settings(CPU, subject.autocast), splittable, batch_norm="ghost")
    blocks = blocks_of(subject.model)
    tracer = Tracer(planned, blocks, Recording, is_fake=True, may_probe=False)
    return tracer.trace([Part(range(rows), rows)], Recipe(), split=True)


def facts(trace: PassTrace) -> list[Any]:
    found = [(a.born, a.size, a.category, a.died, a.back) for a in trace.allocations]
    return [trace.operations, found, trace.trained, trace.accumulated, trace.kept, trace.input_sizes]


@pytest.mark.parametrize("name", [name for name in NAMES if not FACTORIES[name]().needs_real_probes])
def test_a_trace_is_that_of_torchs_own_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(FakeTensorMode):
        constants = Constants()

    quick = traced(name, 3)
    monkeypatch.setattr("anybatch.tensors.fakes.QuickFakeMode", Plain)
    assert facts(quick) == facts(traced(name, 3))


def layout(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [layout(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    place = (tuple(value.shape), value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    return (*place, value.dtype, value.device, value.requires_grad, value.is_conj(), value.is_neg())


def shares(one: Any, other: Tensor) -> list[bool]:
    return [
        part.untyped_storage()._cdata == other.untyped_storage()._cdata
        for part in (one if isinstance(one, (list, tuple)) else [one])
        if isinstance(part, Tensor)
    ]


def changed_lists(lists: list[Tensor]) -> list[Tensor]:
    torch._foreach_mul_(lists, 2)
    torch._foreach_add_(lists, [one.clone() for one in lists])
    torch._foreach_add_(lists, [1.0, 2.0, 2.0][: len(lists)])
    return lists


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + x,
    "add of a part": lambda x: x + x[:1],
    "scalar": lambda x: x * 2.5,
    "whole number": lambda x: x.floor_divide(2) if not x.is_complex() else x * 2,
    "comparison": lambda x: x.real > 0 if x.is_complex() else x > 0,
    "transposed": lambda x: x.t(),
    "transposed and copied": lambda x: x.t().contiguous(),
    "expanded": lambda x: x[:1].expand(5, x.shape[1]),
    "slices": lambda x: x.split(2),
    "halves": lambda x: x.chunk(2, 1),
    "rows": lambda x: x.unbind(0),
    "flat": lambda x: x.reshape(-1),
    "detached": lambda x: x.detach(),
    "alias": torch.ops.aten.alias.default,
    "conjugated": lambda x: x.conj(),
    "imaginary": lambda x: x.conj().imag if x.is_complex() else x,
    "maximum": lambda x: (x.real if x.is_complex() else x).max(1),
    "cast": lambda x: x.to(torch.float64) if not x.is_complex() else x.to(torch.complex128),
    "cast to its own": lambda x: x.to(x.dtype),
    "joined": lambda x: torch.cat([x, x[1:]]),
    "stacked": lambda x: torch.stack([x, x]),
    "zeros": torch.zeros_like,
    "new": lambda x: x.new_empty((3, 2)),
    "strided": lambda x: x.as_strided((2,), (1,), 1),
    "changed": lambda x: x.clone().mul_(2),
    "changed by a part": lambda x: x.clone().add_(x[:1]),
    "changed by itself": lambda x: (y := x.clone()).add_(y),
    "changed and given": lambda x: x.detach().mul_(2),
    "grown": lambda x: x.detach().clone().resize_(9, 9),
    "changed lists": lambda x: changed_lists([x.clone(), x.clone()[:1], x.clone()]),
    "lists": lambda x: torch._foreach_add([x, x[:1], x], 1),
    "changed shape": lambda x: x.clone().unsqueeze_(0),
    "chosen": lambda x: x[torch.tensor([0, 1])],
    "product": lambda x: x @ x.mT,
    "moved": lambda x: x.movedim(0, 1).unsqueeze(0),
    "permuted memory": lambda x: x[None, None].to(memory_format=torch.channels_last),
}


# The same shape, laid out in other ways.
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "first": lambda whole: whole[:4, :4],
    "later": lambda whole: whole[2:6, 1:5],
    "every second": lambda whole: whole[:4, ::2],
    "transposed": lambda whole: whole[:4, :4].t(),
    "copied": lambda whole: whole[:4, :4].contiguous(),
    "expanded": lambda whole: whole[:1, :4].expand(4, 4),
}


@given(
    layouts=st.lists(st.sampled_from(list(LAYOUTS)), min_size=2, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64]),
    tracked=st.booleans(),
    names=st.lists(st.sampled_from(list(OPERATIONS)), min_size=1, max_size=4),
)
def test_any_operation_on_any_layouts(layouts: list[str], dtype: torch.dtype, tracked: bool, names: list[str]) -> None:
    quick, own = QuickFakeMode(allow_non_fake_inputs=True), FakeTensorMode(allow_non_fake_inputs=True)
    for name in names:
        for chosen in [*layouts, *layouts]:
            found = []
            for mode in (quick, own):
                with mode:
                    whole = torch.empty(8, 8, dtype=dtype)
                    x = LAYOUTS[chosen](whole)
                    if tracked and dtype.is_floating_point:
                        x = x.requires_grad_()
                    result = OPERATIONS[name](x)
                    found.append((layout(result), shares(result, whole)))
            assert found[0] == found[1], (name, chosen)


def test_default_dtypes_and_inference_are_told_apart() -> None:
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    with mode:
        whole = torch.ones(3, dtype=torch.int64)
        assert (whole / 2).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (whole / 2).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert not (whole / 2).is_inference()
        with torch.inference_mode():
            assert (whole / 2).is_inference()
        assert (whole * True).dtype == torch.int64
        assert (whole * 1.0).dtype == torch.float32
        assert (whole * 1).dtype == torch.int64


def test_values_are_asked_of_torch_each_time() -> None:
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    with mode:
        assert [torch.tensor(number).item() for number in (1, 2, 2, 3)] == [1, 2, 2, 3]
        for _ in range(2):
            with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
                torch.empty(3).sum().item()


def test_writes_into_numbers_that_are_known_are_told_to_torch() -> None:
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    with mode:
        torch.tensor(0.0).fill_(3.0)
        for _ in range(2):
            number = torch.tensor(1.0)
            number.add_(1.0)
            assert number.item() == 2.0


def test_what_can_not_be_is_refused_however_often() -> None:
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    with mode:
        one, two = torch.empty(3, 4), torch.empty(2, 4)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                one.add_(two)
            with pytest.raises(RuntimeError):
                torch._foreach_add_([one, one], [one])
            with pytest.raises(RuntimeError):
                torch._foreach_add_([one, one, one], [one, two, one])


def test_modes_share_what_is_remembered_and_no_tensors() -> None:
    one, other = QuickFakeMode(allow_non_fake_inputs=True), QuickFakeMode(allow_non_fake_inputs=True)
    for mode in (one, other):
        with mode:
            x = torch.empty(4, 4)
            results = [x + x, x.t(), x.mul_(2)]
            assert all(vars(result)["fake_mode"] is mode for result in results)
            assert shares(results, x) == [False, True, True]
            assert results[2] is x
    del x, results
    assert all(kept() is None for mode in (one, other) for kept in mode.given)


class Between(TorchDispatchMode):
    """A mode of the user's that counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_between_a_recording_and_fake_tensors_sees_every_operation() -> None:
    mode, between = QuickFakeMode(allow_non_fake_inputs=True), Between()
    found = []
    for inner in (contextlib.nullcontext(), between):
        with mode, inner, Recording(counts_fakes=True) as recording:
            x = torch.empty(4, 4, requires_grad=True)
            for _ in range(3):
                ((x + x).t().sum() * 2).backward()
        found.append(([name for name in recording.operations if name != "device"], recording.live_bytes()))
        assert type(x.grad) is type(x)
    assert found[0] == found[1]
    beside = ("device", "detach")  # torch 2.6 detaches once more below a recording
    seen, recorded = ([name for name in names if name not in beside] for names in (between.seen, found[0][0]))
    assert seen == recorded


def test_a_quick_tensor_has_what_torchs_own_has() -> None:
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    with mode:
        own, quick = (torch.empty(2, 3) + 1 for _ in range(2))
        quick = torch.empty(2, 3) + 1
    assert {**vars(own), CONSTANT: 0} == {**vars(quick), CONSTANT: 0}
    assert torch._C._dispatch_keys(own).raw_repr() == torch._C._dispatch_keys(quick).raw_repr()


def test_what_is_remembered_keeps_nothing_alive() -> None:
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    with mode:
        results = [torch.empty(4, 4).t().sum(0) for _ in range(3)]
    assert len(results) == 3
    del results
    assert all(kept() is None for kept in mode.given)


def test_nothing_is_done_after_the_end() -> None:
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    with mode:
        left = torch.empty(3)
    mode.is_over = True
    with pytest.raises(RuntimeError, match="a trace that has ended"):
        left + torch.ones(3)
    assert left.shape == (3,)
    assert str(left.device) == "cpu"
