"""Explaining changes, hides and keeps nothing; chains, nested calls, workers and older texts are understood."""

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.doctor.crashes import explain, prefix
from crash_running import SCRIPTS, crash

TWICE = SCRIPTS["hidden state"]


class Hostile:
    """A recorder that fails whatever it is asked."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} here")


class Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


def caught(function: Any) -> BaseException:
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whatever it raises
        return error
    raise AssertionError("nothing was raised")


def failing() -> None:
    head = nn.Linear(3, 2)
    rows = torch.ones(4, 5)
    head(rows)


def test_an_error_is_left_as_it_is() -> None:
    error = caught(failing)
    before = (str(error), error.args, error.__traceback__, error.__cause__, error.__context__, dict(vars(error)))
    explain(error)
    after = (str(error), error.args, error.__traceback__, error.__cause__, error.__context__, dict(vars(error)))
    assert before == after


@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), GeneratorExit()])
def test_an_end_that_is_no_failure_is_not_explained(error: BaseException) -> None:
    assert explain(error) is None


def test_an_error_that_nobody_knows_has_its_line_and_no_name() -> None:
    def divide() -> None:
        torch.ones(1)
        1 / 0  # noqa: B018

    crashed = explain(caught(divide))
    assert crashed is not None
    assert (crashed.name, crashed.error, crashed.code) == ("", "ZeroDivisionError", "1 / 0")
    assert prefix(crashed) == ""


def test_a_recorder_that_fails_does_not_stop_the_explanation(caplog: pytest.LogCaptureFixture) -> None:
    error = caught(failing)
    with caplog.at_level(logging.ERROR):
        crashed = explain(error, Hostile())
    assert crashed is not None
    assert crashed.line > 0
    assert crashed.code == "head(rows)"


def test_an_error_without_a_text_or_a_traceback_is_survived() -> None:
    for error in (
        Unprintable(),
        RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"),
    ):
        crashed = explain(error)
        assert crashed is not None
        assert crashed.name == ""


def test_nothing_is_kept_alive() -> None:
    seen: list[weakref.ref[Any]] = []

    def inner() -> None:
        net = nn.Linear(3, 2)
        rows = torch.ones(4, 5)
        seen.extend([weakref.ref(net), weakref.ref(rows)])
        net(rows)

    gc.disable()
    try:
        try:
            inner()
        except RuntimeError as error:
            crashed = explain(error)
        assert [one() for one in seen] == [None, None]
    finally:
        gc.enable()
    assert crashed is not None
    assert crashed.name == "SHAPE_MISMATCH"


def test_a_frame_that_goes_on_can_let_go_of_its_tensors() -> None:
    rows = torch.ones(4, 5)
    seen = weakref.ref(rows)
    try:
        nn.Linear(3, 2)(rows)
    except RuntimeError as error:
        explain(error)
    del rows
    assert seen() is None


def test_what_the_user_got_of_locals_is_not_emptied() -> None:
    rows = torch.ones(4, 5)
    mine = locals()
    try:
        nn.Linear(3, 2)(rows)
    except RuntimeError as error:
        explain(error)
    assert mine["rows"] is rows


def test_an_error_that_another_was_raised_from_is_explained() -> None:
    def outer() -> None:
        try:
            failing()
        except RuntimeError as error:
            raise ValueError("training failed") from error

    crashed = explain(caught(outer))
    assert crashed is not None
    assert (crashed.name, crashed.code, crashed.error) == ("SHAPE_MISMATCH", "head(rows)", "RuntimeError")


def test_an_error_that_came_while_another_was_handled_is_explained() -> None:
    def outer() -> None:
        try:
            failing()
        except RuntimeError:
            dict[str, int]()["checkpoint"]

    crashed = explain(caught(outer))
    assert crashed is not None
    assert crashed.name == "SHAPE_MISMATCH"
    group = BaseExceptionGroup("several", [ValueError("nothing"), caught(failing)])
    crashed = explain(group)
    assert crashed is not None
    assert crashed.name == "SHAPE_MISMATCH"


def test_a_circle_of_errors_ends() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    crashed = explain(one)
    assert crashed is not None
    assert crashed.name == ""


def test_an_error_deep_in_calls_names_the_line_of_the_user(tmp_path: Path) -> None:
    text = """
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 1))
    def run(self):
        return [self.step(x) for x in torch.ones(2, 4, 3)]
    def step(self, batch):
        return (lambda x: self.model(x))(batch)  # CRASH

Trainer().run()
"""
    crashed, lines = crash(tmp_path, text)
    assert lines[crashed.line - 1].endswith("# CRASH")
    assert (crashed.name, crashed.module) == ("SHAPE_MISMATCH", "1")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_worker_names_the_line_of_the_data_set(workers: int, tmp_path: Path) -> None:
    text = f"""
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        row = torch.ones(3)
        return row + torch.ones(4)  # CRASH

for batch in torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers={workers}):
    pass
"""
    crashed, lines = crash(tmp_path, text)
    assert lines[crashed.line - 1].endswith("# CRASH"), crashed
    assert crashed.code == "return row + torch.ones(4)"
    if not workers:
        assert crashed.name == "SHAPE_MISMATCH"


TEXTS = {
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 15.77 GiB": "OUT_OF_MEMORY",
    "MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 1 GB)": "OUT_OF_MEMORY",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: not enough memory: you tried to allocate 8":
        "OUT_OF_MEMORY",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (when checking "
    "argument for argument mat1 in method wrapper_CUDA_addmm)": "DEVICE_MISMATCH",
    "Expected to mark a variable ready only once. This error is caused by: Parameter at index 1 with name head.weight "
    "has been marked as ready twice": "DDP_READY_TWICE",
    "Expected to have finished reduction in the prior iteration before starting a new one.": "DDP_UNFINISHED",
    "DataLoader worker (pid(s) 1234) exited unexpectedly": "WORKER_DIED",
    "DataLoader worker (pid 99) is killed by signal: Killed. ": "WORKER_DIED",
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported": "DEVICE_ASSERT",
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing": "WORKER_DIED",
    "expected scalar type Long but found Float": "DTYPE_MISMATCH",
    "Found dtype Double but expected Float": "DTYPE_MISMATCH",
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    "  File \"/x/torch/y.py\", line 3, in z\nRuntimeError: stack expects each tensor to be equal size, but got [3] at "
    "entry 0 and [5] at entry 1": "SHAPE_MISMATCH",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_other_devices_and_versions_are_known(text: str) -> None:
    def fail() -> None:
        loss = torch.ones(2)
        loss.add_(1)
        raise RuntimeError(text)

    crashed = explain(caught(fail))
    assert crashed is not None
    assert crashed.name == TEXTS[text]
    assert crashed.code == ("raise RuntimeError(text)" if "worker process" not in text else "")
    assert crashed.fix


def test_memory_is_told_by_category() -> None:
    def fail() -> None:
        model = nn.Linear(100, 100)
        model(torch.ones(2, 100)).sum().backward()
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.step()
        activations = model(torch.ones(500, 100)) * 2
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 1.00 MiB. {len(activations)}")

    crashed = explain(caught(fail))
    assert crashed is not None
    held = crashed.evidence
    assert held["wanted"] == 2**20
    assert held["parameters"] == held["gradients"] == 4 * 10100
    assert held["optimizer states"] == 2 * 4 * 10100 + 2 * 4
    assert held["tensors with a graph"] == 4 * 50000
    assert "tensors with a graph 195.3 KiB" in crashed.message


def test_a_healthy_none_is_not_called_a_gradient() -> None:
    def fail() -> None:
        row = None
        row.data  # type: ignore[attr-defined]  # noqa: B018

    crashed = explain(caught(fail))
    assert crashed is not None
    assert crashed.name == ""


def test_a_running_sum_is_not_taken_for_a_state(tmp_path: Path) -> None:
    text = TWICE.replace("for index", "total = torch.zeros(())\nfor index").replace(
        "    adam.zero_grad()", "    total = total + cost\n    adam.zero_grad()"
    )
    crashed, _ = crash(tmp_path, text)
    assert crashed.tensor.startswith("memory"), crashed


def test_a_mean_that_is_shown_is_not_taken_for_the_state(tmp_path: Path) -> None:
    text = TWICE.replace("for index in range(3):", "cost = shown = torch.zeros(())\nfor index in range(3):\n    MEAN")
    crashed, _ = crash(tmp_path, text.replace("MEAN", "shown = 0.9 * shown + 0.1 * cost"))
    assert crashed.tensor.startswith("memory"), crashed


@pytest.mark.parametrize("kept", ["total = total + first + second", "shown, total = total.sum(), net(x * 0)"])
def test_what_is_only_kept_is_not_taken_for_a_state(kept: str, tmp_path: Path) -> None:
    text = SCRIPTS["two losses"].replace("for x", "total = torch.zeros(())\nfor x")
    crashed, _ = crash(tmp_path, text.replace("    first.backward()", f"    {kept}\n    first.backward()"))
    assert crashed.name == "BACKWARD_TWICE", crashed


def test_a_cut_of_what_has_no_graph_is_not_the_cause(tmp_path: Path) -> None:
    text = """
net, labels = nn.Linear(3, 5), torch.rand(4, 5)
scores = net(torch.randn(4, 3))
loss = F.mse_loss(F.one_hot(labels.argmax(1), 5).float(), scores.detach())
loss.backward()  # CRASH
"""
    crashed, _ = crash(tmp_path, text)
    assert (crashed.tensor, crashed.evidence["op"]) == ("scores", "detach")


def test_the_line_is_the_users_where_a_library_calls_back(tmp_path: Path) -> None:
    text = """
import contextlib, functools
@functools.singledispatch
def run(x):
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: None)
        return [*map(lambda net: net(x), [nn.Linear(5, 2)])]  # CRASH

@contextlib.contextmanager
def around():
    yield

@around()
def main():
    run(torch.ones(2, 3))

main()
"""
    crashed, lines = crash(tmp_path, text)
    assert lines[crashed.line - 1].endswith("# CRASH")
    assert crashed.name == "SHAPE_MISMATCH"
