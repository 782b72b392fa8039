"""The recorder: observes a run by global hooks and records it as facts."""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from anybatch.accelerators import in_use, name_of
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.live import AfterStep, Telling
from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_backward import BackwardHooks
from anybatch.doctor.recording.hooks_forward import ForwardHooks
from anybatch.doctor.recording.hooks_optimizers import ClippingHooks, OptimizerHooks, ScalingHooks
from anybatch.doctor.recording.hooks_schedules import LoaderHooks, LoadingHooks, ScheduleHooks
from anybatch.doctor.recording.journal import Counter, Journal
from anybatch.doctor.recording.printing import PrintedNumbers
from anybatch.doctor.recording.recordings import EVERY, FIRST, Recording, Sampling
from anybatch.doctor.recording.samplers import Samplers
from anybatch.interception import watchers
from anybatch.records.events import Crashed, Ended
from anybatch.records.lines import Fact, to_line
from anybatch.records.runs import Run
from anybatch.records.tables import Started

if TYPE_CHECKING:
    from anybatch.records.diagnoses import Diagnosis
    from anybatch.records.findings import Finding

_LONGEST = 2000
_LONGEST_WINDOW = 512
"""Backwards before the first step of an optimizer that is there, after which they count as steps themselves."""
_ENTERING = 6e-6
"""Seconds that a fact costs beside what its hook sees of itself: being called, and what it drives out of the caches.

As measured with steps of 0.3 ms: what a step took longer, less what the hooks had counted, over its five facts.
"""
MAX_BYTES = 64 * 2**20
"""The size that a record has at most, but for rare facts."""


class Doctor:
    """Records what a training run does, and says what is wrong with it.

    It observes by global hooks, which ``detach`` and the end of ``with`` remove. The run is bitwise the same with and
    without it. When the hooks are removed, it puts questions to copies of the models, unless Ctrl-C or ``sys.exit``
    is ending the run; weights, gradients, random state and what the models reach in Python stay as they are.

    Args:
        subjects: models and optimizers; others are found when they are used.
        path: a file of JSON lines, written during the run; without one the facts stay in memory.
        max_bytes: the size of the record after which only rare facts are recorded.
        every: steps between two samples, ``None`` for 25; the first ten steps are all sampled.
        script: the path of the script, for the head of the record.
        arguments: the script's arguments.
        on_finding: is called with each error and warning that is no consequence of another one, during the run or at
            its end; its exceptions end the run.
        ask: whether to put the questions.
        active: whether to put those as well that train a copy on its last batch.
        seconds: after these no further question is put.

    Attributes:
        numbering: the numbers of parameters, models, optimizers and schedulers.
        answers: puts the questions, and gives the answers as facts.

    Raises:
        TypeError: a subject is neither a module nor an optimizer.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with Doctor(model, optimizer) as doctor:
        ...     model(torch.ones(4, 2)).mean().backward()
        ...     optimizer.step()
        >>> doctor.run.steps, [facts.cls for facts in doctor.run.optimizers.values()]
        (1, ['SGD'])
    """

    _after_step: AfterStep | None = None
    _asked = -1  # the number of the last fact when questions were put last

    def __init__(
        self,
        *subjects: Any,
        path: str | Path | None = None,
        max_bytes: int = MAX_BYTES,
        every: int | None = None,
        script: str = "",
        arguments: Sequence[str] = (),
        on_finding: "Callable[[Finding], None] | None" = None,
        ask: bool = True,
        active: bool = False,
        seconds: float = 20.0,
    ) -> None:
        for subject in subjects:
            if not isinstance(subject, (torch.nn.Module, torch.optim.Optimizer)):
                raise TypeError(
                    f"got a {type(subject).__name__}; expected modules and optimizers. Write Doctor(model, optimizer)"
                )
        counter = Counter()
        self._journal = Journal(counter, None if path is None else Path(path), max_bytes)
        self._sampling = Sampling(every or EVERY)
        self._recording = recording = Recording(self._journal, counter, self._sampling)
        self.numbering = recording.numbering
        self._gradients = Gradients(recording.numbering)
        self._samplers = Samplers(recording)
        self._forward = ForwardHooks(recording, self._samplers)
        self._backward = BackwardHooks(recording, self._gradients, self._samplers, self._went_back)
        self._optimizers = OptimizerHooks(recording, self._gradients, self._samplers, self._next)
        scaling = ScalingHooks(recording, self._gradients, self._optimizers)
        self._others = (
            scaling,
            ClippingHooks(recording, self._gradients, scaling),
            ScheduleHooks(recording, self._optimizers, self.kept.schedules),
            LoaderHooks(recording, self._samplers.kept.loader),
            LoadingHooks(recording, self._optimizers),
        )
        self._printed = PrintedNumbers(recording)
        recording.threads.taken = self._forward.forget_running
        self._subjects = subjects
        self._backwards = self._away = self._aside = 0
        self._announced: set[int] = set()
        self._attached = False
        self._ended = False
        self._started = time.perf_counter()
        self._seconds = self._asked_seconds = 0.0
        self._head = (script, tuple(arguments))
        self._telling = None if on_finding is None else Telling(self, on_finding)
        self.kept.on = ask
        self.answers: Callable[[], Iterable[Fact]] = lambda: _answers(self, active=active, seconds=seconds)

    def attach(self) -> None:
        """Adds the hooks; does nothing if they are there."""
        if self._attached:
            return
        self._attached, self._process = True, os.getpid()
        started = self._started = time.perf_counter()
        if self._journal.counter.at < 0:
            self._journal.emit(_head(*self._head))
        self._recording.active = True
        self._recording.sampled = self._sampling.wants(self._recording.counter.step)
        try:
            self._backward.attach()
            self._optimizers.attach()
            for hooks in self._others:
                hooks.attach()
            self._printed.attach()
            self._samplers.attach()
            self._forward.attach()
            self._forward.search(self._recording.sampled)
        except BaseException:
            self._remove()
            raise
        watchers.append(self)
        if self._telling is not None:
            self._after_step = AfterStep(self, self._telling)
        subjects, self._subjects = self._subjects, ()
        self._recording.own += time.perf_counter() - started
        for subject in subjects:
            self._recording.guarded(self._follow)(subject)

    def follow(self, *subjects: Any) -> None:
        """Attaches the doctor if necessary, and adds models and optimizers; ``TrainStep(recorder=...)`` calls this.

        Args:
            subjects: models and optimizers.
        """
        self.attach()
        for subject in subjects:
            self._recording.guarded(self._follow)(subject)

    def announced(self, *subjects: Any) -> None:
        """Called by a step with what it trains before it runs, so that names are known wherever the step was made."""
        if not self._announced.issuperset(map(id, subjects)):
            self._announced.update(map(id, subjects))
            for subject in subjects:
                self._recording.guarded(self._follow)(subject)

    def look_away(self) -> None:
        """Stops recording until ``look_again``, while anybatch runs something that is not a training step."""
        self._away += 1
        if self._away == 1:
            self._recording.look_away()

    def look_again(self) -> None:
        """Resumes recording."""
        self._away -= 1
        if not self._away:
            self._recording.look_again()

    def takes_gradients(self) -> None:
        """Called when anybatch puts gradients aside, which is not a ``zero_grad``."""
        self._aside += 1
        if self._aside == 1:
            self._backward.takes()

    def gave_gradients(self, items: float) -> None:
        """Called when the gradients are back, with the new ones added, and the weight of what was added."""
        self._aside -= 1
        if not self._aside:
            self._backward.gave(items)

    def __call__(self, step: Any, result: Any) -> None:
        """Does nothing: the hooks saw the logical batch. It makes the doctor an ``Observer``."""

    def detach(self, *, ask: bool = True) -> None:
        """Removes all hooks, and puts the questions. Facts can still be added. Does nothing if there are no hooks.

        Args:
            ask: whether to put the questions, if the doctor does so at all.
        """
        if self._attached:
            self._remove()
            started = time.perf_counter()
            if ask and self._may_ask():
                for fact in [*self.answers()]:  # nothing is recorded while a copy runs
                    self.emit(fact)
                self._asked = self._journal.counter.at
                self._asked_seconds += time.perf_counter() - started

    def _may_ask(self) -> bool:
        """Whether there is something new to ask, and time for it: not on the way out, nor in the copy of a process."""
        is_leaving = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
        is_ours = os.getpid() == self._process and not self._recording.threads.is_over
        return self.kept.on and self._journal.counter.at > self._asked and is_ours and not is_leaving

    def _remove(self) -> None:
        self._attached = False
        started = time.perf_counter()
        if self in watchers:
            watchers.remove(self)
        if self._after_step is not None:
            self._after_step.detach()
        self._recording.take_in()
        self._printed.detach()
        self._forward.detach()
        self._samplers.detach()
        self._recording.patches.restore()
        self._recording.active = False
        self._journal.flush()
        now = time.perf_counter()
        self._recording.own += now - started
        self._seconds += now - self._started

    def emit(self, fact: Fact) -> int:
        """Adds a fact.

        Args:
            fact: a fact of any kind; its number and step are set.

        Returns:
            The number.
        """
        return self._recording.emit(fact)

    def close(self, exit_code: int | None = None) -> None:
        """Removes the hooks, puts the questions, records the end, and calls ``on_finding`` with what is left to report.

        Args:
            exit_code: the exit code of the script; ``None`` if it is not known.
        """
        try:
            self.detach()
        finally:  # Ctrl-C ends the questions
            is_first, self._ended = not self._ended, True
            if is_first:
                self._journal.close(
                    Ended(
                        exit_code=exit_code, seconds=self._seconds, own_seconds=self._own(),
                        asked_seconds=self._asked_seconds, dropped=self._journal.dropped,
                        thinned=self._sampling.thinned, failure=self.failure,
                    )
                )  # fmt: skip
        if is_first and self._telling is not None:
            self._telling.tell(self.step, has_ended=True)

    def __enter__(self) -> "Doctor":
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            from anybatch.doctor.crashes import explain

            crashed = self._recording.guarded(explain)(error, self)
            self.emit(crashed or Crashed(name="", error=type(error).__name__, text=str(error)[:_LONGEST]))
        self.close()

    @property
    def run(self) -> Run:
        """All facts that were recorded so far."""
        return self._journal.run()

    @property
    def findings(self) -> "tuple[Finding, ...]":
        """The findings so far, in order of rank."""
        from anybatch.doctor.diagnosing import diagnose

        return diagnose(self.run)

    def report(self, path: str | Path | None = None) -> "Diagnosis":
        """The diagnosis of what was recorded so far.

        Args:
            path: a file for the HTML page; ``None`` for none.

        Returns:
            The diagnosis.
        """
        from anybatch.doctor.diagnosing import diagnosis

        found = diagnosis(self.run)
        if path is not None:
            Path(path).write_text(self._page(found), encoding="utf-8")
        return found

    def _page(self, found: "Diagnosis") -> str:
        from anybatch.report.diagnosis_page import page

        return page(found, self.run)

    def _repr_html_(self) -> str:
        from anybatch.report.notebook import framed

        return framed(self._page(self.report()))

    def show(self) -> None:
        """Shows the diagnosis: as a page in a notebook, as text elsewhere."""
        if "ipykernel" in sys.modules:
            from IPython.display import display

            display(self)  # type: ignore[no-untyped-call]
            return
        from rich.console import Console

        from anybatch.report.diagnosis_terminal import show

        show(self.report(), self.run, Console(highlight=False))

    @property
    def step(self) -> int:
        """The number of steps of the optimizer that stepped most; of backwards, if no optimizer is known."""
        return self._recording.counter.step

    @property
    def not_finite(self) -> bool:
        """Whether a non-finite number was seen."""
        return self._samplers.nonfinite.found

    @property
    def lost(self) -> str:
        """Why the record is incomplete; empty if it is not."""
        return self._journal.lost

    @property
    def failure(self) -> str:
        """The first error of the recorder itself; empty if there was none."""
        return self._recording.failure or self._journal.lost

    @property
    def facts(self) -> list[Fact]:
        """All facts so far, in order."""
        return self.run.facts

    @property
    def last_inputs(self) -> dict[int, tuple[torch.nn.Module, Any, Any]]:
        """By the number of each model that ran last: the model, and its arguments in its last forward with gradient."""
        return self._samplers.last_inputs

    @property
    def kept(self) -> Kept:
        """The objects kept for the questions after the run."""
        return self._samplers.kept

    def save(self, path: str | Path) -> None:
        """Writes the record as lines of JSON.

        Args:
            path: the file.
        """
        Path(path).write_text("".join(f"{to_line(fact)}\n" for fact in self.run.facts), encoding="utf-8")

    def _follow(self, subject: Any) -> None:
        if isinstance(subject, torch.nn.Module):
            if any(is_lazy(one) for one in subject.parameters()):
                return  # it is found when it is called
            self.numbering.root(subject)
            self._forward.follow(subject)
        elif isinstance(subject, torch.optim.Optimizer):
            self._optimizers.numbered(subject)

    def _went_back(self) -> None:
        """After each backward, which stands for a step where nothing steps that torch knows.

        Where there is an optimizer, many of them may be of the micro-batches of its first step.
        """
        self._backwards += 1
        first = _LONGEST_WINDOW if self._optimizers.is_any_known else FIRST
        if self._recording.counter.step == 0 and not self._aside and self._backwards > first:
            self._samplers.next_step()
            self._next(self._backwards)

    def _next(self, step: int) -> None:
        """After each step: what the next one records."""
        recording, sampling, was = self._recording, self._sampling, self._recording.sampled
        if step % sampling.every and step >= FIRST and not was:
            recording.looks = self._samplers.is_following
            if self._journal.due():
                self._write()
            return
        total = self._seconds + time.perf_counter() - self._started
        sampling.review(step, own=self._own(), total=total, sampled=was)
        recording.sampled = sampling.wants(step)
        recording.sampled_much = recording.sampled and sampling.wants_much(step)
        recording.sampled_all = sampling.wants_all(step)
        recording.looks = recording.sampled or self._samplers.is_following
        self._forward.search(recording.sampled)
        if step == FIRST:
            self._forward.follow_copies()
        if (was and step <= FIRST) or self._journal.due():  # what kills a process often does so in its first steps
            self._write()
        self._gradients.arrange()

    def _write(self) -> None:
        """Writes the record, in time that is counted."""
        started = time.perf_counter()
        self._journal.flush()
        self._recording.own += time.perf_counter() - started

    def _own(self) -> float:
        """Seconds that the doctor has taken."""
        entered = _ENTERING * max(0, self._journal.counter.at)
        return self._recording.own + self._samplers.seconds + entered


def _answers(doctor: Doctor, *, active: bool, seconds: float) -> Iterator[Fact]:
    from anybatch.doctor.ask.asking import probes  # loads all questions

    yield from probes(doctor, active=active, seconds=seconds)


def _head(script: str, arguments: tuple[str, ...]) -> Started:
    return Started(
        script=script, arguments=arguments, torch=torch.__version__, python=platform.python_version(),
        device=name_of(in_use()), time=time.time(),
    )  # fmt: skip
