"""A forward that runs twice: without a graph, and later again with one, as if it were the first time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn.parameter import UninitializedParameter

from anybatch.tensors.graph import recomputing
from anybatch.tensors.hiddendropout import hidden_dropout, in_words
from anybatch.tensors.modules import modules_of
from anybatch.tensors.replay import NumpyDraws, Surroundings
from anybatch.tensors.state import NotRecomputable, State


class TwoPasses:
    """Forwards of the same modules that are to run twice.

    Args:
        name: what messages call it, such as ``the encode of Coupled``.
        models: whose parameters and buffers it reads.
        devices: on which it draws random numbers.
        advice: what to do where it can't run twice.

    Example:
        >>> dropout = torch.nn.Dropout()
        >>> passes = TwoPasses("encode", [dropout])
        >>> with torch.no_grad(), passes.first() as forward:
        ...     before = dropout(torch.ones(8))
        >>> with forward.again():
        ...     print(torch.equal(dropout(torch.ones(8)), before))
        True
    """

    def __init__(
        self,
        name: str,
        models: Sequence[torch.nn.Module],
        devices: Sequence[torch.device] = (),
        *,
        advice: str = "Change it after the backward",
    ) -> None:
        self._name, self._advice = name, advice
        self._modules = modules_of(*models)
        self._state = _Buffers(name, self._modules, title=name, advice=advice)
        self._parameters: _Parameters | None = None
        self._numpy = NumpyDraws()
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]

    @contextmanager
    def first(self) -> Iterator["Forward"]:
        """Runs its block for the first time.

        Returns:
            A context whose value runs it again.

        Raises:
            NotRecomputable: the block changed a parameter, or would draw other random numbers the second time.
        """
        if self._parameters is None:
            self._refuse_lazy_parameters()
            self._parameters = _Parameters(self._modules)
            self._refuse_hidden_dropout()
        forward = Forward(self, self._state, Surroundings(self._devices, self._numpy))
        yield forward
        forward.end()

    def _refuse_lazy_parameters(self) -> None:
        if self._state.is_lazy or any(isinstance(p, UninitializedParameter) for p in _parameters_of(self._modules)):
            raise NotRecomputable(
                f"{self._name} can't be recomputed: it has lazy parameters, which its first forward makes; expected "
                "that they exist: call the model once under torch.no_grad() before",
                block=self._name,
            )

    def _refuse_hidden_dropout(self) -> None:
        if hidden := hidden_dropout(self._modules):
            raise NotRecomputable(
                f"{self._name} can't be recomputed: {in_words(hidden[0])}. Use layers of their own with "
                "torch.nn.Dropout between them, or torch.backends.cudnn.enabled = False",
                block=self._name,
            )

    def check_parameters(self, when: str) -> None:
        """Refuses parameters that are not what they were before the first forward.

        Args:
            when: they may have changed, for the message.

        Raises:
            NotRecomputable: one was changed or replaced.
        """
        if self._parameters is not None and self._parameters.have_changed():
            raise NotRecomputable(
                f"{self._name} can't be recomputed, because a parameter was changed {when}; expected that what it "
                f"reads stays as it is. {self._advice}",
                block=self._name,
            )


def _parameters_of(modules: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)


class _Buffers(State):
    """Leaves the parameters out, which are looked at once for all forwards."""

    def parameters(self) -> list[tuple[torch.Tensor, int]]:
        """None."""
        return []


class _Parameters:
    """Parameters and their versions, in lists that are quick to go through for every micro-batch."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._homes = [module._parameters for module in modules if module._parameters]
        self._tensors = self._found()
        self._versions = self._seen()

    def _found(self) -> list[torch.Tensor]:
        return [p for home in self._homes for p in home.values() if p is not None]

    def _seen(self) -> list[int]:
        return [0 if p.is_inference() else p._version for p in self._tensors]

    def have_changed(self) -> bool:
        now = self._found()
        is_other = len(now) != len(self._tensors) or any(a is not b for a, b in zip(now, self._tensors, strict=True))
        return is_other or self._seen() != self._versions


class Forward:
    """One forward that has run, or is running, for the first time.

    Args:
        passes: know the parameters.
        state: buffers of the modules.
        surroundings: random state and precision at its beginning.
    """

    def __init__(self, passes: TwoPasses, state: State, surroundings: Surroundings) -> None:
        self._passes = passes
        self._surroundings = surroundings
        self._state = state.before_forward()

    def end(self) -> None:
        """Looks at what the forward has changed."""
        self._surroundings.end_forward()
        self._state.after_forward()
        self._passes.check_parameters("by the forward itself")

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs its block as if it were the first time; random state and buffers are afterwards as they were before."""
        self._passes.check_parameters("or replaced between the forward and the backward")
        with self._surroundings.again(), self._state.as_before(), recomputing():
            yield
