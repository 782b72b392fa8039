"""What a run is made of: models, their modules and parameters, optimizers, schedulers; recorded when first seen.

Parameters, roots, optimizers and schedulers are numbered from 0 in the order in which they were first seen; events
and samples refer to them by these numbers. A table that is recorded again under the same number replaces the first
from there on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anybatch.records.lines import Fact, fact


@fact("started")
@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Fact):
    """The head of a record.

    Args:
        version: of the record's form.
        script: the path as the user wrote it, empty when attached in code.
        arguments: of the script.
        torch: its version.
        python: its version.
        device: of the run, such as ``"cpu"`` or the name of a GPU.
        time: seconds since the epoch.
    """

    version: int = 1
    script: str = ""
    arguments: tuple[str, ...] = ()
    torch: str = ""
    python: str = ""
    device: str = ""
    time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One module of a root.

    Args:
        name: qualified within the root; empty for the root itself; as ``layers[0]`` for what lies in a plain list.
        cls: the name of its class, such as ``"Linear"``.
        kind: ``"dropout"``, ``"batch_norm"``, ``"norm"``, ``"activation"``, ``"embedding"``, ``"recurrent"``,
            ``"attention"``, ``"linear"``, ``"conv"``, ``"container"`` or empty; classes derived from torch's count.
        leaf: whether it has no children.
        registered: whether ``named_modules()`` has it; one that does not lies in a plain list or dictionary.
        training: its mode when recorded.
        requires_grad: an attribute of that name that was set on the module itself, ``None`` if there is none.
        options: plain numbers and texts that say how it computes: ``p``, ``momentum``, ``track_running_stats``,
            ``in_features``, ``out_features``, ``padding_idx``, ``batch_first``, ``bidirectional`` and the like.
        parameters: its own, by number.
        repeated: of a list of modules with parameters in which every entry is one and the same module: how many
            entries it has; 0 for others.
        file: of the class of a user's module, empty for torch's.
        line: of that class.
    """

    name: str
    cls: str
    kind: str = ""
    leaf: bool = True
    registered: bool = True
    training: bool = True
    requires_grad: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[int, ...] = ()
    repeated: int = 0
    file: str = ""
    line: int = 0


@fact("root")
@dataclass(frozen=True, slots=True, kw_only=True)
class Root(Fact):
    """A module that the user's code calls itself: a model.

    Args:
        root: its number.
        variable: what the user's code calls it, such as ``"model"`` or ``"self.actor"``; empty if not found.
        cls: the name of its class.
        modules: all of it, the root first; modules in plain lists too, with ``registered`` False.
        wrapper: ``"DistributedDataParallel"``, ``"DataParallel"``, ``"compiled"`` or empty.
        config: plain entries of ``model.config`` that say what is meant, such as ``tie_word_embeddings``.
        file: where it was first called.
        line: of that.
    """

    root: int
    variable: str = ""
    cls: str = ""
    modules: tuple[ModuleFacts, ...] = ()
    wrapper: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""
    line: int = 0


@fact("parameter")
@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFacts(Fact):
    """A parameter, or another leaf that is optimized or that a loss reaches.

    Args:
        parameter: its number.
        names: qualified, all of them where it is tied; with the variable of its root in front where there are several
            roots (``"generator.0.weight"``); ``"optimizer.param_groups[0]['params'][3]"`` for one in no model.
        root: the number of the first root that has it, -1 for none.
        module: the qualified name of its module within the root.
        shape: its shape.
        dtype: such as ``"float32"``.
        device: such as ``"cuda:0"``.
        numel: how many numbers.
        requires_grad: its flag when recorded.
        registered: whether ``named_parameters()`` of a root has it.
        is_parameter: whether it is an ``nn.Parameter``.
        is_input: whether it is a leaf that came into a model as its input, or is made anew each step.
        role: ``"weight"``, ``"bias"``, ``"norm"`` (weight or bias of a norm layer), ``"embedding"`` or ``"other"``.
        constant: the value that all its entries had when first seen, ``None`` if they differed.
        equal_rows: whether a matrix had all rows equal when first seen (and is no constant of a norm layer).
    """

    parameter: int
    names: tuple[str, ...]
    root: int = -1
    module: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    numel: int = 0
    requires_grad: bool = True
    registered: bool = True
    is_parameter: bool = True
    is_input: bool = False
    role: str = "other"
    constant: float | None = None
    equal_rows: bool = False

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """A group of an optimizer.

    Args:
        parameters: by number.
        lr: its learning rate.
        weight_decay: 0 if it has none.
        momentum: or the first of ``betas``; 0 if it has none.
        name: an entry ``name`` of the group, if it has one.
    """

    parameters: tuple[int, ...]
    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    name: str = ""


@fact("optimizer")
@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts(Fact):
    """An optimizer; recorded again when a group was added or its parameters changed.

    Args:
        optimizer: its number.
        variable: what the user's code calls it.
        cls: the name of its class.
        groups: of it.
        default_lr: the learning rate that its constructor was given.
        fused: whether it runs fused.
        is_torchs: whether its class is torch's own.
        after: how many steps other optimizers had done with some of its parameters when it was made; 0 mostly.
        file: where it was made, or first seen.
        line: of that.
        is_made_there: whether it was seen being made.
    """

    optimizer: int
    variable: str = ""
    cls: str = ""
    groups: tuple[GroupFacts, ...] = ()
    default_lr: float = 0.0
    fused: bool = False
    is_torchs: bool = True
    after: int = 0
    file: str = ""
    line: int = 0
    is_made_there: bool = True


@fact("scheduler")
@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerFacts(Fact):
    """A learning rate scheduler.

    Args:
        scheduler: its number.
        variable: what the user's code calls it.
        cls: the name of its class.
        optimizer: the number of its optimizer, -1 if that never stepped.
        options: plain attributes: ``step_size``, ``gamma``, ``T_max``, ``total_steps``, ``milestones`` and the like.
        file: where it was made, or first stepped.
        line: of that.
    """

    scheduler: int
    variable: str = ""
    cls: str = ""
    optimizer: int = -1
    options: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""
    line: int = 0
