"""Sees calls of torch's loss functions and functional dropouts, whose results stay what they are."""

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from anybatch.doctor.lossvalues import facts_of_loss
from anybatch.doctor.sites import user_line
from anybatch.records.events import DropoutCall
from anybatch.records.lines import Fact
from anybatch.records.lossfacts import LossCall
from anybatch.tensors.graph import in_backward

if TYPE_CHECKING:
    from anybatch.doctor.numbering import Numbering

LOSSES = (
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss"),
    *("smooth_l1_loss", "huber_loss", "kl_div", "gaussian_nll_loss", "poisson_nll_loss", "margin_ranking_loss"),
    *("hinge_embedding_loss", "triplet_margin_loss", "cosine_embedding_loss", "ctc_loss", "soft_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
)
DROPOUTS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_ATTENTION = "scaled_dot_product_attention"
_SEEN_BY = "_anybatch_doctor_calls"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class CurrentRoot(NamedTuple):
    """The root that is running, or ran last.

    Args:
        root: its number.
        args: it was called with.
        kwargs: it was called with.
        name: of the innermost module that is running, empty outside.
        module: that module, or the root itself where it is not known; ``None`` where nothing runs.
    """

    root: int = -1
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    name: str = ""
    module: torch.nn.Module | None = None


NO_ROOT = CurrentRoot()


@contextmanager
def patched(
    numbering: "Numbering",
    emit: Callable[[Fact], Any],
    wants_values: Callable[[], bool],
    current_root: Callable[[], CurrentRoot | None],
) -> Iterator[None]:
    """Sees the calls while its block runs.

    The functions keep their identity and their signature: their code is exchanged for code that calls them as they
    were, so that names imported before, pickles and compilers meet the functions they know.

    Args:
        numbering: of the run.
        emit: takes the facts.
        wants_values: whether values are to be read now, which on a GPU waits for it.
        current_root: the root that is running.

    Example:
        >>> found = []
        >>> with patched(None, found.append, lambda: True, lambda: None):
        ...     loss = F.mse_loss(torch.ones(4, requires_grad=True), torch.zeros(4, 1).squeeze(1))
        >>> found[0].function, found[0].input_shape, found[0].value
        ('mse_loss', (4,), 1.0)
    """
    calls = _Calls(emit, wants_values, current_root)
    with ExitStack() as stack:
        for name in LOSSES:
            stack.callback(_exchange(getattr(F, name), calls.loss))
        for name in DROPOUTS:
            stack.callback(_exchange(getattr(F, name), calls.dropout))
        stack.callback(_replace(_ATTENTION, calls.attention))
        yield


class _Calls:
    """Takes the calls and says what they were."""

    def __init__(
        self,
        emit: Callable[[Fact], Any],
        wants_values: Callable[[], bool],
        current_root: Callable[[], CurrentRoot | None],
    ) -> None:
        self._emit, self._wants_values, self._current_root = emit, wants_values, current_root
        self._inside = threading.local()

    def loss(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Calls a loss function; within another one, or a recomputation, it is not counted."""
        inside = self._inside
        if getattr(inside, "depth", 0) or not torch.is_grad_enabled() or not _plain(arguments) or in_backward():
            return function(*arguments)
        inside.depth = 1
        try:
            result = function(*arguments)
        finally:
            inside.depth = 0
        if isinstance(result, torch.Tensor) and not torch.compiler.is_compiling():
            named = dict(zip(_parameters(function), arguments, strict=True))
            root = self._current_root() or NO_ROOT
            with torch.no_grad():
                facts = facts_of_loss(name, named, result, root.args, root.kwargs, read=self._wants_values())
            file, line = user_line(2)
            self._emit(LossCall(function=name, module=root.name, root=root.root, file=file, line=line, **facts))
        return result

    def dropout(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Calls a dropout; one that drops in another mode than its module's is told."""
        inside = self._inside
        if getattr(inside, "depth", 0):
            return function(*arguments)
        if arguments[1] and type(arguments[0]) in _PLAIN and not in_backward():
            self._mode(name, float(arguments[1]), bool(arguments[2]))
        inside.depth = 1
        try:
            return function(*arguments)
        finally:
            inside.depth = 0

    def attention(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the attention; its dropout has no flag, and so it drops whenever it is not zero."""
        p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        if p and args and type(args[0]) in _PLAIN and not torch.compiler.is_compiling() and not in_backward():
            self._mode(_ATTENTION, float(p), True)
        return function(*args, **kwargs)

    def _mode(self, name: str, p: float, training: bool) -> None:
        root = self._current_root()
        if root is None or root.module is None or root.module.training == training:
            return
        module = _caller() or root.module  # reading a frame costs time, and is done for a mismatch only
        if module.training == training or isinstance(module, torch.nn.modules.dropout._DropoutNd):
            return
        file, line = user_line(3)
        self._emit(
            DropoutCall(
                root=root.root, module=root.name, function=name, p=p, training=training,
                root_training=module.training, file=file, line=line,
            )
        )  # fmt: skip


def _plain(arguments: tuple[Any, ...]) -> bool:
    return type(arguments[0]) in _PLAIN and type(arguments[1]) in _PLAIN and not arguments[0].is_meta


def _caller() -> torch.nn.Module | None:
    """The module whose method calls, if it is one."""
    frame = inspect.currentframe()
    own = (__file__, F.__file__, "<anybatch doctor>")
    while frame is not None and frame.f_code.co_filename in own:
        frame = frame.f_back
    if frame is None or not frame.f_code.co_varnames or frame.f_code.co_argcount == 0:
        return None
    first = frame.f_locals.get(frame.f_code.co_varnames[0])
    return first if isinstance(first, torch.nn.Module) else None


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _exchange(function: Any, see: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> Callable[[], None]:
    """Gives a function code that has it called by another one.

    Returns:
        What gives its own code back.
    """
    own = function.__code__
    original = types.FunctionType(own, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    names = inspect.signature(function).parameters
    given = ", ".join(names)
    table = function.__globals__.setdefault(_SEEN_BY, {})
    key = f"{function.__name__} {id(original)}"  # several may be in force, each around the one before
    text = f"def {function.__name__}({given}):\n    return {_SEEN_BY}[{key!r}](({given},))"
    made: dict[str, Any] = {}
    exec(compile(text, "<anybatch doctor>", "exec"), made)
    table[key] = functools.partial(see, function.__name__, original)
    code = made[function.__name__].__code__.replace(co_filename=own.co_filename, co_firstlineno=own.co_firstlineno)
    function.__code__ = code

    def restore() -> None:
        function.__code__ = own
        table.pop(key, None)
        if not table:
            function.__globals__.pop(_SEEN_BY, None)

    return restore


def _replace(name: str, see: Callable[..., Any]) -> Callable[[], None]:
    """Puts a function in the place of one that is built in, whose code can't be exchanged."""
    original = getattr(F, name)

    @functools.wraps(original)
    def seen(*args: Any, **kwargs: Any) -> Any:
        return see(original, args, kwargs)

    seen.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]
    setattr(F, name, seen)

    def restore() -> None:
        if getattr(F, name) is seen:
            setattr(F, name, original)

    return restore
