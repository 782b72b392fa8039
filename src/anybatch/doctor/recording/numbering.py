"""Numbers for parameters, models, optimizers and schedulers, and their tables, recorded when they are first seen."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from anybatch.doctor.recording import describing
from anybatch.doctor.recording.describing import Held, held_by, parameters_in
from anybatch.doctor.recording.naming import variable_of, variables_of
from anybatch.records.lines import Fact
from anybatch.records.tables import GroupFacts, OptimizerFacts, ParameterFacts, Root, SchedulerFacts
from anybatch.userlines import user_place

_TOLD = attrgetter(*(one.name for one in fields(ParameterFacts) if one.name not in ("at", "step")))
_MOST_ALIVE = 64  # roots that are looked at closely
_MOST_GONE = 256  # models of a class: further ones are not recorded, so that time and memory have a bound


@dataclass(slots=True)
class Model:
    """What is known of one root; the module itself is held weakly."""

    number: int
    module: "weakref.ref[torch.nn.Module]"
    variable: str  # what the user calls it
    names: dict[int, str] = field(default_factory=dict)  # of its modules by ``id``
    # its modules, weakly, by name, with whether they are registered
    held: list[tuple[str, "weakref.ref[torch.nn.Module]", bool]] = field(default_factory=list)
    place: tuple[str, int] = ("", 0)  # where it was first called
    in_evaluation: bool = False  # whether it was in evaluation mode when its table was recorded

    def modules(self) -> Iterator[tuple[str, torch.nn.Module, bool]]:
        """Its modules that still live: names, modules, and whether they are registered."""
        for name, reference, registered in self.held:
            if (module := reference()) is not None:
                yield name, module, registered


class _Place(NamedTuple):
    """Where a parameter is within one root."""

    root: int
    module: str
    kind: str
    attribute: str
    registered: bool

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}" if self.module else self.attribute


class _Where:
    """Where a parameter is, over all roots."""

    __slots__ = ("places", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.places: list[_Place] = []

    def roots(self) -> set[int]:
        """The numbers of the roots."""
        return {place.root for place in self.places}

    def sorted(self) -> list[_Place]:
        """All places, those of the first root first."""
        return self.places if len(self.places) < 2 else sorted(self.places, key=attrgetter("root"))


class Numbering:
    """Gives numbers in the order in which things are first seen; holds nothing of the user's alive."""

    def __init__(self, emit: Callable[[Fact], Any]) -> None:
        self.emit = emit
        self.models: list[Model] = []
        self._numbers: dict[int, int] = {}
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._facts: list[ParameterFacts] = []
        self._roots: dict[int, int] = {}
        self._inside: dict[int, tuple[weakref.ref[torch.nn.Module], int]] = {}
        self._where: dict[int, _Where] = {}
        self._held: dict[int, list[int]] = {}  # ids of the parameters of each root
        self._died: list[int] = []  # roots, since this was last looked at
        self._gone = Counter[tuple[str, str]]()  # roots, by the name of their class, which may itself be gone
        self._alive, self._several = [0], False
        self._tracked: dict[int, None] = {}
        self._optimizers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._optimizer_facts: list[OptimizerFacts] = []
        self._schedulers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._scheduled = 0  # how many schedulers there were
        self.version = 0
        """Grows when what is tracked changes."""
        self.optimizers_version = 0
        """Grows with each table of an optimizer."""

    # parameters

    def parameter(self, tensor: torch.Tensor, *, is_tracked: bool = False) -> int:
        """The number of a parameter or another leaf."""
        number = self.known(tensor)
        if number is None:
            name = variable_of(tensor) or f"a leaf of shape {tuple(tensor.shape)}"
            number = self._add(tensor, [], (name,), describing.constants([tensor])[0])
        if is_tracked:
            self._track(number)
        return number

    @property
    def is_empty(self) -> bool:
        """Whether nothing has a number yet."""
        return not self.models and not self._tensors

    def known(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor, ``None`` if it has none yet."""
        number = self._numbers.get(id(tensor))
        return number if number is not None and self._tensors[number]() is tensor else None

    def tensor(self, number: int) -> torch.Tensor | None:
        """The tensor of a number, ``None`` if it is gone."""
        return self._tensors[number]()

    def name(self, number: int) -> str:
        """The first name of a parameter."""
        return self._facts[number].name

    def facts(self, number: int) -> ParameterFacts:
        """What was recorded of a parameter last."""
        return self._facts[number]

    def tracked(self) -> list[tuple[int, torch.Tensor]]:
        """Parameters of roots and of optimizers, with their numbers."""
        tensors = self._tensors
        return [(number, tensor) for number in self._tracked if (tensor := tensors[number]()) is not None]

    def references(self) -> "tuple[list[int], list[weakref.ref[torch.Tensor]]]":
        """The same as ``tracked``, weakly: numbers and references. Those that are gone are no longer tracked."""
        numbers = [number for number in self._tracked if self._tensors[number]() is not None]
        self._tracked = dict.fromkeys(numbers)  # a loop that copies its model at each step leaves thousands behind
        return numbers, [self._tensors[number] for number in numbers]

    @staticmethod
    def _facts_of(
        number: int, tensor: torch.Tensor, places: "list[_Place]", names: tuple[str, ...],
        value: tuple[float | None, bool],
    ) -> ParameterFacts:  # fmt: skip
        constant, equal_rows = value
        where = places[0] if places else None
        kind = where.kind if where is not None else ""
        return ParameterFacts(
            parameter=number,
            names=names,
            root=-1 if where is None else where.root,
            module="" if where is None else where.module,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            numel=tensor.numel(),
            requires_grad=tensor.requires_grad,
            registered=any(place.registered for place in places),
            is_parameter=isinstance(tensor, torch.nn.Parameter),
            role=describing.role_of(tensor, kind, names[0] if where is None else where.attribute),
            constant=constant,
            equal_rows=equal_rows and kind not in ("norm", "batch_norm"),
        )

    def _add(
        self, tensor: torch.Tensor, places: "list[_Place]", names: tuple[str, ...], value: tuple[float | None, bool]
    ) -> int:
        number = len(self._tensors)
        self._tensors.append(weakref.ref(tensor))
        self._numbers[id(tensor)] = number
        self._facts.append(self._facts_of(number, tensor, places, names, value))
        self.emit(self._facts[number])
        return number

    def _track(self, number: int) -> None:
        if number not in self._tracked:
            self._tracked[number] = None
            self.version += 1

    # models

    def root(self, module: torch.nn.Module) -> int:
        """The number of a model; one that has a known one inside takes its number and replaces its table."""
        known = self._root(module)
        if known is not None:
            return known
        holdings = list(held_by(module))
        inside = sorted({number for held in holdings if (number := self._root(held.module)) is not None})
        number = inside[0] if inside else len(self.models)
        model = Model(number, self._reference(module, number), variable_of(module) or "", place=user_place())
        if inside:
            self.models[number] = model
        else:
            self.models.append(model)
            self._alive[0] += 1
        self._roots[id(module)] = number
        self._hold(model, holdings)
        self._tables(model)
        return number

    def _reference(self, module: torch.nn.Module, number: int) -> "weakref.ref[torch.nn.Module]":
        """A weak reference to a root that says when it is gone, unless another one has taken its number."""
        alive, died, gone, cls = self._alive, self._died, self._gone, type(module)
        name = cls.__module__, cls.__qualname__

        def is_gone(_: Any) -> None:
            alive[0] -= 1
            died.append(number)
            gone[name] += 1

        return weakref.ref(module, is_gone)

    def adopt(self, model: Model, module: torch.nn.Module, name: str) -> None:
        """Adds a module that ran inside a model which does not have it registered."""
        if self._look_again_at(model) and id(module) in model.names:
            return  # it was assigned after the model was first seen
        found = [held for held in held_by(module) if id(held.module) not in model.names]
        joined = [Held(f"{name}.{one.name}".removesuffix("."), one.module, False) for one in found]
        self._hold(model, joined)
        self._tables(model)

    def look_again(self) -> None:
        """Adds the modules and parameters that models were given after they were first seen."""
        for model in list(self._living()):
            self._look_again_at(model)

    def _look_again_at(self, model: Model) -> bool:
        module = model.module()
        if module is None:
            return False
        known = {id(one) for _, one, registered in model.modules() if registered} | {id(module)}
        is_known = all(id(one) in known for one in module.modules())
        if is_known and all(self.known(one) is not None for one in module.parameters()):
            return False
        late = [held for held in held_by(module) if held.registered and id(held.module) not in known]
        again = {id(held.module) for held in late}
        model.held = [entry for entry in model.held if id(entry[1]()) not in again]
        for key in again:
            model.names.pop(key, None)
        self._hold(model, late)
        self._tables(model)
        return True

    def look_at_modes(self, model: Model) -> None:
        """Records a model again that was evaluated before it was trained: its modes are those it is trained in."""
        module = model.module() if model.in_evaluation else None
        if module is not None and module.training:
            self._record_root(model)

    def is_one_of_many(self, module: torch.nn.Module) -> bool:
        """Whether enough models of its class came and went, as in a loop that copies its model at each step."""
        cls = type(module)
        return self._gone[cls.__module__, cls.__qualname__] >= _MOST_GONE

    def stands_for_others(self, root: int) -> bool:
        """Whether a root is looked at closely: each of up to 64 living ones is, of more those at even distances."""
        return not root % -(-max(1, self._alive[0]) // _MOST_ALIVE)

    def is_root(self, module: torch.nn.Module) -> bool:
        """Whether a module is a root itself."""
        return self._root(module) is not None

    def root_of(self, module: torch.nn.Module) -> int | None:
        """The number of the root that contains a module."""
        own = self._root(module)
        if own is not None:
            return own
        reference, number = self._inside.get(id(module), (None, -1))
        if reference is None or reference() is not module:
            return None
        if self.models[number].module() is not None:
            return number
        others = (one.number for one in self._living() if any(inner is module for _, inner, _ in one.modules()))
        return next(others, None)

    def part_of(self, module: torch.nn.Module) -> int | None:
        """The number of a root that has all parameters of a module, as of a slice or of a container made for one call.

        Where it has the same ones, and the root itself is gone, the module takes its place.
        """
        own, roots = set[int](), set[int]()
        for tensor in module.parameters():
            where = self._where.get(id(tensor))
            if where is None or where.tensor() is not tensor:
                return None
            roots = roots & where.roots() if own else where.roots()
            own.add(id(tensor))
        if not roots:
            return None
        number = min(roots)
        model = self.models[number]
        root = model.module()
        if root is None and set(self._held.get(number, ())) == own:
            self._alive[0] += 1
            model.module, self._roots[id(module)] = self._reference(module, number), number
            model.names, model.held = {}, []
            self._hold(model, held_by(module))
        return None if root is not None and any(one is root for one in module.modules()) else number

    def module_name(self, module: torch.nn.Module) -> str:
        """The name of a module within its root, with the root's variable in front where there are several."""
        number = self.root_of(module)
        if number is None:
            return ""
        return self._prefixed(number, self.models[number].names.get(id(module), ""))

    def _root(self, module: torch.nn.Module) -> int | None:
        number = self._roots.get(id(module))
        return number if number is not None and self.models[number].module() is module else None

    def _hold(self, model: Model, holdings: Iterable[Held]) -> None:
        wrapper = describing.wrapper_of(model.module())
        inner = describing.WRAPPED.get(wrapper, "")
        for held in holdings:
            name = held.name
            if inner and not name:
                continue  # what it wraps takes its place, under the user's own names
            if inner and (name == inner or name.startswith(f"{inner}.")):
                name = name[len(inner) + 1 :]
            model.names.setdefault(id(held.module), name)
            model.held.append((name, weakref.ref(held.module), held.registered))
            known = self._inside.get(id(held.module))
            if known is None or known[0]() is not held.module or self.models[known[1]].module() is None:
                self._inside[id(held.module)] = weakref.ref(held.module), model.number

    def _living(self) -> Iterator[Model]:
        return (model for model in self.models if model.module() is not None)

    def _prefixed(self, root: int, name: str) -> str:
        if self._alive[0] <= 1:
            return name
        variable = self.models[root].variable or f"{type(self.models[root].module()).__name__}{root or ''}"
        return f"{variable}.{name}".removesuffix(".")

    def _tables(self, model: Model) -> None:
        """Records a model and its parameters; those of all models where the names of others change by it."""
        moved = self._moved(model)
        if self._several != (self._alive[0] > 1):
            self._several = not self._several
            moved |= self._with_places(key for one in self._living() for key in self._held.get(one.number, ()))
        values, before = self._values(moved), len(self._tracked)
        for key, tensor in moved.items():
            places = self._where[key].sorted()
            names = tuple(dict.fromkeys(self._prefixed(place.root, place.name) for place in places))
            number = self.known(tensor)
            if number is None:
                number = self._add(tensor, places, names, values[key])
            elif self._facts[number].names != names or not self._facts[number].registered:
                old = self._facts[number]
                facts = self._facts_of(number, tensor, places, names, (old.constant, old.equal_rows))
                if _TOLD(facts) != _TOLD(old):
                    self._facts[number] = facts
                    self.emit(facts)
            self._tracked[number] = None
        self.version += before != len(self._tracked)
        self._record_root(model)

    def _moved(self, model: Model) -> dict[int, torch.Tensor]:
        """The parameters whose places have changed by a model that is new or has others than before, by ``id``."""
        died, self._died[:] = [number for number in self._died if self.models[number].module() is None], []
        touched, held = dict[int, None](), dict[int, None]()
        for number in (*died, model.number):
            for key in self._held.pop(number, ()):
                before = self._where[key]
                before.places = [place for place in before.places if place.root != number]
                touched[key] = None
        for name, module, registered in model.modules():
            kind = describing.kind_of(module)
            for own, tensor, is_registered in parameters_in(module):
                where = self._where.get(key := id(tensor))
                if where is None or where.tensor() is not tensor:
                    where = self._where[key] = _Where(tensor)
                where.places.append(_Place(model.number, name, kind, own, registered and is_registered))
                held[key] = touched[key] = None
        self._held[model.number] = list(held)
        return self._with_places(touched)

    def _with_places(self, keys: Iterable[int]) -> dict[int, torch.Tensor]:
        found = [(key, where.tensor()) for key in keys if (where := self._where[key]).places]
        return {key: tensor for key, tensor in found if tensor is not None}

    def _values(self, tensors: dict[int, torch.Tensor]) -> dict[int, tuple[float | None, bool]]:
        new = {key: tensor for key, tensor in tensors.items() if self.known(tensor) is None}
        return dict(zip(new, describing.constants(list(new.values())), strict=True))

    def _record_root(self, model: Model) -> None:
        module = model.module()
        if module is None:
            return
        model.in_evaluation = not module.training
        rows = []
        for name, one, registered in model.modules():
            own = tuple(number for _, p, _ in parameters_in(one) if (number := self.known(p)) is not None)
            rows.append(describing.module_facts(name, one, registered, own))
        self.emit(
            Root(
                root=model.number, variable=model.variable, cls=type(module).__name__, modules=tuple(rows),
                wrapper=describing.wrapper_of(module), config=describing.config_of(module),
                file=model.place[0], line=model.place[1],
            )
        )  # fmt: skip

    # optimizers and schedulers

    def optimizer(self, optimizer: Any, *, place: tuple[str, int] | None = None, after: int = 0) -> int:
        """The number of an optimizer; records it, and again when its groups have changed.

        Others had done ``after`` steps with its parameters when it was made.
        """
        number = self.known_optimizer(optimizer)
        if number >= 0:
            old = self._optimizer_facts[number]
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            if sizes == [len(one.parameters) for one in old.groups]:
                return number
            is_made_there = old.is_made_there
            place, after, variable = (old.file, old.line), old.after, old.variable or variable_of(optimizer)
        else:
            number = len(self._optimizer_facts)
            self._optimizers[id(optimizer)] = weakref.ref(optimizer), number
            is_made_there = place is not None
            variable, place = variable_of(optimizer), place or user_place()
        facts = OptimizerFacts(
            optimizer=number, variable=variable, groups=self._groups(optimizer, variable or "optimizer"), after=after,
            is_made_there=is_made_there, file=place[0], line=place[1], **describing.optimizer_facts(optimizer),
        )  # fmt: skip
        if number == len(self._optimizer_facts):
            self._optimizer_facts.append(facts)
        self._optimizer_facts[number] = facts
        self.optimizers_version += 1
        self.emit(facts)
        return number

    def known_optimizer(self, optimizer: Any) -> int:
        """The number of an optimizer, -1 if it was not seen yet."""
        known = self._optimizers.get(id(optimizer))
        return known[1] if known is not None and known[0]() is optimizer else -1

    def number_of_optimizer(self, optimizer: Any) -> Callable[[], int]:
        """Gives its number, -1 if it was not seen; also when it is gone."""
        key, reference = id(optimizer), weakref.ref(optimizer)

        def number() -> int:
            known = self._optimizers.get(key)
            return known[1] if known is not None and known[0]() is reference() else -1

        return number

    def optimizer_table(self, number: int) -> OptimizerFacts:
        """What was recorded of an optimizer last."""
        return self._optimizer_facts[number]

    def optimizers(self) -> Iterator[tuple[int, Any]]:
        """The optimizers that still live, with their numbers."""
        for reference, number in list(self._optimizers.values()):
            if (optimizer := reference()) is not None:
                yield number, optimizer

    def _groups(self, optimizer: Any, variable: str) -> tuple[GroupFacts, ...]:
        unknown = [one for group in optimizer.param_groups for one in group["params"] if self.known(one) is None]
        names = variables_of(unknown) if unknown else {}
        values = dict(zip(map(id, unknown), describing.constants(unknown), strict=True))
        found = []
        for position, group in enumerate(optimizer.param_groups):
            numbers = []
            for entry, tensor in enumerate(group["params"]):
                number = self.known(tensor)
                if number is None:
                    name = names.get(id(tensor)) or f"{variable}.param_groups[{position}]['params'][{entry}]"
                    number = self._add(tensor, [], (name,), values[id(tensor)])
                self._track(number)
                numbers.append(number)
            found.append(describing.group_facts(group, tuple(numbers)))
        return tuple(found)

    def scheduler(self, scheduler: Any, *, place: tuple[str, int] | None = None) -> int:
        """The number of a scheduler; records it when first seen."""
        known = self._schedulers.get(id(scheduler))
        if known is not None and known[0]() is scheduler:
            return known[1]
        number, self._scheduled = self._scheduled, self._scheduled + 1
        self._schedulers[id(scheduler)] = weakref.ref(scheduler), number
        optimizer = describing.itself(getattr(scheduler, "optimizer", None))
        file, line = place or user_place()
        self.emit(
            SchedulerFacts(
                scheduler=number, variable=variable_of(scheduler), cls=type(scheduler).__name__,
                optimizer=-1 if optimizer is None else self.optimizer(optimizer),
                options=describing.scheduler_options(scheduler), file=file, line=line,
            )
        )  # fmt: skip
        return number
