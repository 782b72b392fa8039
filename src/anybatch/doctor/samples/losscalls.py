"""Sees calls of torch's loss functions and functional dropouts, and what a loss says of itself; results stay."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from anybatch.doctor.recording.patches import HIDDEN
from anybatch.doctor.recording.recordings import Depth
from anybatch.doctor.samples.guesses import Guesses, Targets
from anybatch.doctor.samples.walking import top
from anybatch.doctor.values import entries_of
from anybatch.records.events import DropoutCall
from anybatch.records.lines import Fact
from anybatch.records.lossfacts import Evaluated, LossCall
from anybatch.tensors.dispatch import unseen
from anybatch.torch_private import in_transform, is_jit_tracing, number_of_backward
from anybatch.userlines import OWN, user_place

if TYPE_CHECKING:
    from anybatch.doctor.recording.recordings import Recording

_COUNTED = 1 << 16  # targets up to which they are counted at each call on the host
_READ = 1 << 18  # entries of predictions that are looked at
_FEW = 1 << 10  # targets up to which Python counts the different ones faster
_MOST_TARGET_CLASSES = 1000
_MOST_SHIFTED = 3
_LEAST_COMPARED = 8
_OF_CLASSES = frozenset({"cross_entropy", "nll_loss", "multi_margin_loss"})
_OF_PROBABILITIES = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
_LABELS = frozenset({"labels", "label", "targets", "target", "y", "lm_labels"})


def facts_of_loss(
    name: str, given: Mapping[str, Any], result: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], *,
    read: bool,
) -> dict[str, Any]:  # fmt: skip
    """The entries of a ``LossCall``, without where it was called, after a root was called with some arguments."""
    first, *others = (value for value in given.values() if isinstance(value, torch.Tensor))
    target = given.get("target", given.get("targets", others[0] if others else first))
    first = first.detach()
    ignore = int(given.get("ignore_index", -100))
    facts: dict[str, Any] = {
        "input_shape": tuple(first.shape),
        "target_shape": tuple(target.shape),
        "reduction": _reduction(given),
        "weighted": isinstance(given.get("weight"), torch.Tensor) or isinstance(given.get("pos_weight"), torch.Tensor),
        "ignore_index": ignore,
        "target_requires_grad": bool(target.requires_grad and not target.is_leaf),
        "target_top": top(target.grad_fn),
    }
    target = target.detach()
    on_host = result.device.type == "cpu"
    dim = 1 if first.dim() > 1 else 0  # of the classes
    by_class = name in _OF_CLASSES and not target.is_floating_point()
    if name in _OF_CLASSES:
        facts["classes"] = int(first.shape[dim]) if first.dim() else 0
    try:
        if result.numel() == 1 and (on_host or read):
            facts["value"] = float(result.detach())
        if not by_class:
            facts["items"] = _count(first, target, dim if name in _OF_CLASSES else None)
        elif read or (on_host and (target.numel() <= _COUNTED or not math.isfinite(facts.get("value", 0.0)))):
            facts["ignored"] = int((target == ignore).sum())
            facts["items"] = target.numel() - facts["ignored"]
        if read and first.numel() and target.numel():
            all_count = by_class and not facts["ignored"]
            of_targets = _targets(target, None if all_count else ignore, by_class=by_class)
            facts |= _predictions(name, first, dim) | of_targets
            if name == "kl_div" and target.dim() and target.numel() <= _READ:
                facts["target_normalised"] = _are_distributions(target.exp() if given.get("log_target") else target)
            if by_class and name != "multi_margin_loss":
                found = [  # by how much they are ahead of tokens that the root was given, and of which of these
                    ahead | {"shifted": place}
                    for place, tokens in enumerate(tokens_of((args, kwargs)))
                    if tokens is not None and (ahead := ahead_of(target, ignore, tokens))
                ]
                facts |= min(found, key=lambda one: (one["shift"] != 1, one["shifted"]), default={})
    except (RuntimeError, NotImplementedError, TypeError):  # values of a transform such as vmap can't be read
        return facts
    return facts


def _reduction(given: Mapping[str, Any]) -> str:
    """As the arguments say it, those of long ago included."""
    if given.get("size_average") is None and given.get("reduce") is None:
        return str(given.get("reduction", "mean"))
    if given.get("reduce") is False:
        return "none"
    return "sum" if given.get("size_average") is False else "mean"


def _count(first: torch.Tensor, target: torch.Tensor, dim: int | None) -> int:
    if dim is not None and first.dim():
        return first.numel() // max(first.shape[dim], 1)
    if first.shape == target.shape:
        return first.numel()
    try:
        return int(torch.broadcast_shapes(first.shape, target.shape).numel())
    except RuntimeError:
        return first.numel()


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Evenly spaced rows of a large tensor."""
    if tensor.numel() <= _READ or tensor.dim() == 0:
        return tensor
    return tensor[:: max(1, -(-tensor.numel() // _READ))]


def _predictions(name: str, first: torch.Tensor, dim: int) -> dict[str, Any]:
    if not first.is_floating_point():
        return {}
    some = _some(first).float()
    found = list(some.aminmax())
    dim = -1 if name == "ctc_loss" else dim
    if (name in _OF_CLASSES or name == "ctc_loss") and first.shape[dim] > 1:
        found += [*some.sum(dim).aminmax(), *some.exp().sum(dim).aminmax()]
    low, high, *ends = torch.stack(found).tolist()
    facts: dict[str, Any] = {"low": low, "high": high}
    if name in _OF_PROBABILITIES:
        facts["normalised"] = low >= 0.0 and high <= 1.0
    elif ends:
        facts["normalised"] = low >= 0.0 and abs(ends[0] - 1.0) < 1e-2 and abs(ends[1] - 1.0) < 1e-2
        facts["log_normalised"] = high <= 1e-3 and abs(ends[2] - 1.0) < 1e-2 and abs(ends[3] - 1.0) < 1e-2
    return facts


def _are_distributions(target: torch.Tensor) -> bool:
    """Whether no entry is negative, and the sum over the last dim, or over dim 1, is 1 everywhere; of rows only."""
    if target.dim() < 2:
        return False
    low, *ends = torch.stack(
        [target.min(), *target.sum(-1).aminmax(), *target.sum(min(1, target.dim() - 1)).aminmax()]
    ).tolist()
    return low >= 0 and any(abs(ends[at] - 1) < 1e-2 and abs(ends[at + 1] - 1) < 1e-2 for at in (0, 2))


def _targets(target: torch.Tensor, ignore: int | None, *, by_class: bool) -> dict[str, Any]:
    """Of the targets that count, which are all where nothing is to be ignored."""
    found: dict[str, Any] = {}
    if by_class:  # in one row, in whose order the figures are summed up
        target = target.reshape(-1) if ignore is None else target[target != ignore]
    if not target.numel() or target.is_complex():
        return found
    if by_class:
        few = target.is_cpu and target.numel() <= _FEW
        different = len(set(target.tolist())) if few else int(torch.unique(target).numel())
        found["target_classes"] = min(different, _MOST_TARGET_CLASSES)
    deviation, mean = torch.std_mean((target if by_class else _some(target)).double(), correction=0)
    ends = () if by_class else [one.double() for one in target.aminmax()]
    entries = ("target_mean", "target_std", "target_low", "target_high")
    found |= zip(entries, torch.stack([mean, deviation, *ends]).tolist(), strict=False)
    return found


def ahead_of(target: torch.Tensor, ignore: int, tokens: torch.Tensor) -> dict[str, Any]:
    """How many places the targets are ahead of tokens; predictions are cut at the end, or to the last of a row."""
    for time_first in (False, True) if tokens.device == target.device else ():
        rows, length = reversed(tokens.shape) if time_first else tokens.shape
        width = target.numel() // rows
        if target.numel() % rows or not 0 < width <= length:
            continue
        wanted = target.reshape(width, rows).T if time_first else target.reshape(rows, width)
        given, start = tokens.T if time_first else tokens, length - width
        if start <= _MOST_SHIFTED:
            fitting, start = _fitting(wanted, ignore, given), int((wanted != ignore).any(0).byte().argmax())
        else:
            fitting = [
                one for one in _fitting(wanted, ignore, given[:, start:]) if one
            ]  # 0 may be a copy that is asked
        fitting = [one for one in fitting if one < 2 or not time_first]
        if len(fitting) > 1:
            return {}
        if fitting:
            return {"shift": fitting[0], "start": start, "time_first": time_first}
    return {}


def _fitting(wanted: torch.Tensor, ignore: int, tokens: torch.Tensor) -> list[int]:
    """By how many places the tokens may be ahead to be what is wanted."""
    fitting = []
    for shift in range(_MOST_SHIFTED + 1):
        overlap = min(wanted.shape[1], tokens.shape[1] - shift)
        if overlap < 1:
            break
        ours, theirs = wanted[:, :overlap], tokens[:, shift : shift + overlap]
        counted = ours != ignore
        compared, wrong = torch.stack([counted.sum(), (counted & (ours != theirs)).sum()]).tolist()
        if compared >= _LEAST_COMPARED and not wrong:
            fitting.append(shift)
    return fitting


def tokens_of(given: Any) -> Iterator[torch.Tensor | None]:
    """Matrices of whole numbers that a root is given, in order; ``None`` in the place of one named as labels."""
    for name, value in entries_of(given):
        if not isinstance(value, torch.Tensor):
            yield from (None if name in _LABELS else one for one in tokens_of(value))
        elif value.dim() == 2 and value.dtype in (torch.int64, torch.int32) and value.numel():
            yield None if name in _LABELS else value


LOSSES = (
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss"),
    *("smooth_l1_loss", "huber_loss", "kl_div", "gaussian_nll_loss", "poisson_nll_loss", "margin_ranking_loss"),
    *("hinge_embedding_loss", "triplet_margin_loss", "cosine_embedding_loss", "ctc_loss", "soft_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
)
_REGRESSIONS = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
DROPOUTS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, str, bool)
_SURELY = 3.0  # standard errors
_LOOKED_AT = 3  # evaluations whose targets are looked at, since the later ones have the same
_ALWAYS = frozenset({"input_shape", "target_shape", "reduction", "weighted", "ignore_index", "classes", "items"})


class CurrentRoot(NamedTuple):
    """The root that is running, or ran last."""

    root: int = -1
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    name: str = ""  # of the innermost module that is running, empty outside
    # that module, or the root itself where it is not known; ``None`` where nothing runs
    module: torch.nn.Module | None = None


NO_ROOT = CurrentRoot()
_MOST_CLASSES = 50
_MOST_NAMES = 3
_compiler = vars(torch.compiler)  # of which a flag is read in each step, as ``is_compiling`` reads it in two calls


@functools.cache
def parameters_of(name: str) -> tuple[str, ...]:
    """The names of the parameters of one of ``torch.nn.functional``."""
    return tuple(inspect.signature(getattr(F, name)).parameters)


class Calls:
    """Sees the calls, and says what they were.

    The functions keep their identity and their signature, see ``Patches``; within another one, or a recomputation, a
    call is not counted.

    Args:
        emit: takes the facts that are recorded in full.
        keep: is given the number of the root, the name and the arguments of calls whose values are read.
    """

    def __init__(
        self, recording: "Recording", emit: Callable[[Fact], Any], current_root: Callable[[], CurrentRoot | None],
        keep: Callable[[int, str, dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self._recording, self._emit, self._current_root, self._keep = recording, emit, current_root, keep
        self._kinds: set[Any] = set()  # of calls that were recorded in full
        self._dropped: set[int] = set()  # ids of models in training mode of which a dropout was seen
        self._with_ignored: set[str] = set()
        self._guesses = Guesses()
        self._evaluation: list[Any] = []  # name, line, how many losses, and their sum
        self._targets: Targets | None = None  # of that evaluation
        self._first: dict[str, Any] = {}  # what its first call says of all
        self._evaluations = 0

    def attach(self) -> None:
        """Has the calls seen; ``Recording.patches`` ends it."""
        recording, depth = self._recording, Depth()
        for name in LOSSES:
            note = functools.partial(self._loss, name)
            seen = recording.around(None, note, "looks", when=_is_run, outermost=depth)
            recording.patches.wrap(F, name, seen)
        for name in DROPOUTS:
            recording.patches.wrap(F, name, self._dropping(name))

    def _loss(self, name: str, first: torch.Tensor, others: tuple[Any, ...], result: Any) -> None:
        """Notes a call: as one before, with its value; with all that it has; or with what calls of its kind have."""
        if not torch.is_grad_enabled():
            if type(result) in _PLAIN and result.numel() == 1:
                self._evaluated(name, first, others, result)
            return
        if self._evaluation:
            self.end_evaluation()
        is_plain = type(first) in _PLAIN and type(others[0]) in _PLAIN and not first.is_meta
        if not is_plain or not isinstance(result, torch.Tensor):
            return
        recording, arguments = self._recording, (first, *others)
        try:
            value = result.item() if result.numel() == 1 and result.is_cpu else None
        except RuntimeError:  # of a transform, whose tensors have no values
            value = None
        kind = None
        if not (recording.sampled_much or name in self._with_ignored or (value is not None and value - value != 0)):
            kind = _kind(name, arguments)
        same = kind, recording.root, id(recording.innermost)
        noted = None if kind is None else recording.note(LossCall, same, (value,))
        if noted is None:
            root = self._current_root() or NO_ROOT
            facts = self._facts(name, arguments, result, root)
            told: dict[str, Any] = {"function": name, "module": root.name, "root": root.root}
            if kind is None or kind not in self._kinds:
                self._kinds.add(_kind(name, arguments))
                file, line = user_place(3)
                self._emit(LossCall(file=file, line=line, **told, **facts))
                return
            always = _ALWAYS - {"items"} if "ignored" in facts else _ALWAYS  # how many they are may change
            told |= {key: one for key, one in facts.items() if key in always}
            noted = recording.note(LossCall, same, (value,), lambda: told)
        recording.loss_calls.append(noted[1] if isinstance(noted, list) else noted.at)

    def _evaluated(self, name: str, first: torch.Tensor, others: tuple[Any, ...], result: torch.Tensor) -> None:
        """Adds a loss without a gradient, of a model in evaluation; it is read when the training goes on."""
        models, number = self._recording.numbering.models, self._recording.root
        model = models[number].module() if 0 <= number < len(models) else None
        if model is None or model.training:
            return
        self._keep(number, name, {"target": others[0]})
        value = result.item() if result.device.type == "cpu" else result.detach()
        if self._evaluation and self._evaluation[0] != name:
            self.end_evaluation()
        counts = _confused(name, first, others[0])
        if self._evaluation:
            before = self._evaluation[4]
            both = before is not None and counts is not None and before.shape == counts.shape
            self._evaluation[2:] = (
                self._evaluation[2] + 1,
                self._evaluation[3] + value,
                before + counts if both else None,
            )
        else:
            self._evaluation = [name, user_place(3), 1, value, counts]
            both = [one for one in (first, others[0]) if isinstance(one, torch.Tensor) and name not in _OF_CLASSES]
            shapes = tuple(tuple(one.shape) for one in both)
            self._first = {"scales": _scales_of(name, first, others[0]), "shapes": shapes}
            self._targets = Targets(name) if self._evaluations < _LOOKED_AT else None
            self._evaluations += 1
        if self._targets is not None and not self._targets.add(first, others):
            self._targets = None

    def end_evaluation(self) -> None:
        """Writes down what the losses of an evaluation were on average."""
        if self._evaluation:
            (name, (file, line), count, total, counts), self._evaluation = self._evaluation, []
            known = self._targets.facts() if self._targets is not None else {}
            known |= _renamed(counts) | self._first
            known["better"] = known.get("better", False) or _tells_apart(counts)
            self._emit(Evaluated(function=name, value=float(total) / count, calls=count, file=file, line=line, **known))

    def _facts(
        self, name: str, arguments: tuple[Any, ...], result: torch.Tensor, root: CurrentRoot
    ) -> dict[str, Any]:  # fmt: skip
        """All that a call says of itself."""
        named, read = dict(zip(parameters_of(name), arguments, strict=True)), self._recording.sampled_much
        with torch.no_grad():
            facts = facts_of_loss(name, named, result, root.args, root.kwargs, read=read)
            if read and result.numel() == 1:
                facts["guess"] = self._guesses.of(name, getattr(F, name), named)
                facts["absent"] = self._guesses.absent
        if facts.get("ignored", 0) > 0:
            self._with_ignored.add(name)  # how many they are has to be counted in each call
        if read and result.requires_grad:
            self._keep(root.root, name, named)
        return facts

    def _dropping(self, name: str) -> Callable[[Any], Any]:
        recording, note = self._recording, self._recording.guarded(functools.partial(self._mode, name))
        is_traced = torch.compiler.is_dynamo_compiling

        def make(original: Any) -> Callable[..., Any]:
            def dropout(first: Any, /, *others: Any) -> Any:
                if is_traced():
                    return original(first, *others)
                root = recording.running
                is_usual = recording.innermost is None and root is not None and root.training == others[1]
                is_usual = is_usual and (not others[1] or id(root) in self._dropped)
                if not is_usual and others[0] and type(first) in _PLAIN and _is_run():
                    note(*others[:2])
                return original(first, *others)  # mostly of an ordinary model, whose modules are in one mode

            return dropout

        return make

    def _mode(self, name: str, p: float, training: Any) -> None:
        """Tells a dropout that drops in another mode than its module's, and of each model the first that follows it."""
        training, root = bool(training), None if self._recording.threads.elsewhere() else self._current_root()
        if root is None or root.module is None:
            return
        follows, key = root.module.training == training, id(self._recording.running)
        if follows and (not training or key in self._dropped):
            return
        self._dropped |= {key} if follows else set()
        module = _caller() or root.module  # reading a frame costs time, and is done for a mismatch only
        is_new = self._recording.numbering.root_of(module) is None
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and is_new:
            module = root.module  # made for this call, and so in training mode whatever the model is in
        if (module.training == training) != follows or isinstance(module, torch.nn.modules.dropout._DropoutNd):
            return
        file, line = user_place()
        self._emit(
            DropoutCall(
                root=root.root, module=root.name, function=name, p=float(p), training=training,
                root_training=module.training, file=file, line=line,
            )
        )  # fmt: skip


def _is_run(*_: Any) -> bool:
    """Whether what is called is run as part of a forward, and not looked at by a compiler or run once more."""
    return not (_compiler.get("_is_compiling_flag") or is_jit_tracing() or in_transform()) and number_of_backward() < 0


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
    while frame is not None and (
        frame.f_code.co_filename == F.__file__ or frame.f_code.co_filename.startswith((HIDDEN, OWN))
    ):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_varnames or frame.f_code.co_argcount == 0:
        return None
    first = frame.f_locals.get(frame.f_code.co_varnames[0])
    return first if isinstance(first, torch.nn.Module) else None


@unseen
def _confused(name: str, scores: Any, target: Any) -> torch.Tensor | None:
    """For each class how many of its rows were given most to each class; nothing where there are no classes."""
    is_known = name in ("cross_entropy", "nll_loss") and type(scores) in _PLAIN and type(target) in _PLAIN
    if not is_known or scores.dim() != 2 or target.dim() != 1 or not scores.is_cpu or target.dtype != torch.int64:
        return None
    classes = scores.shape[1]
    if not 1 < classes <= _MOST_CLASSES or len(scores) != len(target):
        return None
    pairs = scores.argmax(1).add_(target.clamp(-1, classes) + 1, alpha=classes)  # what is no class comes first and last
    counts: torch.Tensor = pairs.bincount(minlength=(classes + 2) * classes)
    return counts.reshape(-1, classes)[1:-1]


@unseen
def _scales_of(name: str, made: Any, target: Any) -> tuple[float, ...]:
    """Mean and standard deviation of predictions and of their targets; nothing where they are no regression's."""
    both = (made, target)
    if name not in _REGRESSIONS or any(type(one) not in _PLAIN or not one.is_cpu for one in both):
        return ()
    if made.shape != target.shape or made.numel() < 2 or not all(one.is_floating_point() for one in both):
        return ()
    found = (torch.std_mean(one.detach().double()) for one in both)
    return tuple(float(one) for std, mean in found for one in (mean, std))


@unseen
def _tells_apart(counts: torch.Tensor | None) -> bool:
    """Whether of each class, on average over them, more rows are right than where the same is always said.

    Of rare classes that a training draws as often as others, or weighs as much, too much is said on purpose.
    """
    if counts is None:
        return False
    there = counts.sum(1) > 0
    rows, right = counts.sum(1)[there].double(), counts.diagonal()[there].double()
    classes, share = len(rows), (right + 1) / (rows + 2)
    error = float((share * (1 - share) / rows).sum().sqrt()) / max(classes, 1)
    return classes > 1 and float((right / rows).mean()) > 1 / classes + _SURELY * error


@unseen
def _renamed(counts: torch.Tensor | None) -> dict[str, Any]:
    """How many rows are right, and how many are if a target means the class that most of its rows are given to."""
    if counts is None or not int(counts.sum()):
        return {}
    rows, given = int(counts.sum()), counts.sum(1) > 0
    named = counts.argmax(1)[given]
    best = float(counts.max(1).values.sum()) / rows if len(named.unique()) == len(named) else 0.0
    names = [(int(one), int(other)) for one, other in zip(given.nonzero()[:, 0], named, strict=True) if one != other]
    return {"rows": rows, "right": float(counts.trace()) / rows, "renamed": best, "names": tuple(names[:_MOST_NAMES])}
