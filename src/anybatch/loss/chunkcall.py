"""Calls the user's ``chunk_loss``, and refuses it where its gradient would be wrong."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any, NamedTuple

import torch

from anybatch.batch.trees import map_leaves
from anybatch.batch.writes import Writes
from anybatch.errors import LossError, NotSplittable
from anybatch.loss.cutting import in_place_explained
from anybatch.loss.states import checked_state, tensors_of
from anybatch.memory.checkpointing import Checkpoint, hidden_dropout, why_hidden
from anybatch.records.means import Mean
from anybatch.tensors.modules import devices_among
from anybatch.tensors.randomness import RandomState


class Called(NamedTuple):
    """The result of ``chunk_loss`` on one chunk."""

    result: Any  # a loss, a ``Mean``, a mapping of names to either, or ``None``
    state: Any  # after the chunk
    metrics: Any  # ``Mean`` s by name, or ``None``


class ChunkCall:
    """Calls the user's function on the chunks of a micro-batch."""

    def __init__(
        self, function: Callable[..., Any], model: Any, modules: Sequence[torch.nn.Module], batch: Any
    ) -> None:
        self._function, self._model, self._modules = function, model, modules
        self._batch = tensors_of(batch)
        self.devices = devices_among(modules)  # whose random states count
        self.checkpoint = Checkpoint("the chunk_loss of OverTime", modules, devices=self.devices)
        self.gives_losses = False  # whether any chunk has returned a loss
        # whether a loss given as a function draws random numbers; ``None`` before the first
        self.draws: bool | None = None

    def __call__(self, chunk: Any, state: Any, *, wants_loss: bool = True, looks: bool = False) -> Called:
        """Runs a chunk.

        Args:
            looks: whether to find out if that function draws random numbers.
        """
        watched = tensors_of(state)
        given, batch = Writes(watched), Writes(self._batch)
        with in_place_explained("the state that chunk_loss was given"):
            found = self._function(
                self._model, chunk, map_leaves(lambda leaf: leaf, state)
            )  # containers are not shared
            result, new, metrics = _checked_parts(found, watched)
            self.gives_losses |= result is not None
            if callable(result) and not isinstance(result, (torch.Tensor, Mean, Mapping)):
                result = self._evaluated(result, looks=looks) if wants_loss else None
        if given.were_made:
            raise LossError(
                "chunk_loss changes the state that it is given in place (such as state.mul_() or state[...] = x), so "
                "that the chunk can't run again; expected a new state: clone it first"
            )
        if batch.were_made:
            raise LossError(
                "chunk_loss wrote to a tensor of the batch in place, so that the chunk would be another one when it "
                "runs again; use the operation that does not write in place, or clone the tensor first"
            )
        if isinstance(result, (GeneratorType, tuple)):
            kind = "generator" if isinstance(result, GeneratorType) else "tuple"
            raise LossError(
                f"the loss of chunk_loss is a {kind}; expected a loss, a Mean, a mapping of names to either, None, or "
                "a function without arguments that gives one of these. Metrics stand behind the state: (loss, state, "
                "metrics)"
            )
        return Called(result, checked_state(new, "chunk_loss"), metrics)

    def _evaluated(self, loss: Callable[[], Any], *, looks: bool) -> Any:
        if not looks:
            return loss()
        before = RandomState(self.devices)
        result = loss()
        has_drawn = not before.is_now()
        if self.draws is None:
            self.draws = has_drawn
        elif has_drawn and not self.draws:
            raise LossError(
                "the loss of chunk_loss is a function that draws random numbers in some chunks and not in the first; "
                "expected the loss itself in the place of the function, so that they are drawn in the order of the "
                "chunks"
            )
        return result

    @contextlib.contextmanager
    def looking_back(self) -> Iterator[None]:
        """Refuses bidirectional layers in this block: within a chunk they do not see later chunks."""
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                if isinstance(module, torch.nn.RNNBase) and module.bidirectional:
                    stack.callback(module.register_forward_pre_hook(_refuse_both_ways).remove)
            yield

    def refuse_hidden_dropout(self, *, on_cuda: bool | None = None) -> None:
        """Refuses recurrent layers whose dropout between layers can't be replayed."""
        if found := hidden_dropout(self._modules, on_cuda=on_cuda):
            raise NotSplittable(
                f"{why_hidden(found[0])}, or OverTime(mode='truncated', chunk=...), which runs every chunk once",
                modules=[type(module).__name__ for module in found],
            )


def _checked_parts(found: Any, before: Sequence[torch.Tensor]) -> tuple[Any, Any, Any]:
    """The loss, the state and the metrics; refuses an empty state after one with tensors."""
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise LossError(f"chunk_loss gave a {type(found).__name__}; expected (loss, state) or (loss, state, metrics)")
    result, new, metrics = (*found, None)[:3]
    if metrics is not None and not isinstance(metrics, Mapping):
        raise LossError(f"the metrics of chunk_loss are a {type(metrics).__name__}; expected a mapping of Means")
    if before and not tensors_of(new):  # an RNN would start every chunk from ``None``
        raise LossError(
            f"chunk_loss gave the state {new!r} after one with tensors; expected the state that the next chunk begins "
            "with: return (loss, state)"
        )
    return result, new, metrics


def _refuse_both_ways(module: torch.nn.Module, _: Any) -> None:
    kind = type(module).__name__
    raise NotSplittable(
        f"a bidirectional {kind} runs within chunk_loss of OverTime, where its backward direction would start again at "
        "the end of every chunk and never see what follows. Choose one:\n"
        "  - run it on all steps before they are cut (exact): OverTime(..., prepare=lambda model, batch: {**batch, "
        "'x': model.rnn(batch['x'])[0]});\n"
        f"  - a {kind} in one direction only (another model).",
        modules=[kind],
    )
