"""Follows one iteration of a run operation by operation where there is a reason, and tells what was seen."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from anybatch.doctor.following import Follower, Subject, explained
from anybatch.doctor.recording.modes import SafeMode
from anybatch.doctor.sites import Running
from anybatch.records.lossfacts import Followed, Walk
from anybatch.torch_private import has_compiled

if TYPE_CHECKING:
    from anybatch.doctor.recording.numbering import Numbering

_MOST_OPERATIONS = 50_000
_MOST_SECONDS = 20.0
FUSED = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
"""Modules that out of training call fused functions only where no mode is on; the last bits of these differ."""


class SafeFollower(SafeMode, Follower):
    """A follower that lets the run go on."""

    beside = frozenset({"DeviceContext", "Tape"})

    def __init__(self, subject: Subject, running: Running) -> None:
        super().__init__(subject.bits, running, lambda tensor: None)
        self.hidden = False  # whether a reentrant checkpoint was met, whose inside is not looked at
        self._hooks = ExitStack()
        self._operations, self._end = 0, time.monotonic() + _MOST_SECONDS

    def start(self) -> bool:
        """Also hangs the hooks."""
        was_off = self._off
        if (is_on := super().start()) and was_off:
            self._hooks.enter_context(self._running.attached())
            self._hooks.callback(register_module_forward_pre_hook(self._before).remove)
        return is_on

    def stop(self) -> bool:
        """Also takes the hooks off."""
        self._hooks.close()
        return super().stop()

    def before(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """Gives up where it takes long."""
        self._operations += 1
        if self._operations > _MOST_OPERATIONS or time.monotonic() > self._end:
            self.give_up("the iteration is too long")
            return None
        return super().before(func, args, kwargs)

    def _look_inside(self, node: Any) -> int:
        self.hidden = True  # running it again would write to buffers
        return 0

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, FUSED) and not module.training and not torch.is_grad_enabled() and not self._off:
            self.give_up("a mode changes what it computes")
            self.stop()


_LEAST_STEPS = 2
_MOST_BACKWARDS = 4  # of one iteration
_MOST_OF_OTHERS = 16  # where that of an optimizer is waited for, before which another one may step several times
_ON_PURPOSE = frozenset({"unused", "no_grad", "inference_mode"})
"""Why a loss of another network does not reach parameters: their own loss may come later in the iteration."""


class Suspicion:
    """Follows an iteration when something in the graph was missing before."""

    def __init__(self, numbering: "Numbering") -> None:
        self._numbering = numbering
        self._follower: SafeFollower | None = None
        self._subject = Subject({}, {}, {})
        self._running = Running({})
        self._why = ""  # of what is being followed, empty where nothing is
        self._suspects: frozenset[str] = frozenset()
        self._mates: frozenset[str] = frozenset()
        self._owners: frozenset[int] = frozenset()  # optimizers whose own loss is waited for
        self._latest: Followed | None = None  # of the losses since the last step
        self._asked: set[str] = set()
        self._again = False  # whether a number of NumPy was a term, which is followed twice: it may be any constant
        self._candidate: Followed | None = None
        self._left: list[SafeFollower] = []
        self._seconds = 0.0
        self._steps = self._backwards = 0

    @property
    def is_busy(self) -> bool:
        """Whether it has to be notified of each step."""
        return bool(self._why or self._left) or self._steps < _LEAST_STEPS

    @property
    def seconds(self) -> float:
        """What following took beside the operations themselves."""
        return (
            self._seconds
            + sum(follower.seconds for follower in self._left)
            + (self._follower.seconds if self._follower is not None else 0.0)
        )

    def after_step(self, walks: Sequence[Walk], never_had_grad: Sequence[int], stepped: int = -1) -> Followed | None:
        """Begins to follow where there is a reason; tells of the last loss before this step if that was waited for."""
        self._steps += 1
        if not (walks or never_had_grad or self._why or self._left):
            return None
        if self._left:
            self._leave()
        if self._why:
            found, self._latest = self._latest, None
            if found is not None and stepped in self._owners:
                self.stop()
                return found
            self._begin()  # anew, since the step has written to what was followed
            return None
        suspects = frozenset(never_had_grad)
        reasons = {  # each is followed once, one may be twice: four iterations
            "loss without graph": any(walk.forced for walk in walks),
            "no gradient": bool(suspects) and self._steps >= _LEAST_STEPS,
            "constant term": any(walk.constant_terms for walk in walks),
        }
        why = next((one for one, is_there in reasons.items() if is_there and one not in self._asked), "")
        if why:
            self._asked.add(why)
            self._suspects = frozenset(self._numbering.name(number) for number in suspects)
            self._mates, self._owners = self._mates_of(suspects)
            self._owners = self._owners if why == "no gradient" else frozenset()
            self._why, self._backwards, self._candidate, self._latest = why, 0, None, None
            self._begin()
        return None

    def _mates_of(self, suspects: frozenset[int]) -> tuple[frozenset[str], frozenset[int]]:
        """Names of other parameters of the suspects' optimizers, which tell their loss from others.

        Where there are none, and other optimizers, the numbers of the suspects' own, whose step is waited for.
        """
        mates: set[int] = set()
        owners: set[int] = set()
        others = 0
        for number, _ in self._numbering.optimizers():
            groups = self._numbering.optimizer_table(number).groups
            own = {parameter for group in groups for parameter in group.parameters}
            if own & suspects:
                mates |= own - suspects
                owners.add(number)
            else:
                others += 1
        waits = others and not mates
        return frozenset(map(self._numbering.name, mates)), frozenset(owners if waits else ())

    def _begin(self) -> None:
        self._leave()
        if has_compiled():
            self.stop()
            return
        tracked = self._numbering.tracked()
        parameters = {self._numbering.name(number): tensor for number, tensor in tracked}
        modules: dict[str, torch.nn.Module] = {}
        for model in self._numbering.models:
            for _, module, _ in model.modules():
                modules.setdefault(self._numbering.module_name(module), module)
        bits = {id(tensor): 1 << position for position, tensor in enumerate(parameters.values())}
        self._subject, self._running = Subject(parameters, modules, bits), Running(modules)
        follower = SafeFollower(self._subject, self._running)
        if follower.start():
            self._follower = follower
        else:
            self.stop()

    def before_backward(self, loss: torch.Tensor) -> Followed | None:
        """What was followed, if this loss shows what was missing; the mode is left for the time of the backward."""
        follower = self._follower
        if follower is None:
            return None
        follower.stop()
        self._backwards += 1
        try:
            found, is_it = self._followed(loss, follower) if not follower.failed else (None, True)
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError):  # of tensors of a transform
            found, is_it = None, True
        if self._owners and is_it and found is not None:
            self._latest = self._candidate = found
            is_it = False
        self._candidate = self._candidate or found
        if is_it or self._backwards >= (_MOST_OF_OTHERS if self._owners else _MOST_BACKWARDS):
            found = found if is_it else self._candidate
            self.stop()
            return found
        return None

    def after_backward(self) -> None:
        """Goes on with the rest of the iteration where the loss before was not the one in question."""
        if self._follower is not None and not self._follower.start():
            self.stop()

    def stop(self) -> None:
        """Ends following without a result, as at the end of a run; may be called at any time."""
        self._leave()
        self._why, self._candidate, self._latest = "", None, None
        self._subject, self._running = Subject({}, {}, {}), Running({})

    def _leave(self) -> None:
        """Leaves the mode, and those of before that lay under a mode of somebody else."""
        if self._follower is not None:
            self._left.append(self._follower)
        self._follower = None
        left = [follower for follower in self._left if follower.stop()]
        self._seconds += sum(follower.seconds for follower in left)
        self._left = [follower for follower in self._left if follower not in left]

    @torch.no_grad()
    def _followed(self, loss: torch.Tensor, follower: SafeFollower) -> tuple[Followed, bool]:
        """What was seen of a loss, and whether something was missing in this one."""
        subject = self._subject
        mask = follower.graph.of(loss)
        if follower.hidden:  # what a checkpoint hides has had a gradient, or it is suspected
            for name, parameter in subject.parameters.items():
                mask |= 0 if name in self._suspects else subject.bits[id(parameter)]
        paths = explained({"": loss}, subject, follower, self._running, mask, cuts=True)
        leaves, stopped = paths.leaves, paths.stopped
        unused = tuple(name for name, stop in stopped.items() if stop.op == "unused")
        if self._why == "constant term":
            is_it = any(not (term.has_gradient and term.parameters) for term in paths.terms) or not paths.reached
            if not self._again and any(term.op == "numpy" and term.stopped for term in paths.terms):
                self._again = True
                self._asked.discard(self._why)
        elif self._why == "loss without graph":
            is_it = loss.grad_fn is None
        else:
            known = [name for name in self._mates if name in leaves]
            suspected = [stopped[name].op for name in self._suspects if name in stopped]
            telling = any(op not in _ON_PURPOSE for op in suspected) or not suspected
            is_it = any(leaves[name].reached for name in known) if known else telling
        return Followed(why=self._why, paths=paths.to_dict(), unused=unused), is_it
