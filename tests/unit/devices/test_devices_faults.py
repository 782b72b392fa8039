"""Several devices in one process: whatever fails on one of them stops all, and nothing was changed."""

import threading
from typing import Any

import pytest
import torch

import anybatch
from device_models import THREE, TWO, batch_of, copy_of, cross_entropy, devices_of, small, step_of, weights_of
from faults import press_ctrl_c
from reference import assert_bitwise, assert_unchanged, everything, gradients_of


class Fault(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, error: BaseException | None) -> torch.Tensor:
        ctx.error = error
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.error is not None:
            raise ctx.error
        return gradients[0], None


class Failing:
    """A loss that fails on one micro-batch of some size or more.

    Args:
        where: ``"forward"``, ``"loss"`` or ``"backward"``.
        row: of the batch, in whose micro-batch it fails.
        error: makes the error.
        above: rows from which on a micro-batch fails.
    """

    def __init__(self, where: str, row: int, error: Any, above: int = 0) -> None:
        self.where, self.row, self.error, self.above = where, row, error, above

    def __call__(self, model: Any, batch: Any) -> Any:
        wrong = bool((batch["row"] == self.row).any()) and len(batch["row"]) > self.above
        error = self.error() if wrong else None
        inputs = batch["x"]
        if error is not None and self.where == "forward":
            inputs = inputs.requires_grad_()
            handle = model[1].register_forward_pre_hook(_raising(error))
            try:
                model(inputs)
            finally:
                handle.remove()
        out = model(inputs)
        if error is not None and self.where == "loss":
            raise error
        if self.where == "backward":
            out = Fault.apply(out, error)  # type: ignore[no-untyped-call]
        return torch.nn.functional.cross_entropy(out, batch["y"])


def _raising(error: BaseException) -> Any:
    def hook(*_: Any) -> None:
        raise error

    return hook


def numbered(rows: int, **options: Any) -> dict[str, torch.Tensor]:
    return {**batch_of(rows, **options), "row": torch.arange(rows)}


PLACES = ["forward", "loss", "backward"]


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("placement", [0, 1, 2])
@pytest.mark.parametrize("where", PLACES)
def test_an_exception_is_raised_once_with_the_device_and_nothing_was_changed(
    where: str, placement: int, side_by_side: bool
) -> None:
    model = small(dropout=0.2 if not side_by_side else 0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_fn = Failing(where, -1, lambda: ValueError("a bad sample"))
    step = anybatch.TrainStep(model, loss_fn, optimizer, devices=THREE, micro_batch_size=2)
    step(numbered(12))
    assert devices_of(step).drew_on_host == {True: not side_by_side}
    loss_fn.row = 2 * placement
    before, threads = everything(model, optimizer, step, with_gradients=False), threading.active_count()
    with pytest.raises(ValueError, match="a bad sample") as found:
        step(numbered(12))
    assert_unchanged(everything(model, optimizer, step, with_gradients=False), before)
    assert found.value.__notes__ == [
        f"in micro-batch {placement + 1} of 6 on cpu, one of 3 devices that share the batch"
    ]
    assert threading.active_count() == threads
    assert all(leaf.grad is None for _, leaf in copy_of(step).pairs)
    loss_fn.row = -1
    step(numbered(12))


@pytest.mark.parametrize("placement", [0, 1, 2])
@pytest.mark.parametrize("where", PLACES)
def test_memory_that_runs_out_on_one_device_makes_all_smaller_as_if_begun_so(where: str, placement: int) -> None:
    def out_of_memory() -> BaseException:
        return torch.OutOfMemoryError("CUDA out of memory")

    found = []
    for fails in (True, False):
        model = small(dropout=0.3, dtype=torch.float32)
        torch.manual_seed(3)
        loss_fn = Failing(where, 4 * placement if fails else -1, out_of_memory, above=2)
        step = step_of(model, loss_fn, devices=THREE, micro_batch_size=4 if fails else 2)
        outs = [step(numbered(12, dtype=torch.float32, seed=i)) for i in range(2)]
        found.append([*gradients_of(model), *(p.detach() for p in model.parameters())])
        assert outs[0].micro_batches == outs[1].micro_batches == 6
        if fails:
            failed = outs[0].attempts[0]
            assert (failed.outcome, failed.where) == ("out of memory", f"micro-batch {placement + 1} of 3 on cpu")
    assert_bitwise(*found)


def test_memory_that_runs_out_for_one_sample_names_the_device() -> None:
    loss_fn = Failing("loss", 1, lambda: torch.OutOfMemoryError("no room"))
    model = small()
    step = step_of(model, loss_fn, devices=TWO)
    before = everything(model, step=None, with_gradients=False)
    with pytest.raises(anybatch.DoesNotFit, match="on cpu"):
        step(numbered(2))
    assert_unchanged(everything(model, with_gradients=False), before)


def test_another_error_goes_before_memory_that_runs_out() -> None:
    meeting = threading.Barrier(2, timeout=20)

    def loss_fn(model: Any, batch: Any) -> Any:
        if devices_of(step).drew_on_host:
            meeting.wait()
            raise torch.OutOfMemoryError("full") if int(batch["row"][0]) == 0 else ValueError("wrong")
        return cross_entropy(model, batch)

    step = step_of(small(), loss_fn, devices=TWO)
    step(numbered(4))
    with pytest.raises(ValueError, match="wrong"):
        step(numbered(4))


@pytest.mark.parametrize("placement", [0, 1])
def test_ctrl_c_stops_all_devices(placement: int) -> None:
    ran: list[int] = []

    def loss_fn(model: Any, batch: Any) -> Any:
        if is_pressed and int(batch["row"][0]) == placement:
            press_ctrl_c()
        ran.append(int(batch["row"][0]))
        return cross_entropy(model, batch)

    is_pressed = False
    model = small()
    step = step_of(model, loss_fn, devices=TWO, micro_batch_size=1)
    step(numbered(40))
    before, threads = everything(model, step=step, with_gradients=False), threading.active_count()
    is_pressed = True
    with pytest.raises(KeyboardInterrupt):
        step(numbered(40))
    assert_unchanged(everything(model, step=step, with_gradients=False), before)
    assert threading.active_count() == threads
    is_pressed = False
    step(numbered(40))


def test_the_others_stop_at_their_next_micro_batch() -> None:
    ran: list[int] = []
    first = threading.Event()

    def loss_fn(model: Any, batch: Any) -> Any:
        row = int(batch["row"][0])
        if devices_of(step).drew_on_host:
            if row == 1:
                first.set()
                raise ValueError("stop")
            assert first.wait(20)
        ran.append(row)
        return cross_entropy(model, batch)

    step = step_of(small(), loss_fn, devices=TWO, micro_batch_size=1)
    step(numbered(20))
    ran.clear()
    with pytest.raises(ValueError, match="stop"):
        step(numbered(20))
    assert len(ran) <= 2


def test_a_model_on_two_devices_resumes_bitwise() -> None:
    def trained(interrupted: bool) -> list[torch.Tensor | None]:
        model = small(dropout=0.4, dtype=torch.float32)
        torch.manual_seed(7)
        step = step_of(model, devices=TWO, micro_batch_size=2)
        for i in range(2):
            step(numbered(7, dtype=torch.float32, seed=i))
        if interrupted:
            state = step.state_dict()
            torch.manual_seed(99)
            step = step_of(model, devices=TWO, micro_batch_size=2)
            step.load_state_dict(state)
        for i in range(2, 4):
            step(numbered(7, dtype=torch.float32, seed=i))
        return weights_of(model)

    assert_bitwise(trained(True), trained(False))
