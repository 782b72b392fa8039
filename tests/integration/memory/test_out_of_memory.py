"""Memory runs out at every operation of a step in turn; the step recovers bitwise, or says what it has changed."""

import copy
import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from diagonals import diagonals
from faults import ROW, OutOfMemoryAt, SmallMemory, Straight, different, facts, mean_square, quick_collections

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.fixture(autouse=True, scope="module")
def collections() -> Iterator[None]:
    with quick_collections():
        logging.disable()  # a warning for each of thousands of retries
        yield
        logging.disable(logging.NOTSET)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4)
        self.second, self.norm2 = nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.norm1(self.first(x)).relu(), 0.3, self.training)
        y: torch.Tensor = self.norm2(self.second(x))
        return y


def noisy_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """Draws from all three generators."""
    noise = random.random() + float(np.random.rand())
    logits = model(batch["x"] * (1 + 0.1 * noise))
    return F.cross_entropy(logits.float(), batch["y"], ignore_index=-100), {"right": logits.argmax(1) == batch["y"]}


def count_labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["y"] != -100).sum()


class Bench:
    """A model, an optimizer and a batch that are always the same at the start.

    Args:
        options: of AdamW.
        steps: how many were done before, so that the optimizer has its state.
        fp16: whether there is autocast and a scaler.
        verify: as ``TrainStep`` takes it; a proof takes most of the time of a step.
    """

    def __init__(self, options: dict[str, Any], steps: int, fp16: bool = False, verify: Any = "off") -> None:
        torch.manual_seed(1)
        self.options, self.verify = options, verify
        self.autocast = torch.float16 if fp16 else None
        self.batch = {"x": torch.randn(6, 5), "y": torch.tensor([0, 1, 2, -100, 1, 0])}
        model = Network()
        self.state: tuple[Any, Any, Any] = (copy.deepcopy(model.state_dict()), None, None)
        self.set_up()
        for _ in range(steps):
            self.step(self.batch)
        saved = self.model.state_dict(), self.optimizer.state_dict(), self.scaler and self.scaler.state_dict()
        self.state = copy.deepcopy(saved)
        self.references: dict[float, dict[str, Any]] = {}

    def set_up(self, micro_batch_size: int = 4) -> None:
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        self.model = Network()
        self.model.load_state_dict(self.state[0])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **self.options)
        self.scaler = None if self.autocast is None else torch.amp.GradScaler("cpu", init_scale=8.0)
        if self.state[1] is not None:
            self.optimizer.load_state_dict(copy.deepcopy(self.state[1]))
            if self.scaler is not None:
                self.scaler.load_state_dict(self.state[2])
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.step = anybatch.TrainStep(
            self.model, noisy_loss, self.optimizer, micro_batch_size=micro_batch_size, count=count_labels,
            clip_norm=0.5, batch_norm="ghost", scheduler=self.scheduler, autocast=self.autocast, scaler=self.scaler,
            verify=self.verify,
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        return facts(self.model, [self.optimizer], step=self.step, scaler=self.scaler, scheduler=self.scheduler)

    def reference(self, micro_batch_size: float) -> dict[str, Any]:
        """What a step gives at this size when memory never runs out."""
        if micro_batch_size not in self.references:
            self.set_up(int(micro_batch_size))
            out = self.step(self.batch)
            assert out.attempts[-1].micro_batch_size == micro_batch_size
            self.references[micro_batch_size] = {**self.facts(), "loss": out.loss, "norm": out.grad_norm}
        return self.references[micro_batch_size]

    def undisturbed(self) -> OutOfMemoryAt:
        """All operations, and the first that changes a parameter, or optimizer state that was there before."""
        self.set_up()
        watched = list(self.model.parameters())
        watched += [value for state in self.optimizer.state.values() for value in state.values()]
        before = [tensor.detach().clone() for tensor in watched]
        operations = OutOfMemoryAt(
            touched=lambda: any(not torch.equal(a, b) for a, b in zip(watched, before, strict=True))
        )
        with operations:
            self.step(self.batch)
        return operations

    def fault_at(self, number: int) -> tuple[str, OutOfMemoryAt]:
        """Lets memory run out at an operation; says what is wrong with what came of it, and nothing if all is well."""
        self.reference(4), self.reference(2)
        self.set_up()
        before = self.facts()
        memory = OutOfMemoryAt(number)
        try:
            with memory:
                out = self.step(self.batch)
        except anybatch.UpdateInterrupted as error:
            return self.wrong_after_interruption(before, error), memory
        size = out.attempts[-1].micro_batch_size
        now = {**self.facts(), "loss": out.loss, "norm": out.grad_norm}
        wrong = different(self.reference(size), now)
        if [attempt.samples for attempt in out.attempts] != [0] * (len(out.attempts) - 1) + [6]:
            wrong.append(f"attempts {out.attempts}")
        if memory.has_raised and len(out.attempts) + (size == 4) != 2:
            wrong.append(
                f"attempts {out.attempts}"
            )  # either smaller, or the same once more if only the snapshot failed
        return "; ".join(wrong), memory

    def wrong_after_interruption(self, before: dict[str, Any], error: anybatch.UpdateInterrupted) -> str:
        after = self.facts()
        changed = [name.removeprefix("parameter ") for name in different(before, after) if name.startswith("parameter")]
        wrong = [f"{name} changed, the error does not say so" for name in changed if name not in error.changed]
        if not error.changed and not error.state_changed:
            wrong.append("nothing is said to have changed")
        if "optimizer.step" not in str(error):
            wrong.append(f"text: {error}")
        applied = "is complete" in str(error)
        if applied:
            reference = self.reference(4)
            wrong += [n for n in different(reference, after) if n.startswith(("parameter", "optimizer 0 state"))]
        return "; ".join(wrong)


# The one with a scaler begins with the first step of foreach. Proofs come before the optimizer and know nothing of its
# kind; nobody sees their operations.
@pytest.mark.parametrize(("kind", "steps"), diagonals(["foreach", "for-loop", "fused"], [2, 0]))
def test_every_operation(kind: str, steps: int) -> None:
    run_with_a_fault_at_every_operation(Bench(OPTIMIZERS[kind], steps))


@pytest.mark.slow  # some of its operations are tried in the next test
def test_every_operation_with_a_scaler() -> None:
    run_with_a_fault_at_every_operation(Bench(OPTIMIZERS["foreach"], 0, fp16=True))


def test_some_operations_behind_a_proof_whose_own_nobody_sees() -> None:
    plain, proved = (Bench(OPTIMIZERS["foreach"], 0, fp16=True, verify=verify) for verify in ("off", "first"))
    operations = proved.undisturbed().operations
    assert operations == plain.undisturbed().operations
    wrong = {number: text for number in range(1, len(operations), 12) if (text := proved.fault_at(number)[0])}
    assert not wrong, wrong


def run_with_a_fault_at_every_operation(bench: Bench) -> None:
    whole = bench.undisturbed()
    wrong: dict[str, str] = {}
    interrupted = []
    for number in itertools.count(1):
        text, memory = bench.fault_at(number)
        if text:
            wrong[f"{number} {memory.operations[number - 1]}"] = text
        if not memory.has_raised:
            break
        if bench.step.updates == 0:
            interrupted.append(number)
    assert not wrong, f"{len(wrong)} of {number}: {dict(itertools.islice(wrong.items(), 5))}"
    assert number == len(whole.operations) + 1
    # Up to the operation that changes something first, that one included, nothing is lost.
    assert interrupted
    assert min(interrupted) == whole.first_touch + 1
    assert_covers(whole.operations)


def assert_covers(operations: list[str]) -> None:
    """The mode sees each part of a step."""
    for part, operation in {
        "split": "aten.split_with_sizes",
        "count": "aten.ne.Scalar",
        "snapshot": "aten.clone",
        "forward": "aten.native_batch_norm",
        "dropout": "aten.bernoulli_",
        "backward": "aten.native_batch_norm_backward",
        "clip": "aten.linalg_vector_norm",
        "optimizer": "adam",
    }.items():
        found = any(operation in name for name in operations)
        found |= part == "optimizer" and any("addcdiv" in name for name in operations)
        assert found, f"no {operation} of {part} in {sorted(set(operations))}"


class TwoPrecisions(nn.Module):
    """Optimizers go through parameters of one precision after the other, in an order of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 2)
        self.last = nn.Linear(2, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.second(self.first(x).tanh().float()).tanh().double())
        return y


@pytest.mark.parametrize(("kind", "steps"), diagonals(["foreach", "fused"], [0, 2]))
def test_every_operation_with_parameters_of_two_precisions(kind: str, steps: int) -> None:
    batch = torch.randn(4, 3).double()

    def ready(size: int, verify: Any = "off") -> tuple[nn.Module, torch.optim.Optimizer, anybatch.TrainStep]:
        model = TwoPrecisions()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **OPTIMIZERS[kind])
        for _ in range(steps):
            anybatch.TrainStep(model, mean_square, optimizer)(batch)
        return model, optimizer, anybatch.TrainStep(model, mean_square, optimizer, micro_batch_size=size, verify=verify)

    references = {}
    for size in (4, 2):
        model, optimizer, step = ready(size)
        step(batch)
        references[size] = facts(model, [optimizer], step=step)
    wrong: dict[str, list[str]] = {}
    for number in itertools.count(1):
        model, optimizer, step = ready(4, "off" if number % 12 else "first")
        before = facts(model, [optimizer], step=step)
        try:
            with OutOfMemoryAt(number) as memory:
                out = step(batch)
            found = different(references[int(out.attempts[-1].micro_batch_size)], facts(model, [optimizer], step=step))
        except anybatch.UpdateInterrupted as error:
            said = tuple(f"parameter {name}" for name in error.changed)
            found = [n for n in different(before, facts(model), but=said) if n.startswith("parameter")]
        if found:
            wrong[f"{number} {memory.operations[number - 1]}"] = found
        if not memory.has_raised:
            break
    assert not wrong, f"{len(wrong)} of {number}: {dict(itertools.islice(wrong.items(), 3))}"


class Backward:
    """A model and a parameter outside of it, both with gradients from before."""

    def __init__(self, old: float = 0.1, verify: Any = "first") -> None:
        torch.manual_seed(3)
        self.verify = verify
        self.model, self.batch = Network(), Bench({}, 0).batch
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.temperature.grad = torch.tensor(old)
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = None if number == 1 or old == 0 else torch.full_like(parameter, old * number)
        torch.manual_seed(7), random.seed(7), np.random.seed(7)

    def run(self, size: int) -> anybatch.StepResult:
        return anybatch.backward(
            self.model, self.loss, self.batch, micro_batch_size=size, count=count_labels, batch_norm="ghost",
            verify=self.verify,
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        value, metrics = noisy_loss(model, batch)
        return value * self.temperature, metrics

    def facts(self) -> dict[str, Any]:
        assert self.temperature.grad is not None
        return {**facts(self.model), "gradient outside": self.temperature.grad.clone()}

    def reference(self, size: int) -> dict[str, Any]:
        self.run(size)
        return self.facts()


def test_backward_adds_to_the_gradient() -> None:
    after, alone = Backward().reference(4), Backward(old=0.0).reference(4)
    names = [name for name in after if name.startswith("gradient")]
    for number, name in enumerate(names):
        old = {"gradient outside": 0.1}.get(name, 0.0 if number == 1 else 0.1 * number)
        torch.testing.assert_close(after[name], alone[name] + old)


@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_every_operation_of_backward_leaves_the_old_gradient_or_adds_the_whole_new_one(each: int) -> None:
    references = {size: Backward().reference(size) for size in (4, 2)}
    failed: dict[str, list[str]] = {}
    raised = recovered = 0
    for number in itertools.count(1, each):
        ours = Backward(verify="off" if number % 11 else "first")
        before = ours.facts()
        try:
            with OutOfMemoryAt(number) as memory:
                out = ours.run(4)
            reference = references[int(out.attempts[-1].micro_batch_size)]
            recovered += 1
        except torch.OutOfMemoryError:
            reference = before
            raised += 1
        if names := different(reference, ours.facts()):
            failed[f"{number} {memory.operations[number - 1]}"] = names
        if not memory.has_raised:
            break
    assert not failed, f"{len(failed)} of {number}: {dict(itertools.islice(failed.items(), 3))}"
    assert recovered > 100 // each
    assert raised < 30  # outside of the passes there are few operations


def test_every_operation_of_evaluate() -> None:
    torch.manual_seed(3)
    model, batch = Network(), Bench({}, 0).batch
    model.norm1.eval()
    before = facts(model)
    attempts = set()
    for number in itertools.count(1):
        step = anybatch.TrainStep(model, noisy_loss, torch.optim.SGD(model.parameters(), lr=1.0), count=count_labels)
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        with OutOfMemoryAt(number) as memory:
            try:
                attempts.add(len(step.evaluate(batch).attempts))
            except torch.OutOfMemoryError:  # the layout of the batch, before anything was done
                assert len(memory.operations) < 20
        assert not different(before, facts(model), but=("random",))
        assert step._limit.value is None
        if not memory.has_raised:
            break
    assert attempts == {1, 2}


# --- memory that is too small for good -------------------------------------------------------------------------------


def test_one_sample_does_not_fit() -> None:
    model = Straight()
    optimizer = torch.optim.AdamW(model.parameters())
    step = anybatch.TrainStep(model, mean_square, optimizer)
    before = facts(model, [optimizer], step=step)
    with SmallMemory(ROW - 1) as memory, pytest.raises(anybatch.DoesNotFit, match="micro-batch 1 of 6"):
        step(torch.ones(6, 5))
    assert memory.refusals == 4  # 6, 3, 2 and 1 rows
    assert not different(before, facts(model, [optimizer], step=step))


def test_state_that_does_not_fit_is_taken_off_again() -> None:
    model = Straight()

    class Hungry(torch.optim.SGD):
        """Makes state for one parameter, and finds no room for the next."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["lr"] = 3.0
                for p in group["params"]:
                    if len(self.state) == 2:
                        raise torch.OutOfMemoryError("CUDA out of memory")
                    self.state[p]["sum"] = torch.zeros_like(p)

    optimizer = Hungry(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, mean_square, optimizer)
    before = facts(model, [optimizer], step=step)
    with pytest.raises(anybatch.DoesNotFit, match=r"optimizer\.step"):
        step(torch.ones(6, 5))
    assert not different(before, facts(model, [optimizer], step=step))
    assert len(optimizer.state) == 0
