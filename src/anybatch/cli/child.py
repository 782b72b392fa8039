"""What ``anybatch check``, ``plan`` and ``tune`` do in the process of the user's script: stop it at its first steps."""

import atexit
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from anybatch import interception
from anybatch.cli import edited
from anybatch.cli.doctor_child import TorchFinder
from anybatch.cli.options import INTERRUPTED
from anybatch.cli.plan_loops import FoundStep, LoopWatch, users_frame
from anybatch.cli.script import ONLY_RANK, RESULT
from anybatch.units import at_lines

_PACKAGE = str(Path(__file__).parents[1])
_RATED = 8  # batches of the range test, the last that were seen


class TuneWatch:
    """Measures the first ``TrainStep`` of a script while it trains."""

    def __init__(self, steps: int, answer: Callable[[dict[str, Any]], None]) -> None:
        self._steps, self._answer = steps, answer
        self._step: Any = None
        self._noise: Any = None
        self._batches: list[Any] = []
        self._seen = 0
        self._result: Any = None
        self._rates: list[tuple[dict[str, Any], Any]] = []

    def attach(self) -> None:
        """Begins to wait for a step; torch must have been imported."""
        from anybatch.step import TrainStep

        original: Any = TrainStep.__call__

        def call(step: Any, batch: Any) -> Any:
            if self._step is None:
                self._begin(step)
            if step is not self._step:
                return original(step, batch)
            self._batches = [*self._batches[1 - _RATED :], batch]
            self._result = original(step, batch)
            self._seen += 1
            if self._seen >= self._steps:
                self.finish(self._answer)
            return self._result

        TrainStep.__call__ = call  # type: ignore[method-assign, assignment]
        self._original = original

    def _begin(self, step: Any) -> None:
        from anybatch.scaling.noisescale import NoiseScale

        self._step, self._noise = step, NoiseScale(step, every=1, halves=True)
        groups = [group for one in step._optimizers for group in one.param_groups]
        self._rates = [(group, group.get("initial_lr", group["lr"])) for group in groups]  # a warm-up begins at 0

    def finish(self, answer: Callable[[dict[str, Any]], None]) -> None:
        """Calls ``answer`` with the facts if a step was seen."""
        if self._step is None or not self._seen:
            return
        self._noise.remove()
        answer(self._facts())

    def _facts(self) -> dict[str, Any]:
        from anybatch.scaling.tuning import advice_of, rates_that_train

        step, optimizers = self._step, self._step._optimizers
        for group, rate in self._rates:  # as the script says it, before any schedule
            group["lr"] = rate
        rated: list[tuple[float, float]] = []
        try:
            rated = rates_that_train(lambda batch: self._original(step, batch), step.model, optimizers, self._batches)
        except Exception as error:  # noqa: BLE001 - such as of compiled code, which starts no threads at the exit
            logging.getLogger(__name__).info("no learning rate was tried: %s", error)
        found = advice_of(
            self._noise, optimizers, batch=step._rows, micro_batches=self._result.micro_batches, steps=self._seen,
            rated=rated,
        )  # fmt: skip
        return {"status": "measured", **found.to_dict()}


_SHARED_OPTIONS = ("count", "broadcast", "collate", "cost", "batch_norm")
_CHECKED_OPTIONS = (*_SHARED_OPTIONS, "micro_batch_size", "autocast", "inputs", "accumulate", "dropout")
_PLANNED_OPTIONS = (*_SHARED_OPTIONS, "optimizer", "autocast", "clip_norm", "inputs", "accumulate", "blocks")


class Answer:
    """Intercepts the first call of the script: answers the question about its arguments and ends the process."""

    def __init__(self, result: Path, question: Mapping[str, Any]) -> None:
        self._result = result
        self._question = question
        self._process = os.getpid()
        self._only_once = threading.Lock()

    def __call__(self, call: interception.Call) -> NoReturn:
        """Answers about a call of anybatch; does not return."""
        frame, library = users_frame(sys._getframe(1))
        self._about(call, (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0), library)

    def found(self, names: dict[str, Any], file: str, line: int, *update: Any) -> NoReturn:
        """Answers about a step of a plain loop, which ``FoundStep`` is made of; does not return."""
        self._about(partial(FoundStep, names, file, line, *update), (file, line))

    def _about(
        self, call: "interception.Call | Callable[[], FoundStep]", at: tuple[str, int], library: str = ""
    ) -> NoReturn:
        self._only_once.acquire()  # a second thread waits here until the process is gone
        try:
            interception.first_call.set(None)  # a step within the answer is a step
            self.write(status="reached")
            self.write(**_answered(call, self._question), at=at, library=library)
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)
        except BaseException as error:  # noqa: BLE001 - it must not reach the script, which would go on with it
            traceback.print_exception(error)
        finally:
            _leave(self._process)

    def told(self, facts: dict[str, Any]) -> NoReturn:
        """Writes facts as the answer; does not return."""
        self.write(**facts)
        _leave(self._process)

    def refused(self, why: str) -> NoReturn:
        """Writes why there is no answer; does not return."""
        self._only_once.acquire()
        self.write(status="refused", error=why)
        _leave(self._process)

    def write(self, **facts: Any) -> None:
        """Writes the result file atomically."""
        unfinished = self._result.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(facts, allow_nan=False), encoding="utf-8")
        unfinished.replace(self._result)


def _answered(call: "interception.Call | Callable[[], FoundStep]", question: Mapping[str, Any]) -> dict[str, Any]:
    from anybatch.errors import AnyBatchError

    answer = {"check": _checked, "plan": _planned}[question["verb"]]
    try:
        if isinstance(call, interception.Call):
            return _or_whole(call, question, answer(call, question))
        found = call()
        facts = answer(found.call, question)
        if question["verb"] == "check":
            return _with_others(facts, found)
        if facts.get("refusal") and (counted := found.counted(facts["refusal"])) is not None:
            still, unproved = _proved(facts["proved"], counted, question)
            facts |= {"refusal": facts["refusal"] if still else "", "unproved": unproved}
        if facts.get("unproved") and not facts.get("refusal"):
            facts["refusal"] = f"that they have the whole batch's gradient is not proved: {facts['unproved']}"
        facts = _or_whole(found.call, question, facts)
        return found.with_change(facts, question) if facts["status"] == "planned" else facts
    except AnyBatchError as error:
        return {"status": "refused", "error": f"{type(error).__name__}: {error}"}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the process ends here, and the parent is told
        _take_off_own_frames(error)
        traceback.print_exception(error)
        return {"status": "broken", "error": f"{type(error).__name__}: {error}"}


def _checked(call: interception.Call, question: Mapping[str, Any]) -> dict[str, Any]:
    from anybatch.certificate import check

    options = {name: value for name, value in call.options.items() if name in _CHECKED_OPTIONS}
    certificate = check(call.model, call.loss_fn, call.batch, **options)
    return {"status": "checked", "certificate": certificate.to_dict()}


def _with_others(facts: dict[str, Any], found: FoundStep) -> dict[str, Any]:
    """A certificate that says what of the loop it is not of: other losses, and weights of the loop's own."""
    from anybatch.records.certificates import Reason

    told = list[Reason]()
    if lines := found.other_backwards:
        told += [Reason(
            "other-losses", "loss",
            f"Only the loss whose backward() is called at {found.at} was checked. The loop calls backward() for "
            f"other losses, too ({at_lines(lines)}), which may couple samples where this one does not.",
            ('return {"first": first, "second": second}  # in one loss function, where they are of the same update',),
            {"lines": lines},
        )]  # fmt: skip
    elif (many := found.batches) > 1:
        told += [Reason(
            "weighed-by-hand", "loss",
            f"The loop adds up the gradients of {many} batches at {found.at} and weighs them itself, which was not "
            "checked: that is the gradient of all their samples only where each batch has as many items to count.",
            (f"for window in anybatch.windows(loader, batches={many}):  # anybatch plan writes the whole loop",),
            {"batches": many},
        )]  # fmt: skip
    facts["certificate"]["notes"] = [*facts["certificate"]["notes"], *(one.to_dict() for one in told)]
    return facts


def _or_whole(call: interception.Call, question: Mapping[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A plan; of the whole batch where the step refuses its micro-batches, unless the loss is made in pieces."""
    from anybatch.loss.losses import InPieces

    if not facts.get("refusal") or isinstance(call.loss_fn, InPieces):
        return facts
    return _planned(call, question, refusal=facts["refusal"])


def _planned(call: interception.Call, question: Mapping[str, Any], refusal: str = "") -> dict[str, Any]:
    from anybatch.errors import DoesNotFit
    from anybatch.planning.splitproof import split_of

    options = {name: value for name, value in call.options.items() if name in _PLANNED_OPTIONS}
    options |= {"batch_norm": question["batch_norm"]} if question.get("batch_norm") else {}
    updates = call.options.get("optimizer") is not None
    memory = next(wish for wish in (question["memory"], call.options.get("memory"), "free") if wish is not None)
    plans = _whole if refusal else _planner(question)
    try:
        made = plans(call.model, call.loss_fn, call.batch, memory=memory, device=question["device"], **options)
    except DoesNotFit as error:
        needs = {"needed": error.needed, "budget": error.budget, "modules": list(error.modules)}
        size = 0.0 if refusal or question.get("ranks") else _half_of(call, question, memory, options)
        still = refusal or _proved(size, call, question)[0]
        return {"status": "too-large", "error": str(error), "refusal": still, "proved": size, **needs}
    size = 0.0 if refusal or question.get("ranks") else split_of(made, call.loss_fn)
    still, unproved = (refusal, "") if refusal else _proved(size, call, question)
    facts: dict[str, Any] = {
        "micro_batch_size": call.options.get("micro_batch_size"),
        "updates": updates,
        "plans_itself": call.options.get("memory") is not None,
        "steps": _timelines(made, call, question, options) if question.get("timeline") else {},
        "obstacle": _obstacle(made, call, options),
        "refusal": still,
        "unproved": unproved,
        "proved": size,
    }
    return {"status": "planned", "plan": made.to_dict(), "is_whole": bool(refusal), **facts}


def _half_of(call: interception.Call, question: Mapping[str, Any], memory: Any, options: Mapping[str, Any]) -> float:
    """The size of micro-batches to prove where none fit; 0 where the batch is not split."""
    if call.options.get("verify") != "first":
        return 0.0
    from anybatch.planning.entrance import subject_of
    from anybatch.planning.splitproof import half_of

    given = {"model": call.model, "loss_fn": call.loss_fn, "memory": memory, **options}
    return half_of(subject_of(call.batch, question["device"], **given)[0])


def _proved(size: float, call: interception.Call, question: Mapping[str, Any]) -> tuple[str, str]:
    """Why the step does not take micro-batches of a size, or why that shows in the run only."""
    if call.options.get("verify") != "first" or not size:
        return "", ""
    from anybatch.backpropagation import prove
    from anybatch.errors import NotSplittable

    if any(one.is_meta for one in call.model.parameters()):
        return "", ""
    given = {**call.options, "micro_batch_size": size}
    given |= {"batch_norm": question["batch_norm"]} if question.get("batch_norm") else {}
    options = {name: value for name, value in given.items() if name in _CHECKED_OPTIONS}
    try:
        proof = prove(call.model, call.loss_fn, call.batch, **options)
    except NotSplittable as error:
        return str(error), ""
    except Exception as error:  # noqa: BLE001 - the plan is there already
        return "", f"it failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return "", proof.note if proof is not None and proof.outcome == "undecided" else ""


def _timelines(
    made: Any, call: interception.Call, question: Mapping[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """What a step holds from operation to operation, for the page; none is better than no plan."""
    try:
        from anybatch.planning.stepmemory import timelines

        found = timelines(made, call.model, call.loss_fn, call.batch, device=question["device"], **options)
    except Exception as error:  # noqa: BLE001 - the plan is there already
        logging.getLogger(__name__).info("no timeline of the step: %s", error)
        return {}
    return {name: one.to_dict() for name, one in found.items()}


def _planner(question: Mapping[str, Any]) -> Callable[..., Any]:
    """What plans, for one process or for several ranks; it needs no process group for them."""
    if question.get("ranks") is None:
        from anybatch.planning.entrance import plan

        return partial(plan, verify="off")  # which is proved apart, with each count that may be meant
    from anybatch.planning.rankplanner import plan_over_ranks

    return partial(plan_over_ranks, ranks=question["ranks"], shard=question["shard"])


def _whole(model: Any, loss_fn: Any, batch: Any, *, memory: Any, device: Any, **options: Any) -> Any:
    """The plan of a batch that its loss does not let be split."""
    from anybatch.planning.entrance import plan_of, subject_of

    subject, target = subject_of(batch, device, model=model, loss_fn=loss_fn, memory=memory, **options)
    subject.is_coupled = True
    return plan_of(subject, target, memory)


def _obstacle(made: Any, call: interception.Call, options: Mapping[str, Any]) -> str:
    """Why a batch can't be cut, and counts as one sample; empty if it can."""
    if made.samples != 1:
        return ""
    from anybatch.planning.entrance import subject_of

    subject, _ = subject_of(call.batch, None, model=call.model, loss_fn=call.loss_fn, memory="free", **options)
    return str(subject.splittable.obstacle or "")


def _leave(script_process: int) -> NoReturn:
    """Ends the process without ``finally`` blocks and exit handlers, which might save what was not trained."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if "multiprocessing" in sys.modules:
        import multiprocessing

        for worker in multiprocessing.active_children():
            if worker.daemon:  # such as those of a DataLoader, which an exit handler would have ended
                worker.terminate()
    if os.getpid() != script_process:  # the step was in a process that the script has forked
        os.kill(script_process, signal.SIGKILL)
    os._exit(0)


def begin(folder: str, question: Mapping[str, Any]) -> None:
    """Waits for the first step of the script that runs next.

    Args:
        folder: for the answer.
        question: the verb and its options; ``sources`` is the edited text of files, by path.
    """
    answer = Answer(Path(folder) / RESULT, question)
    edited.use(question.get("sources", {}))
    watch: TuneWatch | LoopWatch
    if question["verb"] == "tune":
        watch = TuneWatch(question["steps"], answer.told)
    else:
        watch = LoopWatch(answer.found, answer.refused)
        # The default of a context variable holds in every thread; a value that is set here would hold in this one only.
        interception.first_call = ContextVar("anybatch_first_call", default=answer)
    if "torch" in sys.modules:
        watch.attach()
    else:
        sys.meta_path.insert(0, TorchFinder(watch))
    show, process = sys.excepthook, os.getpid()

    def ended() -> None:
        if os.getpid() != process:
            return
        error = getattr(sys, "last_value", None)  # Python sets it, also where the script has its own excepthook
        if isinstance(error, BaseException):
            status = "needs-ranks" if _expects_ranks(error) else "failed"
            answer.write(status=status, error=f"{type(error).__name__}: {error}")
        elif isinstance(watch, TuneWatch):
            watch.finish(lambda facts: answer.write(**facts))  # the exit code stays the script's: it may have given up

    def shown(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if not _expects_ranks(error):
            show(kind, error, frames)

    atexit.register(ended)
    sys.excepthook = shown


def _expects_ranks(error: BaseException) -> bool:
    """Whether a script failed because torchrun did not start it."""
    text = str(error)
    names = [name for name in ONLY_RANK if name not in os.environ]
    if isinstance(error, KeyError):
        return text.strip("'") in names
    return isinstance(error, ValueError) and any(f"environment variable {name} expected" in text for name in names)


def _without(path: str, frames: TracebackType | None) -> TracebackType | None:
    """The traceback without its first frames, as far as they are of a file, or of those in a folder."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(path):
        frames = frames.tb_next
    return frames


def _take_off_last(frames: TracebackType | None) -> None:
    """Ends a traceback of torch's error at the script's last frame, if anybatch stands between the two."""
    from anybatch.userlines import USERS, whose_file

    last, between, is_own = None, False, False
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        is_own = file.startswith(_PACKAGE)
        last, between = (frames, False) if not is_own and whose_file(file) == USERS else (last, between or is_own)
        frames = frames.tb_next
    if last is not None and between and not is_own:  # it looks at each operation
        last.tb_next = None


def _take_off_own_frames(error: BaseException) -> None:
    """Leaves of an error, and of those that led to it, what is of the script."""
    each: BaseException | None = error
    seen = set[int]()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        context = each.__context__ if each.__cause__ is None else None
        # A traceback begins where its error was caught: here, when a loss that failed was run in another manner.
        if context is not None and _without(_PACKAGE, context.__traceback__) is not context.__traceback__:
            each.__context__ = None
        each.__traceback__ = _without(_PACKAGE, each.__traceback__) or each.__traceback__
        _take_off_last(each.__traceback__)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
