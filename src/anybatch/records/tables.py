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
    """The head of a record."""

    version: int = 1  # of the record's form
    script: str = ""  # the path as the user wrote it, empty when attached in code
    arguments: tuple[str, ...] = ()  # of the script
    torch: str = ""  # its version
    python: str = ""  # its version
    device: str = ""  # of the run, such as ``"cpu"`` or the name of a GPU
    time: float = 0.0  # seconds since the epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One module of a root."""

    name: str  # qualified within the root; empty for the root itself; as ``layers[0]`` for what lies in a plain list
    cls: str  # the name of its class, such as ``"Linear"``
    # ``"dropout"``, ``"batch_norm"``, ``"norm"``, ``"activation"``, ``"embedding"``, ``"recurrent"``, ``"attention"``,
    # ``"linear"``, ``"conv"``, ``"container"`` or empty; classes derived from torch's count
    kind: str = ""
    leaf: bool = True  # whether it has no children
    registered: bool = True  # whether ``named_modules()`` has it; one that does not lies in a plain list or dictionary
    training: bool = True  # its mode when recorded
    # an attribute of that name that was set on the module itself, ``None`` if there is none
    requires_grad: bool | None = None
    # plain numbers and texts that say how it computes: ``p``, ``momentum``, ``track_running_stats``, ``in_features``,
    # ``out_features``, ``padding_idx``, ``batch_first``, ``bidirectional`` and the like
    options: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[int, ...] = ()  # its own, by number
    # of a list of modules with parameters in which every entry is one and the same module: how many entries it has; 0
    # for others
    repeated: int = 0
    file: str = ""  # of the class of a user's module, empty for torch's
    line: int = 0  # of that class


@fact("root")
@dataclass(frozen=True, slots=True, kw_only=True)
class Root(Fact):
    """A module that the user's code calls itself: a model."""

    root: int
    variable: str = ""  # what the user's code calls it, such as ``"model"`` or ``"self.actor"``; empty if not found
    cls: str = ""  # the name of its class
    # all of it, the root first; modules in plain lists too, with ``registered`` False
    modules: tuple[ModuleFacts, ...] = ()
    wrapper: str = ""  # ``"DistributedDataParallel"``, ``"DataParallel"``, ``"compiled"`` or empty
    # plain entries of ``model.config`` that say what is meant, such as ``tie_word_embeddings``
    config: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""  # where it was first called
    line: int = 0


@fact("parameter")
@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFacts(Fact):
    """A parameter, or another leaf that is optimized or that a loss reaches."""

    parameter: int
    # qualified, all of them where it is tied; with the variable of its root in front where there are several roots
    # (``"generator.0.weight"``); ``"optimizer.param_groups[0]['params'][3]"`` for one in no model
    names: tuple[str, ...]
    root: int = -1  # the number of the first root that has it, -1 for none
    module: str = ""  # the qualified name of its module within the root
    shape: tuple[int, ...] = ()
    dtype: str = "float32"  # such as ``"float32"``
    device: str = "cpu"  # such as ``"cuda:0"``
    numel: int = 0  # how many numbers
    requires_grad: bool = True  # its flag when recorded
    registered: bool = True  # whether ``named_parameters()`` of a root has it
    is_parameter: bool = True  # whether it is an ``nn.Parameter``
    is_input: bool = False  # whether it is a leaf that came into a model as its input, or is made anew each step
    # ``"weight"``, ``"bias"``, ``"norm"`` (weight or bias of a norm layer), ``"embedding"`` or ``"other"``
    role: str = "other"
    constant: float | None = None  # the value that all its entries had when first seen, ``None`` if they differed
    equal_rows: bool = False  # whether a matrix had all rows equal when first seen (and is no constant of a norm layer)

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """A group of an optimizer."""

    parameters: tuple[int, ...]  # by number
    lr: float  # its learning rate
    weight_decay: float = 0.0  # 0 if it has none
    momentum: float = 0.0  # or the first of ``betas``; 0 if it has none
    name: str = ""  # an entry ``name`` of the group, if it has one


@fact("optimizer")
@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts(Fact):
    """An optimizer; recorded again when a group was added or its parameters changed."""

    optimizer: int
    variable: str = ""  # what the user's code calls it
    cls: str = ""  # the name of its class
    groups: tuple[GroupFacts, ...] = ()
    default_lr: float = 0.0  # the learning rate that its constructor was given
    fused: bool = False  # whether it runs fused
    is_torchs: bool = True  # whether its class is torch's own
    after: int = 0  # how many steps other optimizers had done with some of its parameters when it was made; 0 mostly
    file: str = ""  # where it was made, or first seen
    line: int = 0
    is_made_there: bool = True  # whether it was seen being made


@fact("scheduler")
@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerFacts(Fact):
    """A learning rate scheduler."""

    scheduler: int
    variable: str = ""  # what the user's code calls it
    cls: str = ""  # the name of its class
    optimizer: int = -1  # the number of its optimizer, -1 if that never stepped
    # plain attributes: ``step_size``, ``gamma``, ``T_max``, ``total_steps``, ``milestones`` and the like
    options: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""  # where it was made, or first stepped
    line: int = 0
