"""Builds records of runs that never happened, for the tests of the rules."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from anybatch.doctor.rules.registry import all_rules
from anybatch.records.events import Backward, Cleared, Clipped, Epoch, Forward, Scaler, Stepped
from anybatch.records.findings import Finding
from anybatch.records.lines import Fact, from_line, to_line
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run
from anybatch.records.samples import Norms
from anybatch.records.tables import GroupFacts, ModuleFacts, OptimizerFacts, ParameterFacts, Root, Started

FILE = "/home/me/train.py"
LINES = {"model": 10, "optimizer": 20, "forward": 30, "backward": 40, "clear": 50, "clip": 60, "step": 70, "loss": 80}


class RunBuilder:
    """Collects facts and numbers them as a recorder would.

    Attributes:
        facts: so far.
        steps: how many steps each optimizer has done.
    """

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self.steps: dict[int, int] = {}
        self.parameters: dict[int, ParameterFacts] = {}
        self.groups: dict[int, tuple[int, ...]] = {}
        self._left: dict[int, bool] = {}
        self._at = -1
        self.add(Started(script=FILE))

    def add(self, one: Fact) -> Fact:
        """Gives a fact its numbers and keeps it."""
        self._at += 1
        numbered = dataclasses.replace(one, at=self._at, step=max(self.steps.values(), default=0))
        self.facts.append(numbered)
        return numbered

    def model(
        self, names: Iterable[str] = ("encoder.weight", "encoder.bias", "head.weight", "head.bias"), *, root: int = 0,
        variable: str = "model", modules: Sequence[ModuleFacts] | None = None, first: int | None = None, **facts: Any,
    ) -> tuple[int, ...]:  # fmt: skip
        """A root with some parameters, and its modules by their names; returns the numbers of the parameters."""
        own = list(names)
        begin = len(self.parameters) if first is None else first
        numbers = tuple(range(begin, begin + len(own)))
        paths = list(dict.fromkeys(name.rpartition(".")[0] for name in own))
        if modules is None:
            modules = [ModuleFacts(name="", cls="Net")] + [
                ModuleFacts(
                    name=path, cls="Linear", kind="linear",
                    parameters=tuple(n for n in numbers if own[n - begin].rpartition(".")[0] == path),
                )
                for path in paths
            ]  # fmt: skip
        self.add(
            Root(
                root=root, variable=variable, cls="Net", modules=tuple(modules), file=FILE, line=LINES["model"], **facts
            )
        )
        for number, name in zip(numbers, own, strict=True):
            weight = name.endswith("weight")
            self.parameter(
                number, name, root=root, shape=(8, 8) if weight else (8,), role="weight" if weight else "bias"
            )
        return numbers

    def parameter(self, number: int, name: str, **facts: Any) -> int:
        """A parameter, or another table of one that is known."""
        shape = facts.setdefault("shape", (8, 8))
        numel = 1
        for size in shape:
            numel *= size
        facts.setdefault("numel", numel)
        facts.setdefault("module", name.rpartition(".")[0])
        one = ParameterFacts(parameter=number, names=(name,), **facts)
        self.parameters[number] = one
        self.add(one)
        return number

    def optimizer(
        self, parameters: Sequence[int], number: int = 0, *, lr: float = 0.1, cls: str = "SGD",
        variable: str = "optimizer", weight_decay: float = 0.0, momentum: float = 0.0, **facts: Any,
    ) -> int:  # fmt: skip
        """An optimizer with one group."""
        group = GroupFacts(parameters=tuple(parameters), lr=lr, weight_decay=weight_decay, momentum=momentum)
        facts.setdefault("file", FILE)
        facts.setdefault("line", LINES["optimizer"])
        self.groups[number] = tuple(parameters)
        self.add(OptimizerFacts(optimizer=number, variable=variable, cls=cls, groups=(group,), default_lr=lr, **facts))
        return number

    def forward(self, root: int = 0, **facts: Any) -> Fact:
        """A call of a root."""
        facts.setdefault("rows", 8)
        entries: dict[str, Any] = {"file": FILE, "line": LINES["forward"]} | facts
        return self.add(Forward(root=root, **entries))

    def backward(self, touched: Iterable[int], kept: Iterable[int] = (), **facts: Any) -> Fact:
        """A backward with its sets written out."""
        own, old = tuple(touched), tuple(kept)
        entries: dict[str, Any] = {"file": FILE, "line": LINES["backward"], "value": 1.0} | facts
        sets: dict[str, Any] = {"touched": own, "kept": old, "touched_count": len(own), "kept_count": len(old)}
        return self.add(Backward(**entries | sets))

    def clear(self, number: int = 0, *, by: str = "optimizer", parameters: int = 4) -> Fact:
        """A clearing."""
        return self.add(
            Cleared(by=by, number=number, parameters=parameters, of=parameters, file=FILE, line=LINES["clear"])
        )

    def clip(self, optimizers: Iterable[int] = (0,), **facts: Any) -> Fact:
        """A call of ``clip_grad_norm_``."""
        entries: dict[str, Any] = {"limit": 1.0, "norm": 2.0, "tensors": 4, "file": FILE, "line": LINES["clip"]} | facts
        return self.add(Clipped(optimizers=tuple(optimizers), **entries))

    def step(self, number: int = 0, **facts: Any) -> Fact:
        """A step of an optimizer."""
        done = self.steps.get(number, 0)
        held = len(self.groups.get(number, ()))
        entries: dict[str, Any] = {"file": FILE, "line": LINES["step"], "with_grad": held, "lrs": (0.1,)}
        one = self.add(Stepped(optimizer=number, number=done, **entries | facts))
        self.steps[number] = done + 1
        return one

    def scaler(self, call: str, optimizer: int = -1, **facts: Any) -> Fact:
        """A call of a scaler."""
        return self.add(Scaler(call=call, optimizer=optimizer, **{"scale": 65536.0, "after": 65536.0} | facts))

    def loss(self, **facts: Any) -> int:
        """A call of a loss function; returns its number for ``Backward.loss_calls``."""
        entries: dict[str, Any] = {"function": "cross_entropy", "root": 0, "file": FILE, "line": LINES["loss"]} | facts
        return self.add(LossCall(**entries)).at

    def epoch(self, *, ended: bool = False, loader: int = 0, batches: int = 10) -> Fact:
        """The start or the end of a pass over a ``DataLoader``."""
        return self.add(Epoch(loader=loader, ended=ended, batches=batches))

    def norms(self, parameters: Sequence[int], number: int = 0, **facts: Any) -> Fact:
        """Norms of a step; what is left out is as for healthy parameters."""
        count = len(parameters)
        entries: dict[str, Any] = {
            "grad": (0.5,) * count, "weight": (1.0,) * count, "update": (0.01,) * count, "unchanged": (0.0,) * count,
            "grad_zeros": (0.0,) * count, "state_moved": (True,) * count,
        }  # fmt: skip
        return self.add(Norms(optimizer=0, number=number, parameters=tuple(parameters), **entries | facts))

    def train(self, touched: Sequence[int], steps: int = 6, number: int = 0, root: int = 0, **backward: Any) -> None:
        """A healthy loop: clear, forward, backward, step; with a loss that falls."""
        for index in range(steps):
            self.clear(number)
            self.forward(root)
            self.backward(touched, **{"value": 1.0 / (1 + index)} | backward)
            self.step(number)

    @property
    def run(self) -> Run:
        """The run, as it would be read from a file."""
        read = [from_line(to_line(one)) for one in self.facts]
        return Run([one for one in read if one is not None])


def simple(steps: int = 6) -> RunBuilder:
    """A model of four parameters that one optimizer trains as it should."""
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    built.train(numbers, steps)
    return built


def findings(built: RunBuilder | Run, name: str) -> list[Finding]:
    """What the rule of that name finds."""
    return all_rules()[name].findings(built.run if isinstance(built, RunBuilder) else built)


def alarms(built: RunBuilder | Run, *names: str) -> list[str]:
    """Names of the rules that give an error or a warning; of all rules, or of some."""
    run = built.run if isinstance(built, RunBuilder) else built
    rules = all_rules()
    chosen = [rules[name] for name in names] if names else list(rules.values())
    return [one.name for rule in chosen for one in rule.findings(run) if one.severity != "info"]
