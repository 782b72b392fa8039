"""Code that torch does not know is tried in a child first, and a crash there is no crash here."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.planning.guarding import can_fork, has_unknown_code, kills

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")
Fake = torch._subclasses.FakeTensor
LARGE = 2**30


@pytest.fixture
def crashing() -> Iterator[Any]:
    """An operation that reads the address of its argument, and ends the process where there is none."""
    library = torch.library.Library("anybatch_test_crash", "DEF")
    library.define("scale(Tensor x) -> Tensor")

    def scale(x: Tensor) -> Tensor:
        if isinstance(x, Fake):
            ctypes.string_at(0)
        return x * 2

    library.impl("scale", scale, "CompositeImplicitAutograd")
    yield torch.ops.anybatch_test_crash.scale
    library._destroy()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))


def test_a_kernel_that_crashes_on_fakes_leads_to_real_probes(crashing: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    with caplog.at_level(logging.INFO, logger="anybatch"):
        plan = anybatch.plan(
            model, lambda model, batch: crashing(model(batch)).square().mean(), torch.ones(16, 8), memory=LARGE
        )
    assert plan.confidence == "measured"
    assert plan.micro_batch_size == 16
    assert sum("ends the process with SIGSEGV" in record.message for record in caplog.records) == 1


def test_on_meta_it_is_an_error(crashing: Any) -> None:
    with torch.device("meta"):
        model, batch = nn.Linear(8, 8), torch.ones(16, 8)
    with pytest.raises(anybatch.LossError, match=r"ends the process with SIGSEGV.*register_fake"):
        anybatch.plan(model, lambda model, batch: crashing(model(batch)).mean(), batch, memory=LARGE, device="24GiB")


def test_an_operation_with_a_fake_implementation_is_traced(caplog: pytest.LogCaptureFixture) -> None:
    library = torch.library.Library("anybatch_test_fine", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeImplicitAutograd")
    try:
        assert has_unknown_code()
        with caplog.at_level(logging.INFO, logger="anybatch"):
            plan = anybatch.plan(
                make_model(),
                lambda model, batch: torch.ops.anybatch_test_fine.double(model(batch)).mean(),
                torch.ones(16, 8),
                memory=LARGE,
            )
        assert plan.confidence == "exact"
        assert "real" not in caplog.text
    finally:
        library._destroy()


def test_torch_itself_is_known() -> None:
    code = (
        "import torch, torch._dynamo, torch._inductor.config, torch.distributed, numpy, anybatch;"
        "from anybatch.planning.guarding import has_unknown_code; print(has_unknown_code())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "False"


def test_plain_steps_do_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybatch.planning.tracers.has_unknown_code", lambda: False)
    monkeypatch.setattr("anybatch.planning.guarding.os.fork", lambda: pytest.fail("forked"))
    plan = anybatch.plan(make_model(), lambda model, batch: model(batch).mean(), torch.ones(16, 8), memory=LARGE)
    assert plan.confidence == "exact"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_signals_are_told_apart(number: signal.Signals) -> None:
    assert kills(lambda: os.kill(os.getpid(), number)) == number.name


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_exceptions_are_no_crashes(error: type[BaseException]) -> None:
    def work() -> None:
        raise error

    assert kills(work) == ""


def test_what_takes_too_long_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    with caplog.at_level(logging.INFO, logger="anybatch"):
        assert kills(lambda: time.sleep(60), limit=0.2) == ""
    assert time.monotonic() - began < 20
    assert "did not end" in caplog.text
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # no child is left


def test_a_child_does_not_outlive_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("anybatch.planning.guarding.time.sleep", interrupted)
    wait = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        kills(lambda: wait.wait(60))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_nothing_is_printed_or_changed(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    threads = torch.get_num_threads()

    def work() -> None:
        sys.stdout.write("from the child")
        logging.getLogger("anybatch").error("from the child")
        seen.append(1)
        os.abort()

    assert kills(work) == "SIGABRT"
    assert seen == []
    assert torch.get_num_threads() == threads
    assert capfd.readouterr() == ("", "")


def test_other_threads_and_systems_do_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append((can_fork(), kills(os.abort))))
    thread.start()
    thread.join()
    assert found == [(False, "")]
    monkeypatch.setattr("anybatch.planning.guarding.sys.platform", "darwin")
    assert not can_fork()


def test_the_child_does_not_wait_for_the_threads_of_the_parent() -> None:
    """Kernels in parallel, before the fork, in the child, and afterwards; a child that waits is ended after 20 s."""
    code = (
        "import os, torch; torch.set_num_threads(4);"
        "from anybatch.planning.guarding import kills;"
        "w = torch.randn(512, 512, requires_grad=True);"
        "work = lambda: [(torch.randn(2048, 512) @ w).exp().sum().backward() for _ in range(3)];"
        "work();"
        "print(kills(lambda: (work(), os.abort()), limit=60.0)); work(); print('after')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["SIGABRT", "after"]
