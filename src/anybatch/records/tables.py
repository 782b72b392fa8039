"""The objects of a run: models, their modules and parameters, optimizers, schedulers; recorded when first seen.

Parameters, roots, optimizers and schedulers are numbered from 0 in the order in which they were first seen; events
and samples refer to them by these numbers. A table that is recorded again under the same number replaces the earlier
one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anybatch.records.lines import Fact, Placed, fact


@fact("started")
class Started(Fact):
    """The header of a record."""

    version: int = 1  # the version of the format
    script: str = ""  # the path as the user wrote it; empty if the doctor was attached in code
    arguments: tuple[str, ...] = ()  # the arguments of the script
    torch: str = ""  # the version of torch
    python: str = ""  # the version of Python
    device: str = ""  # the device of the run, such as ``"cpu"`` or the name of a GPU
    time: float = 0.0  # seconds since the epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One module of a root."""

    name: str  # qualified within the root; empty for the root itself; ``layers[0]`` for a module in a plain list
    cls: str  # the name of its class, such as ``"Linear"``
    # ``"dropout"``, ``"batch_norm"``, ``"norm"``, ``"activation"``, ``"embedding"``, ``"recurrent"``, ``"attention"``,
    # ``"linear"``, ``"conv"``, ``"container"`` or empty; subclasses of torch's classes have the kind of their base
    kind: str = ""
    registered: bool = True  # whether ``named_modules()`` has it; otherwise it is in a plain list or dictionary
    training: bool = True  # its mode when recorded
    # the attribute ``requires_grad`` if the user set it on the module itself (it has no effect); ``None`` if not
    requires_grad: bool | None = None
    # plain attributes that say how it computes: ``p``, ``momentum``, ``track_running_stats``, ``in_features``,
    # ``out_features``, ``padding_idx``, ``batch_first``, ``bidirectional`` and the like; ``hooked`` if a forward hook
    # of the user is on it
    options: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[int, ...] = ()  # the numbers of its own parameters
    # for a list of modules with parameters whose entries are all the same module: the number of entries; else 0
    repeated: int = 0
    file: str = ""  # the file of the class, if it is the user's
    line: int = 0  # the line of the class


@fact("root")
class Root(Placed):
    """A model: a module that the user's code calls itself, first at the line."""

    root: int  # its number
    variable: str = ""  # its name in the user's code, such as ``"model"`` or ``"self.actor"``; empty if not found
    cls: str = ""  # the name of its class
    # all its modules, the root first; those in plain lists too, with ``registered=False``
    modules: tuple[ModuleFacts, ...] = ()
    wrapper: str = ""  # ``"DistributedDataParallel"``, ``"DataParallel"``, ``"compiled"`` or empty
    # plain entries of ``model.config`` that state an intention, such as ``tie_word_embeddings``
    config: Mapping[str, Any] = field(default_factory=dict)


@fact("parameter")
class ParameterFacts(Fact):
    """A parameter, or another leaf that is optimized or that a loss reaches."""

    parameter: int  # its number
    # its qualified names, several if it is tied; with several models, they begin with the variable of the model
    # (``"generator.0.weight"``); ``"optimizer.param_groups[0]['params'][3]"`` for one that is in no model
    names: tuple[str, ...]
    root: int = -1  # the number of the first root that has it; -1 for none
    module: str = ""  # the qualified name of its module within the root
    shape: tuple[int, ...] = ()
    dtype: str = "float32"  # such as ``"float32"``
    device: str = "cpu"  # such as ``"cuda:0"``
    numel: int = 0  # the number of its elements
    requires_grad: bool = True  # its flag when recorded
    registered: bool = True  # whether ``named_parameters()`` of a root has it
    is_parameter: bool = True  # whether it is an ``nn.Parameter``
    # ``"weight"``, ``"bias"``, ``"norm"`` (weight or bias of a norm layer), ``"embedding"`` or ``"other"``
    role: str = "other"
    constant: float | None = None  # the value that all its entries had when first seen; ``None`` if they differed
    equal_rows: bool = False  # whether all rows of a matrix were equal when first seen (norm layers excepted)

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """A group of an optimizer."""

    parameters: tuple[int, ...]  # the numbers of its parameters
    lr: float  # its learning rate
    weight_decay: float = 0.0  # 0 if it has none
    momentum: float = 0.0  # ``momentum``, or the first of ``betas``; 0 if it has neither
    second: float = 0.0  # the second of two ``betas``; 0 if it has none
    name: str = ""  # the entry ``name`` of the group, if there is one
    maximize: bool = False  # whether it makes the loss large


@fact("optimizer")
class OptimizerFacts(Placed):
    """An optimizer, created or first seen at the line; recorded again if a group is added or its parameters change."""

    optimizer: int  # its number
    variable: str = ""  # its name in the user's code
    cls: str = ""  # the name of its class
    groups: tuple[GroupFacts, ...] = ()
    default_lr: float = 0.0  # the learning rate given to its constructor
    is_torchs: bool = True  # whether its class is one of torch's
    after: int = 0  # the number of steps that other optimizers had taken with its parameters when it was created
    is_made_there: bool = True  # whether ``file`` and ``line`` are those of its creation


@fact("scheduler")
class SchedulerFacts(Placed):
    """A learning rate scheduler; the line is that where it was created, or first stepped."""

    scheduler: int  # its number
    variable: str = ""  # its name in the user's code
    cls: str = ""  # the name of its class
    optimizer: int = -1  # the number of its optimizer; -1 if that never stepped
    # plain attributes: ``step_size``, ``gamma``, ``T_max``, ``total_steps``, ``milestones`` and the like
    options: Mapping[str, Any] = field(default_factory=dict)
