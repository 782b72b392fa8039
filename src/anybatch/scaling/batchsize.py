"""``rescale``: hyperparameters of an optimizer for another batch size."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch

from anybatch.errors import BatchError
from anybatch.options import needs_closure, optimizers_of

# Of a parameter group: everything that is a learning rate. Schedulers keep some of theirs there.
GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
SCHEDULER_RATES = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min", "default_min_lr")
CYCLED = ("base_momentum", "max_momentum")


class Place(NamedTuple):
    """Where a hyperparameter is stored.

    Example:
        >>> group = {"betas": (0.9, 0.999)}
        >>> place = Place("betas[1]", group, "betas", 1)
        >>> place.write(0.992)
        >>> group["betas"], float(place)
        ((0.9, 0.992), 0.992)
    """

    name: str  # for the table
    home: Any  # a mapping, a list, or an object with attributes
    key: Any  # a key, an index or the name of an attribute
    position: int | None = None  # the index in a tuple that is stored there; ``None`` if the number itself is

    def read(self) -> Any:
        """The number or 0-dim tensor."""
        found = self.home[self.key] if isinstance(self.home, (dict, list)) else getattr(self.home, self.key)
        return found if self.position is None else found[self.position]

    def __float__(self) -> float:
        return float(self.read())

    def write(self, value: Any) -> None:
        """Sets the number; a tensor is written in place, since CUDA graphs read it."""
        found = self.read()
        if isinstance(found, torch.Tensor):
            with torch.no_grad():
                found.copy_(value) if isinstance(value, torch.Tensor) else found.fill_(value)
            return
        if self.position is not None:
            whole = self.home[self.key]
            items = [value if at == self.position else item for at, item in enumerate(whole)]
            value = type(whole)(items)
        if isinstance(self.home, (dict, list)):
            self.home[self.key] = value
        else:
            setattr(self.home, self.key, value)


Follow = Callable[[float, float], float]
"""Maps a value and k to the value for a batch k times as large; with 1/k it inverts that."""


class Change:
    """A change of a hyperparameter."""

    def __init__(self, place: Place, follow: Follow, k: float) -> None:
        self.name, self.old = place.name, float(place)
        self.new = follow(self.old, k)
        self._place, self._follow, self._k = place, follow, k
        self._before: Any = None
        self._after: Any = None

    def apply(self) -> None:
        """Writes the new value."""
        self._before = _copy(self._place.read())
        self._place.write(self.new)
        self._after = _copy(self._place.read())

    def undo(self) -> None:
        """Restores the old value, bitwise; a value that a scheduler has changed since is scaled back."""
        is_untouched = bool(self._place.read() == self._after)
        self._place.write(self._before if is_untouched else self._follow(float(self._place), 1 / self._k))


class MomentumChange:
    """A multiplication of the momentum buffers of a parameter group; the table shows their norm."""

    def __init__(self, name: str, buffers: Sequence[torch.Tensor], factor: float) -> None:
        self.name, self._buffers, self._factor = name, buffers, factor
        self.old = math.sqrt(sum(float(buffer.double().square().sum()) for buffer in buffers))
        self.new = self.old * factor
        self._before: list[torch.Tensor] = []

    def apply(self) -> None:
        """Multiplies the buffers, and keeps a copy for ``undo``."""
        self._before = [buffer.clone() for buffer in self._buffers]
        for buffer in self._buffers:
            buffer.mul_(self._factor)

    def undo(self) -> None:
        """Restores the buffers, bitwise; those that were updated since are divided by the factor."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            if torch.equal(buffer, before * self._factor):
                buffer.copy_(before)
            else:
                buffer.div_(self._factor)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def rates_of(optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]) -> list[Place]:
    """Every learning rate: of the groups, and those that schedulers compute from."""
    places = _in_groups(optimizers, GROUP_RATES)
    for name, scheduler in named_schedulers(schedulers):
        is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        places += _in_scheduler(name, scheduler, (*SCHEDULER_RATES, *(("eps",) if is_plateau else ())))
    distinct: dict[Any, Place] = {}  # tensors, and lists that composed schedulers share, would be scaled twice
    for place in places:
        value = place.read()
        distinct.setdefault(id(value) if isinstance(value, torch.Tensor) else (id(place.home), place.key), place)
    return list(distinct.values())


def _in_groups(optimizers: Sequence[torch.optim.Optimizer], keys: Sequence[str]) -> list[Place]:
    named = [(prefix, group, key) for prefix, group in named_groups(optimizers) for key in keys]
    return [Place(f"{prefix}.{key}", group, key) for prefix, group, key in named if is_number(group.get(key))]


def _in_scheduler(name: str, scheduler: Any, keys: Sequence[str]) -> list[Place]:
    places: list[Place] = []
    for key in keys:
        value = getattr(scheduler, key, None)
        if isinstance(value, list):
            places += [Place(f"{name}.{key}[{i}]", value, i) for i, v in enumerate(value) if is_number(v)]
        elif is_number(value):
            places.append(Place(f"{name}.{key}", scheduler, key))
    return places


def cycled_betas(optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]) -> list[Place]:
    """The bounds between which schedulers cycle the first beta."""
    flags = ("cycle_momentum", "use_beta1")
    cycling = [
        (name, one) for name, one in named_schedulers(schedulers) if all(getattr(one, flag, False) for flag in flags)
    ]
    places = [place for one in cycling for place in _in_scheduler(*one, [f"{key}s" for key in CYCLED])]
    if any(not hasattr(scheduler, "base_momentums") for _, scheduler in cycling):
        places += _in_groups(optimizers, CYCLED)
    return places


def named_groups(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parameter groups, with names for the table."""
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizers[{number}]." if len(optimizers) > 1 else ""
        for at, group in enumerate(optimizer.param_groups):
            yield f"{prefix}param_groups[{at}]", group


def named_schedulers(schedulers: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Schedulers and those nested in them, each once, with names for the table."""
    seen: set[int] = set()
    waiting = [
        (f"schedulers[{number}]" if len(schedulers) > 1 else "scheduler", one) for number, one in enumerate(schedulers)
    ]
    while waiting:
        name, scheduler = waiting.pop(0)
        if id(scheduler) in seen:
            continue
        seen.add(id(scheduler))
        yield name, scheduler
        inner = getattr(scheduler, "_schedulers", ())
        waiting += [(f"{name}[{number}]", one) for number, one in enumerate(inner)]


def is_number(value: Any) -> bool:
    """Whether a value is a number, or a tensor of one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


RuleName = Literal["linear", "sqrt", "adam-sde", "half-life"]
DecayPolicy = Literal["per-sample", "keep"]
BY_OPTIMIZER: Literal["by-optimizer"] = "by-optimizer"

_ADAM_LIKE = ("Adam", "AdamW", "NAdam", "RAdam", "RMSprop")
_DECOUPLED = ("AdamW", "Muon", "Adafactor")
_LENGTHS = ("T_max", "T_0", "total_iters", "total_steps", "step_size", "total_size", "milestones", "_milestones")


def _times(power: float) -> Follow:
    return lambda value, k: value * k**power


def _forgetting(beta: float, k: float) -> float:
    """The beta with the same decay per sample, to first order; 0 stays 0."""
    return 1 - k * (1 - beta) if beta else 0.0


class _Rule(NamedTuple):
    """How hyperparameters scale with k, the new batch size over the old one."""

    power: float  # learning rates are multiplied by k to this power
    source: str  # for people
    others: Mapping[str, Follow] = MappingProxyType({})  # how other values of a parameter group scale, by their key
    needs: tuple[tuple[str, ...], ...] = ()  # a group needs at least one key of each tuple


_RULES: Mapping[str, _Rule] = {
    "linear": _Rule(
        1.0, "lr x k. Goyal et al. 2017, for SGD: ResNet-50 up to 8192 images, after a warm-up of 5 epochs"
    ),
    "sqrt": _Rule(0.5, "lr x sqrt(k). Hoffer et al. 2017 for SGD; You et al. 2020 for LAMB"),
    "adam-sde": _Rule(
        0.5,
        "lr x sqrt(k), 1 - beta x k, eps / sqrt(k). Malladi et al. 2022, for Adam and RMSprop, where noise is most of "
        "the gradient",
        {"betas": _forgetting, "alpha": _forgetting, "eps": _times(-0.5)},
        (("betas", "alpha"), ("eps",)),
    ),
    "half-life": _Rule(
        0.25,
        "beta2 to the power k, which keeps its half-life in samples; beta1 stays. Marek et al. 2025. Their lr grows "
        "slower than sqrt(k); k^0.25 is a starting point",
        {"beta2": lambda beta, k: float(beta**k)},
        (("beta2",),),
    ),
}


class Rescaled:
    """The result of ``rescale``; ``undo()`` restores the old values.

    Attributes:
        rule: the rule; ``None`` if nothing was changed.
        ratio: the new batch size over the old one.
        table: the old and the new value of every hyperparameter that was changed, by name.
        proposals: with ``rule=None``, the table of each rule, or a text that says why it does not apply.
        notes: what was not changed, and advice.
    """

    def __init__(
        self,
        rule: RuleName | None,
        ratio: float,
        changes: Sequence[Change | MomentumChange] = (),
        notes: Sequence[str] = (),
        proposals: Mapping[str, "Rescaled | str"] = MappingProxyType({}),
    ) -> None:
        self.rule, self.ratio, self.notes = rule, ratio, tuple(notes)
        self.table = {change.name: (change.old, change.new) for change in changes}
        self._changes, self._proposals = list(changes), proposals

    @property
    def proposals(self) -> dict[str, dict[str, tuple[float, float]] | str]:
        """What each rule would do."""
        return {name: one if isinstance(one, str) else one.table for name, one in self._proposals.items()}

    def undo(self) -> None:
        """Restores the old values, bitwise; values that a scheduler or an update has changed since are scaled back.

        A second call does nothing.
        """
        for change in reversed(self._changes):
            change.undo()
        self._changes = []

    def __str__(self) -> str:
        if self.rule is None:
            texts = [
                f"{name}: {one}" if isinstance(one, str) else f"{name}: {one}".replace("\n", "\n  ")
                for name, one in self._proposals.items()
            ]
            return "\n".join([f"batch x {self.ratio:g}; nothing was changed", *texts])
        width = max(map(len, self.table), default=0)
        lines = [f"{name:<{width}}  {old:.6g} -> {new:.6g}" for name, (old, new) in self.table.items()]
        source = f"batch x {self.ratio:g}, rule {self.rule!r}: {_RULES[self.rule].source}"
        return "\n".join([source, *lines, *(f"- {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return f"Rescaled(rule={self.rule!r}, ratio={self.ratio:g}, {len(self.table)} numbers)"


def rescale(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    batch: tuple[float, float],
    rule: RuleName | Literal["by-optimizer"] | None = BY_OPTIMIZER,
    *,
    scheduler: Any = None,
    weight_decay: DecayPolicy = "per-sample",
    momentum_buffer: bool = False,
) -> Rescaled:
    """Changes the hyperparameters of an optimizer and its schedulers for another batch size.

    With k the new size over the old one:

    - ``"linear"``: lr k (Goyal et al. 2017, "Accurate, Large Minibatch SGD").
    - ``"sqrt"``: lr sqrt(k) (Hoffer et al. 2017, "Train longer, generalize better").
    - ``"adam-sde"``: lr sqrt(k), betas 1 - k (1 - beta), eps / sqrt(k) (Malladi et al. 2022, "On the SDEs and Scaling
      Rules for Adaptive Gradient Algorithms"); alpha of RMSprop as beta2. It needs k (1 - beta) < 1.
    - ``"half-life"``: beta2^k, lr k^0.25 (Marek et al. 2025, "Small Batch Size Training for Language Models").
    - ``"by-optimizer"``: ``"linear"`` for ``torch.optim.SGD``, ``"adam-sde"`` for variants of Adam and RMSprop; other
      optimizers need an explicit rule.
    - ``None``: changes nothing; the result says what each rule would do.

    Args:
        optimizer: one optimizer or a sequence; all parameter groups are changed.
        batch: the old and the new batch size, in the same unit.
        rule: the rule.
        scheduler: one scheduler or a sequence; their base learning rates are multiplied, too, so that the whole
            schedule is scaled. ``()`` for none, where the optimizer looks as if it had one.
        weight_decay: ``"per-sample"`` keeps the decay per sample, lr' decay' = k lr decay, if the decay is decoupled
            from the gradient as in AdamW; ``"keep"`` does not change it.
        momentum_buffer: multiplies momentum buffers by lr' / lr, for optimizers whose buffer is a sum of updates. The
            buffer of ``torch.optim.SGD`` is a sum of gradients, without the learning rate, and needs no change.

    Returns:
        The table of changes, with ``undo()``.

    Raises:
        BatchError: an argument is invalid, no rule is known for the optimizer, the rule does not apply to it or gives
            no valid beta, or the optimizer has a scheduler that was not passed. Nothing was changed.

    Example:
        >>> weights = [torch.nn.Parameter(torch.zeros(2))]
        >>> optimizer = torch.optim.AdamW(weights, lr=1e-3)
        >>> done = rescale(optimizer, batch=(64, 512))
        >>> [f"{optimizer.param_groups[0]['lr']:.4g}", *(f"{beta:.4g}" for beta in optimizer.param_groups[0]["betas"])]
        ['0.002828', '0.2', '0.992']
        >>> done.undo()
        >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]
        (0.001, (0.9, 0.999))
    """
    ratio = _ratio(batch)
    if rule is not None and rule != BY_OPTIMIZER and rule not in _RULES:
        raise BatchError(f"rule={rule!r}; expected one of {tuple(_RULES)}, or None to see what each would do")
    if weight_decay not in get_args(DecayPolicy):
        raise BatchError(f"weight_decay={weight_decay!r}; expected one of {get_args(DecayPolicy)}")
    if not isinstance(momentum_buffer, bool):
        raise BatchError(f"momentum_buffer={momentum_buffer!r}; expected True or False")
    optimizers = optimizers_of(optimizer)
    for one in optimizers:
        if needs_closure(one):
            raise BatchError(f"{type(one).__name__} does its own line search; no rule for the batch size is known")
    schedulers = _schedulers_of(scheduler, optimizers)
    planned = _Planned(optimizers, schedulers, ratio, weight_decay, momentum_buffer)
    if rule is None:
        return Rescaled(None, ratio, proposals={name: planned.proposed(name) for name in get_args(RuleName)})
    done = planned.rescaled(_rule_for(optimizers) if rule == BY_OPTIMIZER else rule)
    for change in done._changes:
        change.apply()
    return done


def _rule_for(optimizers: Sequence[torch.optim.Optimizer]) -> RuleName:
    """The rule that was derived for an optimizer; for kin that only has its options, it is a guess that is left out."""
    rules: dict[str, RuleName] = {}
    for one in optimizers:
        names = {kind.__name__ for kind in type(one).__mro__}
        if isinstance(one, torch.optim.SGD):
            rules[type(one).__name__] = "linear"
        elif not names.isdisjoint(_ADAM_LIKE):
            rules[type(one).__name__] = "adam-sde"
        else:
            raise BatchError(
                f"no rule for the batch was derived for {type(one).__name__}; pass one: "
                'rule="sqrt" is the careful choice for optimizers that divide the gradient by its size, '
                'rule="linear" for those that do not; '
                "rule=None changes nothing and says what each would do"
            )
    if len(set(rules.values())) > 1:
        raise BatchError(
            f"the optimizers follow several rules ({', '.join(f'{name}: {rule}' for name, rule in rules.items())}); "
            'call rescale for each by itself, with its own schedulers, or pass one rule for all: rule="sqrt"'
        )
    return next(iter(rules.values()))


@dataclass
class _Planned:
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Any]
    ratio: float  # the new batch over the old one
    weight_decay: DecayPolicy
    momentum_buffer: bool  # whether momentum is multiplied, too

    def __post_init__(self) -> None:
        owners = [optimizer for optimizer in self.optimizers for _ in optimizer.param_groups]
        named = zip(owners, named_groups(self.optimizers), strict=True)
        self._groups = [(owner, group, prefix) for owner, (prefix, group) in named]

    def proposed(self, rule: RuleName) -> Rescaled | str:
        """What a rule would change, or why it can't be used."""
        try:
            return self.rescaled(rule)
        except BatchError as error:
            return str(error)

    def rescaled(self, name: RuleName) -> Rescaled:
        """Every number that changes, and what there is to say; nothing is changed yet."""
        k, rule = self.ratio, _RULES[name]
        notes: list[str] = []
        changes = [Change(place, _times(rule.power), k) for place in rates_of(self.optimizers, self.schedulers)]
        for owner, group, prefix in self._groups:
            if not is_number(group.get("lr")):
                raise BatchError(f"{prefix} of {type(owner).__name__} has no learning rate (lr={group.get('lr')!r})")
            changes += [Change(*one, k) for one in _others(owner, group, prefix, name)]
            changes += self._decay(owner, group, prefix, 1 - rule.power, notes)
        if "betas" in rule.others:
            cycled = cycled_betas(self.optimizers, self.schedulers)
            changes += [Change(place, rule.others["betas"], k) for place in cycled]
        _check(changes, name, k)
        found: list[Change | MomentumChange] = [one for one in changes if one.new != one.old]
        if self.momentum_buffer:
            found += self._momentum(k**rule.power)
        return Rescaled(name, k, found, [*notes, *self._advice(name, k**rule.power)])

    def _momentum(self, factor: float) -> list[MomentumChange]:
        found = []
        for owner, group, prefix in self._groups:
            states = (owner.state.get(parameter, {}).get("momentum_buffer") for parameter in group["params"])
            buffers = [buffer for buffer in states if isinstance(buffer, torch.Tensor)]
            found += [MomentumChange(f"norm of momentum_buffer, {prefix}", buffers, factor)] if buffers else []
        return found

    def _decay(
        self, owner: torch.optim.Optimizer, group: dict[str, Any], prefix: str, power: float, notes: list[str]
    ) -> list[Change]:
        if self.weight_decay == "keep" or not is_number(group.get("weight_decay")) or not float(group["weight_decay"]):
            return []
        names = {kind.__name__ for kind in type(owner).__mro__}
        if group.get("decoupled_weight_decay", not names.isdisjoint(_DECOUPLED)):
            return [Change(Place(f"{prefix}.weight_decay", group, "weight_decay"), _times(power), self.ratio)]
        if not type(owner).__module__.startswith("torch.optim"):
            notes.append(
                f"{prefix}.weight_decay was left: whether {type(owner).__name__} decouples it from the gradient is not "
                f"known. If it does, multiply it by {self.ratio**power:g}"
            )
        return []

    def _advice(self, rule: RuleName, factor: float) -> list[str]:
        """What is told and not done."""
        notes = []
        if factor > 1:
            notes.append(
                f"the learning rate is now {factor:g} times what it was. Early in training raise it there from the old "
                "one over some epochs (five in Goyal et al. 2017)"
            )
        for name, scheduler in named_schedulers(self.schedulers):
            for key in _LENGTHS:
                value = getattr(scheduler, key, None)
                if value is not None and value != [] and not (key == "total_size" and hasattr(scheduler, "T_max")):
                    notes.append(f"{name}.{key} counts updates, and was left: {_shown(value, self.ratio)}")
        sgd = any(isinstance(one, torch.optim.SGD) for one in self.optimizers)
        betas = [float(beta) for _, group, _ in self._groups for beta in group.get("betas", ())]
        if rule == "adam-sde" and any(beta > 0 and self.ratio * (1 - beta) >= 0.5 for beta in betas):
            notes.append("the rule is derived for k (1 - beta) far below 1, which does not hold for beta1")
        if rule == "linear" and not sgd:
            notes.append('linear is the rule of SGD; for Adam "adam-sde" or "sqrt" is nearer to what is known')
        return notes


def _shown(value: Any, ratio: float) -> str:
    values = sorted(value) if isinstance(value, (list, tuple, dict)) else [value]
    old = ", ".join(f"{one:g}" for one in values)
    return f"{old}; for as many samples as before it would be {', '.join(f'{one / ratio:g}' for one in values)}"


def _ratio(batch: Any) -> float:
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if not is_pair or not all(is_number(one) and not isinstance(one, torch.Tensor) for one in batch):
        raise BatchError(f"batch={batch!r}; expected the old and the new size: batch=(64, 512)")
    if not all(math.isfinite(one) and one > 0 for one in batch):
        raise BatchError(f"batch={batch!r}; expected two positive sizes")
    return float(batch[1] / batch[0])


def _schedulers_of(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Reads the schedulers, and refuses to guess where there seem to be some."""
    if scheduler is None:
        if any("initial_lr" in group for one in optimizers for group in one.param_groups):
            raise BatchError(
                "the optimizer has a scheduler (its groups have initial_lr), which would restore the old learning "
                "rates; pass it: rescale(..., scheduler=scheduler), or scheduler=() if there is none any more"
            )
        return []
    found = list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
    for one in found:
        if not callable(getattr(one, "step", None)):
            raise BatchError(f"scheduler is a {type(one).__name__}; expected an object with a step() method")
        owner = getattr(one, "optimizer", None)
        if owner is not None and all(owner is not optimizer for optimizer in optimizers):
            raise BatchError(f"the {type(one).__name__} belongs to another optimizer; pass its own")
        if not any(hasattr(one, name) for name in ("base_lrs", "min_lrs", "_schedulers", "swa_lrs")):
            raise BatchError(
                f"how a {type(one).__name__} keeps its learning rates is not known, so it would undo the change; build "
                "it again with the new ones, and pass scheduler=()"
            )
    return found


def _others(
    owner: torch.optim.Optimizer, group: dict[str, Any], prefix: str, name: RuleName
) -> list[tuple[Place, Follow]]:
    """The numbers of a group that follow a rule beside its learning rates, and how."""
    rule, betas = _RULES[name], group.get("betas")
    if not isinstance(betas, (tuple, list)) or not all(map(is_number, betas)):
        betas = ()
    keys = ["betas", "beta2"] if "beta2" in rule.others and len(betas) == 2 else ["betas"] * len(betas)
    found = [(key, Place(f"{prefix}.betas[{at}]", group, "betas", at)) for at, key in enumerate(keys)]
    plain = [key for key in ("eps", *(() if betas else ("alpha",))) if is_number(group.get(key))]
    found += [(key, Place(f"{prefix}.{key}", group, key)) for key in plain]
    found = [(key, place) for key, place in found if key in rule.others]
    if not all(any(key in either for key, _ in found) for either in rule.needs):
        needed = " and ".join(either[0] for either in rule.needs)
        raise BatchError(
            f"rule={name!r} needs {needed}, which {type(owner).__name__} does not have; expected Adam or its kin. Use "
            'rule="linear" for SGD, or rule="sqrt"'
        )
    return [(place, rule.others[key]) for key, place in found]


def _check(changes: Sequence[Change], rule: RuleName, k: float) -> None:
    """Refuses numbers that no optimizer takes."""
    for change in changes:
        is_beta = "betas" in change.name or "momentum" in change.name or change.name.endswith("alpha")
        if not math.isfinite(change.new) or (is_beta and not 1e-9 < change.new < 1 and change.new != change.old):
            limit = 1 / (1 - change.old) if is_beta and rule == "adam-sde" else 0.0
            text = (
                f" The rule reaches up to a batch {limit:.4g} times as large, and is only good far below."
                if limit
                else ""
            )
            raise BatchError(
                f"rule={rule!r}: {change.name} would go from {change.old:g} to {change.new:g}.{text} Use "
                'rule="sqrt" or a smaller step in batch size'
            )
