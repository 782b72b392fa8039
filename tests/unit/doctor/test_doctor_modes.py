"""A mode of the user's that sees every operation, such as one that counts, sees none of the doctor's."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import anybatch
from anybatch import Doctor
from anybatch.records.events import Backward
from anybatch.records.lossfacts import LossCall
from anybatch.records.samples import Activations, Buffers, InputSample, NonFinite, Norms
from anybatch.tensors.dispatch import TorchDispatchMode, item_of, nobody_looks, unseen
from anybatch.torch_private import number_of_function_modes, number_of_modes
from default_devices import default_device
from diagonals import diagonals
from doctor_programs import PROGRAMS, gan
from odd_loops import ODD, OF_SCALERS, Loop, Stopped


class Seen(TorchDispatchMode):
    """Notes the operations that run within its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


class Named(TorchFunctionMode):
    """Notes the functions of torch that are called within its block."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.calls = name, list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", autouse=True)
def no_first_use() -> None:
    """What torch does once, at the first use of an optimizer, is over."""
    PROGRAMS["mlp"]()


def assert_unseen(program: Callable[[Doctor], Any]) -> Doctor:
    """Runs a program with a doctor that is attached, and with one that is not."""
    with Seen() as expected:
        program(Doctor())
    with Seen() as seen, Doctor() as doctor:
        program(doctor)
    assert doctor.failure == ""
    assert seen.operations == expected.operations
    return doctor


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_operation_of_the_doctor_is_seen(name: str) -> None:
    assert_unseen(lambda doctor: PROGRAMS[name]())


def test_nor_in_steps_between_samples_whose_inputs_have_a_graph() -> None:
    assert_unseen(lambda doctor: gan(40))


@pytest.mark.parametrize(
    ("odd", "way"),
    diagonals(["", *(one for one in ODD if one != "is looked at"), *OF_SCALERS], [(True, "unscaled"), (False, "")]),
)
def test_nor_in_steps_that_are_followed_or_differ(odd: str, way: tuple[bool, str]) -> None:
    clips, scales = way
    if odd in OF_SCALERS and not scales:
        pytest.skip("has no scaler")

    def program(doctor: Doctor) -> None:
        Loop({37: odd} if odd else {}, clips=clips, scales=scales)(doctor)

    assert_unseen(program)


def test_a_loss_that_is_multiplied_by_a_number_and_what_is_watched() -> None:
    """Modes are given a number in the place of the tensor that the product has kept of it."""

    def program(doctor: Doctor) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
        for _ in range(40):
            loss = F.cross_entropy(model(torch.randn(6, 4)), torch.randint(3, (6,))) * 0.5
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()

    doctor = assert_unseen(program)
    assert {fact.factor for fact in doctor.run.of(Backward)} == {0.5}


@pytest.mark.parametrize("step", [3, 31])
def test_the_origin_of_what_is_not_finite_is_found_unseen(step: int) -> None:
    def program(doctor: Doctor) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for number in range(40):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).square().mean()
            if number == step:
                loss.register_hook(lambda gradient: gradient * float("inf"))
            loss.backward()
            optimizer.step()

    (found,) = assert_unseen(program).run.of(NonFinite)
    assert found.step - found.late == step


def test_a_counter_of_operations_counts_the_same_under_the_doctor() -> None:
    def flops(doctor: Doctor | None) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with FlopCounterMode(display=False) as counter:
            for _ in range(15):
                F.cross_entropy(model(torch.randn(8, 64)), torch.randint(10, (8,))).backward()
                optimizer.step()
                optimizer.zero_grad()
        return int(counter.get_total_flops())

    expected = flops(None)
    with Doctor() as doctor:
        assert flops(doctor) == expected > 0
    assert doctor.failure == ""


def test_measured_memory_is_that_of_the_script() -> None:
    """But for the last inputs of the model and of its loss, which the doctor keeps alive."""

    def peak() -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def update() -> None:
            loss = F.cross_entropy(model(torch.randn(32, 256)), torch.randint(10, (32,))) * 0.25
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return max(anybatch.measure(update).peak_bytes for _ in range(4))

    expected = peak()
    with Doctor() as doctor:
        assert expected <= peak() <= 1.01 * expected
    assert doctor.failure == ""


def test_a_number_is_read_without_the_mode() -> None:
    product = torch.ones((), requires_grad=True) * 3.0
    assert product.grad_fn is not None
    kept = product.grad_fn._saved_other  # type: ignore[attr-defined]
    with Seen() as seen:
        with pytest.raises(RuntimeError, match="_local_scalar_dense"):
            kept.item()
        seen.operations.clear()
        assert item_of(kept) == 3.0
        assert unseen(lambda: torch.ones(2).sum().item())() == 2.0
    assert seen.operations == []


def test_modes_are_on_again_afterwards_in_their_order() -> None:
    with Named("outer") as outer, Seen() as seen, torch.device("meta") as device, torch.device("cpu"):
        stack = _get_current_function_mode_stack()
        with suppress(Stopped), nobody_looks():
            assert _get_current_function_mode_stack() == stack
            assert torch.ones(1).device.type == "cpu"
            raise Stopped
        assert seen.operations == []
        assert number_of_modes()
        assert number_of_function_modes()
        assert _get_current_function_mode_stack() == stack
        assert stack[0] is outer
        assert torch.ones(1).device.type == "cpu"
        assert len(seen.operations) == 1
    assert device.type == "meta"
    assert not number_of_modes()
    assert not number_of_function_modes()


def test_a_default_device_and_an_iteration_that_is_followed() -> None:
    """The mode of the one that follows is entered below the default device, and left again."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(6, 4), torch.randint(3, (6,))
    with default_device("meta"):
        with Doctor() as doctor:
            for _ in range(12):
                optimizer.zero_grad()
                F.cross_entropy(model[2](model[1](model[0](inputs)).detach()), labels).backward()
                optimizer.step()
        assert len(_get_current_function_mode_stack()) == 1
    assert not number_of_modes()
    assert not number_of_function_modes()
    assert doctor.failure == ""
    assert doctor.findings[0].name == "GRAPH_CUT"


def test_the_default_device_is_not_that_of_the_doctors_own_tensors() -> None:
    """``torch.set_default_device("cuda")`` in a script some of whose tensors are on the CPU; here it is ``meta``."""

    def run(device: str | None) -> list[str]:
        loop, draw = Loop({}), torch.Generator().manual_seed(0)
        inputs, labels = torch.randn(6, 4, generator=draw), torch.randint(3, (6,), generator=draw)
        with Doctor() as doctor, default_device(device):
            for step in range(40):
                loop.optimizer.zero_grad()
                loss = F.cross_entropy(loop.model(inputs), labels) * (float("nan") if step == 35 else 0.5)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
                loop.optimizer.step()
        assert doctor.failure == ""
        return [repr(fact) for fact in doctor.run.of(Norms, Activations, InputSample, NonFinite, Buffers, LossCall)]

    found = run("meta")
    assert found == run(None)
    assert len(found) > 60
