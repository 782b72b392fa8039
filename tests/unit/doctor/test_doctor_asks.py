"""A doctor of the API puts the questions that the command puts, and leaves the process as it was."""

import contextlib
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import anybatch
from anybatch.doctor.diagnosing import diagnose
from anybatch.integrations.attached import AttachedDoctor
from anybatch.records.events import Ended, Forward
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import load_run

pytestmark = pytest.mark.asks

CALLS: list[str] = []


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybatch.doctor.ask.keeping.has_compiled", lambda: False)


class Doubled(torch.autograd.Function):
    """Is called by the question about its gradient."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Doubled.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Doubled.calls += 1
        return gradient * 2


class Net(nn.Module):
    """Mixes the rows of its batch, and changes what it can of the process when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop, self.calls = nn.Dropout(0.1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        CALLS.append(f"{len(x)} rows")
        random.random()
        np.random.rand()
        warnings.warn("called", stacklevel=1)
        sys.stdout.write("")
        made = Doubled.apply(self.norm(self.first(x)))  # type: ignore[no-untyped-call]
        return self.last(self.drop(torch.softmax(made, 0)))  # type: ignore[no-any-return]


def train(net: nn.Module, steps: int = 4, rows: int = 9) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        F.cross_entropy(net(torch.randn(rows, 6)), torch.arange(rows) % 3).backward()
        optimizer.step()
    return optimizer


def answers(doctor: anybatch.Doctor) -> list[tuple[str, str]]:
    return [(one.probe, one.answer) for one in doctor.run.of(Probed)]


@pytest.fixture(autouse=True)
def _ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "called")
        yield


def names(doctor: anybatch.Doctor) -> set[str]:
    return {one.name for one in doctor.findings}


def test_what_a_question_finds_is_in_all_that_tells_of_a_run(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "run.jsonl"
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with anybatch.Doctor(path=path, on_finding=lambda one: told.append(one.code)) as doctor:
        for _ in range(4):
            scores = net(torch.randn(9, 6))
            optimizer.zero_grad()
            (F.cross_entropy(scores, torch.arange(9) % 3) + 0.1 * (scores**2).sum()).backward()
            optimizer.step()
        assert not answers(doctor)
    assert "AB610" in {one.code for one in doctor.findings}
    assert doctor.findings == diagnose(load_run(path))
    assert "AB610" in told
    kinds = [type(one) for one in load_run(path).facts]
    assert kinds.index(Probed) < kinds.index(Ended), "the end is the last thing that is recorded"


@pytest.mark.parametrize("kind", ["with", "close", "detach", "follow", "callback"])
def test_it_asks_however_it_is_attached(kind: str) -> None:
    net, doctor = Net(), anybatch.Doctor()
    if kind == "with":
        with doctor:
            train(net)
    elif kind == "callback":
        watching = AttachedDoctor()
        watching.begin(net)
        train(net)
        watching.end(is_reporting=False)
        assert watching.doctor is not None
        doctor = watching.doctor
    else:
        doctor.follow(net)
        train(net)
        (doctor.detach if kind == "detach" else doctor.close)()
    assert "BATCH_MIXING" in names(doctor)


def test_a_doctor_that_is_not_to_ask_does_not() -> None:
    with anybatch.Doctor(ask=False) as doctor:
        train(Net())
    assert not answers(doctor)
    watching = AttachedDoctor(ask=False)
    watching.begin(Net())
    watching.end(is_reporting=False)
    assert watching.doctor is not None
    assert not watching.doctor.kept.on


def test_no_question_is_put_after_the_time() -> None:
    with anybatch.Doctor(seconds=0.0) as doctor:
        train(Net())
    found = [one for one in doctor.run.of(Probed) if one.probe in ("batch", "rows")]
    assert found
    assert {one.answer for one in found} == {"unknown"}


def test_those_that_train_a_copy_are_put_where_they_are_wanted() -> None:
    asked = []
    for active in (False, True):
        with anybatch.Doctor(active=active) as doctor:
            train(Net(), steps=2)
        asked.append("one batch" in dict(answers(doctor)))
    assert asked == [False, True]


def state(net: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> list[Any]:
    """What a question must leave as it is."""
    module = sys.modules["torch.nn.modules.module"]
    steps = sys.modules["torch.optim.optimizer"]
    hooks = [vars(module)[name] for name in sorted(vars(module)) if name.startswith("_global_")]
    hooks += [vars(steps)[name] for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")]
    tensors = [*net.state_dict().values(), *[one.grad for one in net.parameters()]]
    tensors += [value for of in optimizer.state.values() for value in of.values()]
    return [
        [(one.clone(), one._version) if one is not None else None for one in tensors],
        [one.data_ptr() for one in tensors if one is not None],
        torch.get_rng_state(), random.getstate(), list(np.random.get_state())[1:],
        [one.training for one in net.modules()], torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
        torch.backends.mkldnn.enabled, torch.get_default_dtype(), torch.is_anomaly_enabled(),
        [dict(one) if isinstance(one, dict) else one for one in hooks],
        [dict(value) for part in net.modules() for name, value in vars(part).items() if name.endswith("_hooks")],
        list(warnings.filters), warnings.showwarning, sys.stdout, sys.stderr, list(seen), list(CALLS), Doubled.calls,
        [vars(part).get("calls") for part in net.modules()], sys.excepthook, torch.nn.functional.cross_entropy,
    ]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.asks("all")
def test_the_process_is_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    net, seen = Net(), list[Any]()
    hidden = net.first.register_forward_hook(lambda module, given, made: seen.append(made.shape))
    module_hook = nn.modules.module.register_module_forward_hook(lambda *given: seen.append("module"))
    of_steps = register_optimizer_step_post_hook(lambda *given: seen.append("step"))
    doctor = anybatch.Doctor(active=True)
    before: list[Any] = []
    try:
        doctor.attach()
        optimizer = train(net, steps=12)
        remove = doctor._remove

        def removed() -> None:
            remove()
            before.extend(state(net, optimizer, seen))

        doctor._remove = removed  # type: ignore[method-assign]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            doctor.close()
            after = state(net, optimizer, seen)
    finally:
        for one in (hidden, module_hook, of_steps):
            one.remove()
    assert dict(answers(doctor))["batch"] == "yes"
    assert {"one batch", "function gradient", "rows"} <= dict(answers(doctor)).keys()
    assert [place for place, (a, b) in enumerate(zip(before, after, strict=True)) if not same(a, b)] == []
    assert not warned
    assert capfd.readouterr() == ("", "")


class Counting(TorchFunctionMode):
    """Counts operations, as a user's counter of FLOPs does."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.calls += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def saving_hooks() -> Iterator[None]:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the hooks of the user are called")

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        yield


@pytest.mark.parametrize(
    "where",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), Counting, saving_hooks,
     torch.autograd.detect_anomaly],
    ids=["no_grad", "inference_mode", "autocast", "mode", "saved tensors", "anomaly"],
)  # fmt: skip
def test_the_answers_are_the_same_wherever_it_is_closed(where: Callable[[], Any]) -> None:
    found = []
    for context in (contextlib.nullcontext, where):
        torch.manual_seed(0)
        net, doctor = Net(), anybatch.Doctor()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            doctor.attach()
            train(net)
            with context():
                Counting.calls = 0
                modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
                doctor.close()
                assert Counting.calls == 0
                now = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
                assert now == modes
        found.append(answers(doctor))
    assert found[0] == found[1]
    assert ("batch", "yes") in found[0]


def test_another_doctor_that_is_open_sees_nothing_of_it() -> None:
    net = Net()
    with anybatch.Doctor(ask=False) as outer:
        with anybatch.Doctor() as inner:
            train(net)
        before = len(outer.facts)
        assert ("batch", "yes") in answers(inner)
        assert len(list(outer.run.of(Forward))) == 4
        train(net, steps=1)
        assert len(outer.facts) > before, "it goes on"
    assert len(list(outer.run.of(Forward))) == 5
    assert len(outer.run.roots) == 1
    assert outer.failure == ""


def test_it_can_be_closed_in_another_thread(capsys: pytest.CaptureFixture[str]) -> None:
    net, doctor, asking, printed = Net(), anybatch.Doctor(), threading.Event(), threading.Event()

    def seen(*given: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            sys.stdout.write("of a question")
            asking.set()
            assert printed.wait(60)

    doctor.attach()
    train(net)
    hook = net.first.register_forward_hook(seen)
    closing = threading.Thread(target=doctor.close)
    closing.start()
    assert asking.wait(60)
    sys.stdout.write("of the script")  # what is printed meanwhile is shown
    printed.set()
    closing.join()
    hook.remove()
    assert ("batch", "yes") in answers(doctor)
    assert capsys.readouterr().out == "of the script"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("by", ["with", "close"])
def test_only_after_a_crash_it_asks_as_well(error: type[BaseException], by: str) -> None:
    doctor = anybatch.Doctor()

    def run() -> None:
        doctor.attach()
        with doctor if by == "with" else contextlib.closing(doctor):
            train(Net())
            raise error

    with pytest.raises(error):
        run()
    assert bool(answers(doctor)) == (error is ValueError)
    assert any(doctor.run.of(Ended))


def test_ctrl_c_ends_the_questions_and_the_record_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*given: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("anybatch.doctor.ask.asking._of_root", interrupted)
    doctor = anybatch.Doctor(path=tmp_path / "run.jsonl")
    doctor.attach()
    train(Net())
    out = sys.stdout
    with pytest.raises(KeyboardInterrupt):
        doctor.close()
    assert any(load_run(tmp_path / "run.jsonl").of(Ended))
    assert sys.stdout is out
    assert torch.is_grad_enabled()


def test_questions_that_fail_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **more: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("anybatch.doctor.ask.asking._of_root", fails)
    with anybatch.Doctor() as doctor:
        train(Net())
    assert doctor.run.steps == 4
    assert any(doctor.run.of(Ended))


def test_it_asks_again_where_more_was_trained() -> None:
    net, doctor = Net(), anybatch.Doctor()
    counts = []
    for steps in (0, 4, 0, 4):
        doctor.attach()
        train(net, steps)
        doctor.detach()
        counts.append(len([one for one in doctor.run.of(Probed) if one.probe == "batch"]))
    doctor.close()
    assert counts == [0, 1, 1, 2]
    assert len([one for one in doctor.findings if one.name == "BATCH_MIXING"]) == 1


class Gathering(Net):
    """Adds up over all processes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        dist.all_reduce(made.detach().clone())
        return made


def test_no_question_waits_for_another_process() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with anybatch.Doctor() as doctor:
            train(Gathering())
        with anybatch.Doctor() as other:
            train(Net())
    finally:
        dist.destroy_process_group()
    found = next(one for one in doctor.run.of(Probed) if one.probe == "batch")
    assert found.answer == "unknown"
    assert "other processes" in found.detail
    assert ("batch", "yes") in answers(other)
