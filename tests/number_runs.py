"""Synthetic records of whole trainings, for rules that read numbers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anybatch.records.events import Backward, Cleared, Forward, Scheduled, Stepped
from anybatch.records.findings import Finding
from anybatch.records.lines import Fact
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, InputSample, ModuleSample, Norms
from anybatch.records.tables import (
    GroupFacts,
    ModuleFacts,
    OptimizerFacts,
    ParameterFacts,
    Root,
    SchedulerFacts,
    Started,
)

NUMEL = 256
WEIGHT = 2.0  # the norm of each matrix: a root mean square of 0.125


def falling(step: int) -> float:
    """A loss that goes from 2 towards 0."""
    return 2.0 / (1 + 0.2 * step) + 0.01


def sampled(step: int) -> bool:
    """Whether the doctor measures in a step."""
    return step < 10 or step % 25 == 0


def call(function: str = "cross_entropy", **values: Any) -> LossCall:
    """A call of a loss function; a healthy one of ten classes unless told otherwise."""
    healthy = {"input_shape": (32, 10), "target_shape": (32,), "items": 32, "ignored": 0, "classes": 10,
               "target_classes": 9, "low": -3.0, "high": 3.0, "normalised": False, "root": 0, "file": "train.py",
               "line": 19}  # fmt: skip
    if function != "cross_entropy":
        healthy |= {"classes": 0, "target_classes": -1, "target_shape": (32, 10), "target_mean": 0.0, "target_std": 1.0}
    return LossCall(**{"function": function, **healthy, **values})


def sample(**values: Any) -> InputSample:
    """A standardised input of a model."""
    healthy = {"root": 0, "name": "0", "shape": (32, 16), "mean": 0.0, "std": 1.0, "low": -3.0, "high": 3.0,
               "hash": "a", "first": "Linear"}  # fmt: skip
    return InputSample(**{**healthy, **values})


@dataclass
class Training:
    """A healthy training of a chain of linear layers and ReLUs, in which anything can be made wrong."""

    steps: int = 60
    layers: int = 3
    cls: str = "AdamW"
    lr: Callable[[int], float] = lambda step: 1e-3
    loss: Callable[[int], float] = falling
    ratio: Callable[[int, int], float] = lambda step, layer: 1e-3
    grad: Callable[[int, int], float] = lambda step, layer: 0.1
    unchanged: Callable[[int, int], float] = lambda step, layer: 0.0
    spread: Callable[[int], float] = lambda step: 0.5
    dead: Callable[[int, int], float] = lambda step, layer: 0.08
    saturated: Callable[[int, int], float] | None = None
    activation: str = "ReLU"
    activations: bool = True
    call: LossCall | None = field(default_factory=call)
    input: InputSample | None = field(default_factory=sample)
    parameter: Mapping[str, Any] = field(default_factory=dict)
    group: Mapping[str, Any] = field(default_factory=dict)
    norms: Callable[[int], Mapping[str, Any]] = lambda step: {}
    backward: Callable[[int], Mapping[str, Any]] = lambda step: {}
    scheduler: SchedulerFacts | None = None
    every: Callable[[int], Iterable[Fact]] = lambda step: ()
    before: tuple[Fact, ...] = ()
    after: tuple[Fact, ...] = ()

    def run(self) -> Run:
        """The record."""
        facts: list[Fact] = [*self._tables(), *self.before]
        for step in range(self.steps):
            facts += [replace(one, step=step) for one in self._step(step, len(facts) + 1)]
        facts += [replace(one, step=self.steps) for one in self.after]
        return Run([replace(one, at=at) for at, one in enumerate(facts)])

    def _tables(self) -> list[Fact]:
        modules = [ModuleFacts(name="", cls="Net")]
        for layer in range(self.layers):
            modules.append(ModuleFacts(name=f"layers.{layer}", cls="Linear", kind="linear", parameters=(layer,)))
            modules.append(ModuleFacts(name=f"acts.{layer}", cls=self.activation, kind="activation"))
        parameters = [
            ParameterFacts(**{
                "parameter": layer, "names": (f"layers.{layer}.weight",), "root": 0, "module": f"layers.{layer}",
                "shape": (16, 16), "numel": NUMEL, "role": "weight", **self.parameter,
            })
            for layer in range(self.layers)
        ]  # fmt: skip
        group = GroupFacts(**{"parameters": tuple(range(self.layers)), "lr": self.lr(0), **self.group})
        optimizer = OptimizerFacts(
            optimizer=0,
            variable="optimizer",
            cls=self.cls,
            groups=(group,),
            default_lr=self.lr(0),
            file="train.py",
            line=9,
        )
        schedulers = [self.scheduler] if self.scheduler is not None else []
        return [Started(), Root(root=0, variable="model", cls="Net", modules=tuple(modules)), *parameters, optimizer,
                *schedulers]  # fmt: skip

    def _step(self, step: int, at: int) -> list[Fact]:
        facts: list[Fact] = [Forward(root=0, rows=32)]
        if sampled(step):
            facts += [replace(self.input, forward=at)] if self.input is not None else []
            facts += [self._activations(step, at)] if self.activations else []
        facts += self.every(step)
        if self.call is not None:
            facts.append(replace(self.call, value=self.loss(step) if self.call.value is None else self.call.value))
        facts.append(Backward(**{"value": self.loss(step), "file": "train.py", "line": 20, **self.backward(step)}))
        if sampled(step):
            facts.append(self._norms(step))
        facts.append(Stepped(optimizer=0, number=step, lrs=(self.lr(step),), with_grad=self.layers))
        if self.scheduler is not None:
            facts.append(Scheduled(scheduler=self.scheduler.scheduler, number=step, before=(self.lr(step),),
                                   after=(self.lr(step + 1),), file="train.py", line=25))  # fmt: skip
        return [*facts, Cleared()]

    def _norms(self, step: int) -> Norms:
        layers = range(self.layers)
        values: dict[str, Any] = {
            "optimizer": 0,
            "number": step,
            "parameters": tuple(layers),
            "grad": tuple(self.grad(step, layer) for layer in layers),
            "weight": (WEIGHT,) * self.layers,
            "update": tuple(WEIGHT * self.ratio(step, layer) for layer in layers),
            "unchanged": tuple(self.unchanged(step, layer) for layer in layers),
            "grad_zeros": (0.0,) * self.layers,
            "state_moved": (True,) * self.layers,
        }
        return Norms(**{**values, **self.norms(step)})

    def _activations(self, step: int, at: int) -> Activations:
        modules = []
        for layer in range(self.layers):
            shape: dict[str, Any] = {"shape": (32, 16), "std": 1.0, "absmax": 3.0, "spread": self.spread(step)}
            modules.append(ModuleSample(module=f"layers.{layer}", cls="Linear", order=2 * layer, **shape))
            dead = self.dead(step, layer)
            full = self.saturated(step, layer) if self.saturated is not None else None
            modules.append(ModuleSample(module=f"acts.{layer}", cls=self.activation, order=2 * layer + 1, dead=dead,
                                        always_dead=dead if step >= 2 else 0.0, saturated=full, **shape))  # fmt: skip
        modules.append(ModuleSample(module="", cls="Net", order=2 * self.layers, shape=(32, 10), std=1.0, absmax=3.0,
                                    spread=self.spread(step)))  # fmt: skip
        return Activations(root=0, forward=at, modules=tuple(modules))


def found(run: Run, name: str) -> list[Finding]:
    """What one rule finds."""
    from anybatch.doctor.rules.registry import all_rules

    return all_rules()[name].findings(run)


def fires(run: Run, name: str, severity: str) -> Finding:
    """The first finding of a rule, which has to be of a severity, whole, and to say where it is."""
    findings = found(run, name)
    assert findings, f"{name} is silent"
    one = findings[0]
    assert one.severity == severity, one
    assert one.message.endswith((".", ")")), one.message
    assert one.fix, one
    assert one.cause or one.severity == "info", one
    assert one.evidence or one.severity == "info", one
    assert Finding.from_dict(one.to_dict()) == one
    return one


def quiet(run: Run, name: str) -> None:
    """A rule finds nothing, or only what may be meant."""
    findings = found(run, name)
    assert all(one.severity == "info" for one in findings), findings


def silent(run: Run, name: str) -> None:
    """A rule finds nothing at all."""
    assert found(run, name) == []
