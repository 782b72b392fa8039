"""Sees calls of torch's loss functions and functional dropouts, whose results stay what they are."""

import functools
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from anybatch.doctor.interruptions import is_interruption
from anybatch.doctor.recording.naming import user_place
from anybatch.doctor.recording.patches import HIDDEN, Patches
from anybatch.doctor.samples.guesses import Guesses
from anybatch.doctor.samples.lossvalues import facts_of_loss
from anybatch.records.events import DropoutCall
from anybatch.records.lines import Fact
from anybatch.records.lossfacts import Evaluated, LossCall
from anybatch.tensors.dispatch import is_watched, item_of, nobody_looks
from anybatch.tensors.graph import in_backward
from anybatch.torch_private import (
    in_transform,
    is_jit_tracing,
    number_of_backward,
)

if TYPE_CHECKING:
    from anybatch.doctor.recording.numbering import Numbering
    from anybatch.doctor.recording.recordings import Recording

LOSSES = (
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss"),
    *("smooth_l1_loss", "huber_loss", "kl_div", "gaussian_nll_loss", "poisson_nll_loss", "margin_ranking_loss"),
    *("hinge_embedding_loss", "triplet_margin_loss", "cosine_embedding_loss", "ctc_loss", "soft_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
)
DROPOUTS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, str, bool)
_MOST_KINDS = 256
_ALWAYS = frozenset(
    {"input_shape", "target_shape", "target_dtype", "reduction", "weighted", "ignore_index", "classes", "items"}
)


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


class _Inside(threading.local):
    """Whether a loss or a dropout runs in this thread."""

    depth = 0


NO_ROOT = CurrentRoot()
_is_traced = torch.compiler.is_dynamo_compiling
_compiler = vars(torch.compiler)  # of which a flag is read in each step, as ``is_compiling`` reads it in two calls


Keep = Callable[[int, str, dict[str, Any]], None]


@contextmanager
def patched(
    numbering: "Numbering",
    emit: Callable[[Fact], Any],
    wants_values: Callable[[], bool],
    current_root: Callable[[], CurrentRoot | None],
    keep: Keep | None = None,
    recording: "Recording | None" = None,
) -> Iterator["Calls"]:
    """Sees the calls while its block runs.

    The functions keep their identity and their signature: their code is exchanged for code that calls them as they
    were, so that names imported before, pickles and compilers meet the functions they know.

    Args:
        numbering: of the run.
        emit: takes the facts.
        wants_values: whether values are to be read now, which on a GPU waits for it.
        current_root: the root that is running.
        keep: is given the number of the root, the name and the arguments of calls whose values are read.
        recording: of the run, where calls that are like one before are recorded as such.

    Example:
        >>> found = []
        >>> with patched(None, found.append, lambda: True, lambda: None):
        ...     loss = F.mse_loss(torch.ones(4, requires_grad=True), torch.zeros(4, 1).squeeze(1))
        >>> found[0].function, found[0].input_shape, found[0].value
        ('mse_loss', (4,), 1.0)
    """
    calls = Calls(emit, wants_values, current_root, keep, recording, numbering)
    patches = Patches()
    try:
        for names, see in ((LOSSES, calls.loss), (DROPOUTS, calls.dropout)):
            for name in names:
                patches.wrap(F, name, functools.partial(_seeing, see, name))
        yield calls
    finally:
        patches.restore()
        calls._own(calls.end_evaluation)


def _seeing(see: Callable[..., Any], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(see, name, original)


@functools.cache
def parameters_of(name: str) -> tuple[str, ...]:
    """The names of the parameters of one of ``torch.nn.functional``."""
    return tuple(inspect.signature(getattr(F, name)).parameters)


class Calls:
    """Takes the calls and says what they were.

    Args:
        emit: takes the facts.
        wants_values: whether values are to be read now.
        current_root: the root that is running.
        keep: is given the calls whose values are read.
        recording: of the run, where calls that are like one before are recorded as such.
        numbering: of the run.

    Attributes:
        seconds: that it took itself.
        failed: the first error of its own, after which it only passes calls on.
    """

    def __init__(
        self,
        emit: Callable[[Fact], Any],
        wants_values: Callable[[], bool],
        current_root: Callable[[], CurrentRoot | None],
        keep: Keep | None = None,
        recording: "Recording | None" = None,
        numbering: "Numbering | None" = None,
    ) -> None:
        self._numbering = numbering
        self._emit, self._wants_values, self._current_root, self._keep = emit, wants_values, current_root, keep
        self._recording = recording
        self._inside = _Inside()
        self._known: dict[Any, dict[str, Any]] = {}  # what is the same in calls with arguments of the same kind
        self._with_ignored: set[str] = set()
        self._guesses = Guesses()
        self._evaluation: list[Any] = []  # name, line, how many losses, and their sum
        self.seconds = 0.0
        self.failed: BaseException | None = None

    def loss(self, name: str, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Calls a loss function; within another one, or a recomputation, it is not counted."""
        if _is_traced():
            return function(*arguments)
        inside, recording = self._inside, self._recording
        if _compiler.get("_is_compiling_flag") or is_jit_tracing() or in_transform():
            return function(*arguments)
        if inside.depth or number_of_backward() >= 0:
            return function(*arguments)
        if not torch.is_grad_enabled():
            result = function(*arguments)
            if recording is not None and type(result) in _PLAIN and result.numel() == 1:
                self._own(self._evaluated, recording, name, result)
            return result
        if self._evaluation:
            self._own(self.end_evaluation)
        first = arguments[0]
        if type(first) not in _PLAIN or type(arguments[1]) not in _PLAIN or first.is_meta:
            return function(*arguments)
        if recording is not None and recording.threads.ident != get_ident() and recording.threads.elsewhere():
            return function(*arguments)
        inside.depth = 1
        try:
            result = function(*arguments)
        finally:
            inside.depth = 0
        if not isinstance(result, torch.Tensor):
            return result
        if (recording is None or recording.sampled_much or name in self._with_ignored) or not self._again(
            recording, name, arguments, result
        ):
            self._own(self._loss, name, function, arguments, result)
        return result

    def _evaluated(self, recording: "Recording", name: str, result: torch.Tensor) -> None:
        """Adds a loss without a gradient, of a model in evaluation; it is read when the training goes on."""
        if recording.threads.ident != get_ident() and recording.threads.elsewhere():
            return
        models = self._numbering.models if self._numbering is not None else []
        model = models[recording.root].module() if 0 <= recording.root < len(models) else None
        if model is None or model.training:
            return
        value = item_of(result) if result.device.type == "cpu" else result.detach()
        if self._evaluation and self._evaluation[0] != name:
            self.end_evaluation()
        if self._evaluation:
            self._evaluation[2:] = self._evaluation[2] + 1, self._evaluation[3] + value
        else:
            self._evaluation = [name, user_place(3), 1, value]

    def end_evaluation(self) -> None:
        """Writes down what the losses of an evaluation were on average."""
        if self._evaluation:
            (name, (file, line), count, total), self._evaluation = self._evaluation, []
            self._emit(Evaluated(function=name, value=float(total) / count, calls=count, file=file, line=line))

    def _again(
        self, recording: "Recording", name: str, arguments: tuple[Any, ...], result: torch.Tensor
    ) -> bool:  # fmt: skip
        """Notes a call that is like one before, with its value; whether it is."""
        try:
            value = item_of(result) if result.numel() == 1 and result.is_cpu else None
            if self.failed is not None or (value is not None and not math.isfinite(value)):
                return False
            kind = _kind(name, arguments)
            row = kind and recording.note(LossCall, (kind, recording.root, id(recording.innermost)), (value,))
        except BaseException as error:  # of a transform, whose tensors have no values
            if is_interruption(error):
                raise
            return False
        if row is not None:
            recording.loss_calls.append(row[1])
        return row is not None

    def _loss(
        self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], result: torch.Tensor
    ) -> None:  # fmt: skip
        """Notes a call with all that it has, or, where it is not sampled, with what calls of its kind have."""
        read, kind, root = self._wants_values(), _kind(name, arguments), self._current_root() or NO_ROOT
        facts = None if read or name in self._with_ignored else self._known.get(kind)
        if facts is not None and result.numel() == 1 and result.is_cpu:
            value = item_of(result)
            facts = facts | {"value": value} if math.isfinite(value) else None
        is_like = facts is not None
        if facts is None:
            facts = self._facts(name, function, arguments, result, root)
        entries = {"function": name, "module": root.name, "root": root.root, **facts}
        if is_like and (recording := self._recording) is not None:
            same, value = (kind, recording.root, id(recording.innermost)), entries.pop("value", None)
            recording.loss_calls.append(recording.note(LossCall, same, (value,), lambda: entries).at)
        else:
            file, line = user_place(3)
            self._emit(LossCall(file=file, line=line, **entries))

    def _facts(
        self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], result: torch.Tensor,
        root: CurrentRoot,
    ) -> dict[str, Any]:  # fmt: skip
        """All that a call says of itself; what is the same in others of its kind is remembered."""
        named, read = dict(zip(parameters_of(name), arguments, strict=True)), self._wants_values()
        with torch.no_grad():
            facts = facts_of_loss(name, named, result, root.args, root.kwargs, read=read)
            if read and result.numel() == 1:
                facts["guess"] = self._guesses.of(name, function, named)
        if facts.get("ignored", 0) > 0:
            self._with_ignored.add(name)  # how many they are has to be counted in each call
        kind = _kind(name, arguments)
        if kind is not None and kind not in self._known:
            if len(self._known) >= _MOST_KINDS:
                self._known.clear()
            counted = "items" if "ignored" in facts else ""
            self._known[kind] = {key: value for key, value in facts.items() if key in _ALWAYS and key != counted}
        if read and self._keep is not None and result.requires_grad:
            self._keep(root.root, name, named)
        return facts

    def dropout(self, name: str, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Calls a dropout; one that drops in another mode than its module's is told."""
        if torch.compiler.is_compiling() or is_jit_tracing():
            return function(*arguments)
        inside = self._inside
        if inside.depth:
            return function(*arguments)
        recording = self._recording
        if recording is not None and recording.innermost is None and (root := recording.running) is not None:
            is_usual = root.training == arguments[2]  # of an ordinary model, whose modules are in one mode
        else:
            is_usual = False
        if not is_usual and arguments[1] and type(arguments[0]) in _PLAIN and not in_backward():
            self._own(self._mode, name, arguments[1], bool(arguments[2]))
        inside.depth = 1
        try:
            return function(*arguments)
        finally:
            inside.depth = 0

    def _mode(self, name: str, p: float, training: bool) -> None:
        root = self._current_root() if self._recording is None or not self._recording.threads.elsewhere() else None
        if root is None or root.module is None or root.module.training == training:
            return
        module = _caller() or root.module  # reading a frame costs time, and is done for a mismatch only
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and self._is_new(module):
            module = root.module  # made for this call, and so in training mode whatever the model is in
        if module.training == training or isinstance(module, torch.nn.modules.dropout._DropoutNd):
            return
        file, line = user_place()
        self._emit(
            DropoutCall(
                root=root.root, module=root.name, function=name, p=float(p), training=training,
                root_training=module.training, file=file, line=line,
            )
        )  # fmt: skip

    def _is_new(self, module: torch.nn.Module) -> bool:
        """Whether no model has a module."""
        return self._numbering is not None and self._numbering.root_of(module) is None

    def _own(self, look: Callable[..., None], *args: Any) -> None:
        """Looks at a call; a fault in that does not reach the caller."""
        if self.failed is not None:
            return
        before = time.perf_counter()
        try:
            with nobody_looks() if is_watched() else nullcontext():
                look(*args)
        except BaseException as error:
            if is_interruption(error):
                raise
            self.failed = error
        self.seconds += time.perf_counter() - before


for _passed_over in (Calls.loss, Calls.dropout):  # by warnings, which then name the caller's line
    _passed_over.__code__ = _passed_over.__code__.replace(co_filename=HIDDEN)


def _kind(name: str, arguments: tuple[Any, ...]) -> Any:
    """What says all that is the same in two calls but for their values; ``None`` where that can't be told."""
    parts: list[Any] = [name]
    for position, one in enumerate(arguments):
        if isinstance(one, torch.Tensor):
            if position and one.grad_fn is not None:
                return None  # what it is made of may change
            parts += (one.shape, one.dtype)
        elif one is None or type(one) in _NUMBERS:
            parts.append(one)
        else:
            return None
    return tuple(parts)


def _caller() -> torch.nn.Module | None:
    """The module whose method calls, if it is one."""
    frame = inspect.currentframe()
    own = (__file__, F.__file__, HIDDEN)
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_varnames or frame.f_code.co_argcount == 0:
        return None
    first = frame.f_locals.get(frame.f_code.co_varnames[0])
    return first if isinstance(first, torch.nn.Module) else None
