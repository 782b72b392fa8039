"""Runs and diagnoses made by hand, for tests of the report."""

import math
from dataclasses import replace

from anybatch.records.diagnoses import Cell, Diagnosis
from anybatch.records.events import Backward, Cleared, Clipped, Crashed, Ended, Forward, Scheduled, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lines import Fact
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, Memory, ModuleSample, Norms
from anybatch.records.tables import (
    GroupFacts,
    ModuleFacts,
    OptimizerFacts,
    ParameterFacts,
    Root,
    SchedulerFacts,
    Started,
)

FILE = "/home/me/project/train.py"
MISSING = Finding(
    "head.weight and head.bias get gradients and are in no group of the optimizer.",
    Place("head", ("head.weight", "head.bias"), "optimizer", file=FILE, line=31),
    fix='optimizer.add_param_group({"params": model.head.parameters()})',
    cause="The optimizer was given model.encoder.parameters() only, so nothing ever changes the head.",
    evidence={"parameters": 2, "numbers": 1290, "gradient_norm": 0.41234, "steps_seen": 200},
    step=1,
    at=12,
    severity="error",
    code="AB101",
    name="OPT_PARAM_MISSING",
    fix_kind="tested",
)
FLAT = Finding(
    "The loss stays where it began: 2.31 at the start, 2.29 at the end.",
    step=50,
    at=400,
    severity="warning",
    code="AB610",
    name="LOSS_FLAT",
    consequence_of="OPT_PARAM_MISSING",
)
NOTE = Finding(
    "The input requires a gradient, which costs 256 KiB a step.",
    severity="info",
    code="AB210",
    name="INPUT_REQUIRES_GRAD",
    evidence={"bytes": 262144},
    fix="inputs.requires_grad_(False)",
)


def sampled(steps: int) -> list[int]:
    return [step for step in range(steps) if step < 10 or step % 25 == 0]


def names_of(layers: int) -> list[str]:
    return [*(f"encoder.layers.{index}" for index in range(layers)), "head"]


def run_of(
    steps: int = 200, layers: int = 6, *, head_in_optimizer: bool = True, facts: tuple[Fact, ...] = (), odd: float = 0.0
) -> Run:
    """A run of a stack of layers and a head; ``odd`` replaces the gradient of the first layer at the end."""
    modules = names_of(layers)
    found: list[Fact] = [
        Started(script="train.py", arguments=("--lr", "0.1"), torch="2.13.0", python="3.11.2", device="cpu")
    ]
    tree = [ModuleFacts(name="", cls="Model")]
    for index, name in enumerate(modules):
        tree.append(ModuleFacts(name=name, cls="Linear", kind="linear", parameters=(2 * index, 2 * index + 1)))
    found.append(Root(root=0, variable="model", cls="Model", modules=tuple(tree), file=FILE, line=30))
    for index, name in enumerate(modules):
        for entry, kind, shape in ((0, "weight", (128, 128)), (1, "bias", (128,))):
            found.append(
                ParameterFacts(
                    parameter=2 * index + entry, names=(f"{name}.{kind}",), root=0, module=name, shape=shape,
                    numel=math.prod(shape), role=kind,
                )
            )  # fmt: skip
    owned = tuple(range(2 * len(modules) if head_in_optimizer else 2 * len(modules) - 2))
    group = GroupFacts(parameters=owned, lr=1e-3)
    found.append(OptimizerFacts(optimizer=0, variable="optimizer", cls="AdamW", groups=(group,), file=FILE, line=20))
    found.append(SchedulerFacts(scheduler=0, variable="scheduler", cls="StepLR", optimizer=0))
    at = 100
    for step in range(steps):
        rate = 1e-3 * 0.5 ** (step // 50)
        events: list[Fact] = [
            Forward(root=0, rows=32, file=FILE, line=30),
            Cleared(number=0, parameters=14, of=14, file=FILE, line=32),
            Backward(value=2.3 * 0.99**step + 0.02 * (step % 7), file=FILE, line=33, touched_count=14),
            Clipped(limit=1.0, norm=1.5 + 0.1 * (step % 5), tensors=14, optimizers=(0,), file=FILE, line=34),
            Stepped(optimizer=0, number=step, lrs=(rate,), with_grad=len(owned), file=FILE, line=35),
            Scheduled(scheduler=0, number=step, before=(rate,), after=(rate,), file=FILE, line=36),
        ]
        if step in sampled(steps):
            events += _samples(step, steps, modules, owned, odd)
        for event in events:
            at += 1
            found.append(replace(event, at=at, step=step))
    return Run([*found, *facts, Ended(seconds=12.3, own_seconds=0.21)])


def _samples(step: int, steps: int, modules: list[str], owned: tuple[int, ...], odd: float) -> list[Fact]:
    count = 2 * len(modules)
    grads: list[float | None] = [10 ** -(0.5 + 0.4 * (count - index) / 2) * 0.99**step for index in range(count)]
    if odd and step == sampled(steps)[-1]:
        grads[0] = odd
    norms = Norms(
        optimizer=0, number=step, parameters=tuple(range(count)), grad=tuple(grads), weight=(8.0,) * count,
        update=tuple(0.008 * (1 + index / count) if index in owned else 0.0 for index in range(count)),
        unchanged=(0.0,) * count, grad_zeros=(0.0,) * count,
    )  # fmt: skip
    outputs = [
        ModuleSample(module=name, cls="Linear", order=index, shape=(32, 128), std=1.0, absmax=3.0 + index, zeros=0.5)
        for index, name in enumerate(modules)
    ]
    return [norms, Activations(root=0, modules=tuple(outputs)), Memory(resident=400 * 2**20 + step * 2**16)]


CELLS = (
    *(Cell(1, f"encoder.layers.{index}", (f"encoder.layers.{index}.weight",), numel=16512, first_gradient=0.02,
           last_gradient=0.01, first_ratio=1e-3, last_ratio=9e-4) for index in range(6)),
    Cell(2, "head", ("head.weight", "head.bias"), numel=1290, why="in no optimizer", first_gradient=0.4,
         last_gradient=0.41, first_ratio=0.0, last_ratio=0.0),
)  # fmt: skip
FAULTY = Diagnosis(
    (MISSING, FLAT, NOTE), CELLS, steps=200, overhead=0.017, script="train.py", arguments=("--lr", "0.1"), device="cpu",
    seconds=12.3, verdict="faults",
)  # fmt: skip
HEALTHY = replace(FAULTY, verdict="learning", findings=(), cells=tuple(replace(cell, cell=1, why="") for cell in CELLS))
CRASH = Crashed(
    name="BACKWARD_TWICE_STATE", error="RuntimeError", text="Trying to backward through the graph a second time",
    message="The hidden state carries the graph of the batch before.", cause="state is handed on with its graph.",
    fix="state = state.detach()", tensor="state, made in lstm at step 0", file=FILE, line=33,
    code="    loss.backward()",
)  # fmt: skip
