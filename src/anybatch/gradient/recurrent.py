"""Recurrent layers of torch in chunks of time, each direction by itself, so that they may look ahead."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

from anybatch.errors import LossError
from anybatch.tensors.replay import Autocast

_RUN: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


def in_chunks(rnn: torch.nn.RNNBase, x: Any, state: Any = None, *, chunk: int) -> tuple[Any, Any]:
    """Gives what ``rnn(x, state)`` gives, and keeps the activations of one chunk of time at most.

    Layer by layer, each direction goes through its own chunks: forward without a graph, and backward once more, chunk
    by chunk, the last one first. What stays is the output of each layer, of both directions, and the state at the
    beginning of each chunk. So a bidirectional layer is exact in chunks, which it is not within ``chunk_loss`` of
    ``OverTime``. Dropout between layers is torch's own, whose mask is kept, on CUDA, too.

    Args:
        rnn: an ``RNN``, ``LSTM`` or ``GRU`` of any number of layers and directions.
        x: a batch of sequences, or a ``PackedSequence``.
        state: the initial state; ``None`` for zeros.
        chunk: steps in a chunk.

    Returns:
        The output and the last state.

    Raises:
        LossError: the layer, the input or the chunk is none of these.

    Example:
        >>> rnn, x = torch.nn.LSTM(3, 4, 2, bidirectional=True), torch.ones(50, 2, 3)
        >>> output, (h, c) = in_chunks(rnn, x, chunk=16)
        >>> bool(torch.allclose(output, rnn(x)[0], atol=1e-6)), h.shape
        (True, torch.Size([4, 2, 4]))
    """
    if not isinstance(rnn, torch.nn.RNNBase) or rnn.mode not in _RUN:
        raise LossError(f"in_chunks got a {type(rnn).__name__}; expected a torch.nn.RNN, LSTM or GRU")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise LossError(f"in_chunks(chunk={chunk!r}); expected a number of steps")
    if not isinstance(x, PackedSequence) and not (isinstance(x, torch.Tensor) and x.dim() == 3):
        shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise LossError(f"in_chunks got the input {shape}; expected a tensor of 3 dimensions or a PackedSequence")
    if isinstance(x, PackedSequence):
        sizes = x.batch_sizes.tolist()
        data, rows, order, back = x.data, sizes[0], x.sorted_indices, x.unsorted_indices
    else:
        data, order, back = (x.transpose(0, 1) if rnn.batch_first else x), None, None
        rows, sizes = data.shape[1], None
    states = _initial(rnn, data, rows, state, order)
    data, last = _all_layers(rnn, data, states, _Time(sizes, len(data), chunk))
    final = tuple(h if back is None else h.index_select(1, back) for h in last)
    if isinstance(x, PackedSequence):
        output: Any = PackedSequence(data, x.batch_sizes, order, back)
    else:
        output = data.transpose(0, 1) if rnn.batch_first else data
    return output, final if rnn.mode == "LSTM" else final[0]


def _initial(
    rnn: torch.nn.RNNBase, data: torch.Tensor, rows: int, state: Any, order: torch.Tensor | None
) -> list[torch.Tensor]:
    """The parts of the initial state, ``[layers and directions, rows, width]`` each."""
    if state is None:
        directions = rnn.num_layers * (2 if rnn.bidirectional else 1)
        widths = [rnn.proj_size or rnn.hidden_size, *([rnn.hidden_size] if rnn.mode == "LSTM" else [])]
        return [data.new_zeros(directions, rows, width) for width in widths]
    parts = list(state) if rnn.mode == "LSTM" else [state]
    return [part if order is None else part.index_select(1, order) for part in parts]


def _all_layers(
    rnn: torch.nn.RNNBase, data: torch.Tensor, states: Sequence[torch.Tensor], time: "_Time"
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    directions = 2 if rnn.bidirectional else 1
    last: list[list[torch.Tensor]] = [[] for _ in states]
    for layer in range(rnn.num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            sweep = _Sweep(rnn.mode, time, rnn.bias, rnn.training, direction == 1)
            begin = [part[number : number + 1] for part in states]
            output, *end = _Swept.apply(sweep, len(begin), data, *begin, *rnn.all_weights[number])  # type: ignore[no-untyped-call]
            outputs.append(output)
            for found, part in zip(last, end, strict=True):
                found.append(part)
        data = torch.cat(outputs, -1) if directions == 2 else outputs[0]
        del outputs, output
        if layer + 1 < rnn.num_layers and rnn.dropout:
            data = torch.nn.functional.dropout(data, rnn.dropout, rnn.training)
    return data, [torch.cat(parts) for parts in last]


class _Time:
    """Where the chunks are, of sequences of one length or of packed ones.

    Args:
        sizes: how many sequences there are at each step; ``None`` if all are as long.
        length: of the data.
        chunk: steps in a chunk.
    """

    def __init__(self, sizes: list[int] | None, length: int, chunk: int) -> None:
        self.sizes = sizes
        self.total = length if sizes is None else len(sizes)
        self.bounds = [(start, min(start + chunk, self.total)) for start in range(0, self.total, chunk)]
        self._offsets = None if sizes is None else [0, *itertools.accumulate(sizes)]
        self._backward: torch.Tensor | None = None

    def rows(self, step: int) -> int | None:
        """How many sequences reach a step; ``None`` if all do."""
        if self.sizes is None:
            return None
        return self.sizes[step] if step < self.total else 0

    def part(self, data: torch.Tensor, start: int, stop: int, reverse: bool) -> torch.Tensor:
        """The steps of a chunk, counted from the end of each sequence for the backward direction."""
        if self._offsets is None:
            return data[self.total - stop : self.total - start].flip(0) if reverse else data[start:stop]
        a, b = self._offsets[start], self._offsets[stop]
        return data.index_select(0, self.order(data.device)[a:b]) if reverse else data[a:b]

    def put_(self, data: torch.Tensor, start: int, stop: int, reverse: bool, part: torch.Tensor) -> None:
        """Writes what belongs where ``part`` was taken from."""
        if self._offsets is None:
            place = data[self.total - stop : self.total - start] if reverse else data[start:stop]
            place.copy_(part.flip(0) if reverse else part)
            return
        a, b = self._offsets[start], self._offsets[stop]
        if reverse:
            data.index_copy_(0, self.order(data.device)[a:b], part)
        else:
            data[a:b].copy_(part)

    def order(self, device: torch.device) -> torch.Tensor:
        """The positions in packed data with each sequence turned round, which takes as much room as before."""
        if self._backward is None or self._backward.device != device:
            sizes, offsets = torch.tensor(self.sizes), torch.tensor(self._offsets)
            steps = torch.repeat_interleave(torch.arange(self.total), sizes)
            row = torch.arange(len(steps)) - offsets[steps]
            lengths = (sizes[:, None] > torch.arange(int(sizes[0]))).sum(0)
            self._backward = (offsets[lengths[row] - 1 - steps] + row).to(device)
        return self._backward


@dataclass
class _Sweep:
    """One direction of one layer."""

    mode: str
    time: _Time
    bias: bool
    training: bool
    reverse: bool

    def run(
        self,
        part: torch.Tensor,
        bounds: tuple[int, int],
        begin: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Gives the output and the state after a chunk."""
        hidden: Any = tuple(begin) if self.mode == "LSTM" else begin[0]
        if self.time.sizes is None:
            found = _RUN[self.mode](part, hidden, list(weights), self.bias, 1, 0.0, self.training, False, False)
        else:
            sizes = torch.tensor(self.time.sizes[slice(*bounds)])
            found = _RUN[self.mode](part, sizes, hidden, list(weights), self.bias, 1, 0.0, self.training, False)
        return found[0], list(found[1:])


class _Swept(torch.autograd.Function):
    """A direction of a layer, whose chunks run once more when they are differentiated."""

    @staticmethod
    def forward(ctx: Any, sweep: _Sweep, parts: int, data: torch.Tensor, *tensors: torch.Tensor) -> Any:
        begin, weights = list(tensors[:parts]), tensors[parts:]
        time, output = sweep.time, None
        ended: list[list[torch.Tensor]] = []
        entered: list[torch.Tensor] = []
        for start, stop in time.bounds:
            entered += begin
            part, new = sweep.run(time.part(data, start, stop, sweep.reverse), (start, stop), begin, weights)
            if output is None:
                output = part.new_empty(len(data), *part.shape[1:])
            time.put_(output, start, stop, sweep.reverse, part)
            left, here = time.rows(stop), time.rows(start)
            if left is not None and here is not None and left < here:
                ended.append([h[:, left:here] for h in new])
                new = [h[:, :left].clone() for h in new]
            begin = new
        ctx.sweep, ctx.autocast = sweep, Autocast({"cpu", data.device.type})
        ctx.parts, ctx.weights = parts, len(weights)
        ctx.save_for_backward(data, *weights, *entered)
        last = [torch.cat(part, 1) for part in zip(*ended[::-1], strict=True)] if ended else begin
        return (output, *last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: torch.Tensor, *d_last: torch.Tensor) -> Any:
        sweep, time = ctx.sweep, ctx.sweep.time
        data, *rest = ctx.saved_tensors
        weights = [w.detach().requires_grad_() for w in rest[: ctx.weights]]
        entered = rest[ctx.weights :]
        d_data = torch.zeros_like(data) if ctx.needs_input_grad[2] else None
        d_weights = [torch.zeros_like(w) for w in weights]
        upstream = list(d_last)
        for index in reversed(range(len(time.bounds))):
            start, stop = time.bounds[index]
            here, left = time.rows(start), time.rows(stop)
            if here is not None and left is not None:  # those that go on, and those that ended in this chunk
                upstream = [
                    torch.cat([up[:, :left], end[:, left:here]], 1) if left else end[:, :here]
                    for up, end in zip(upstream, d_last, strict=True)
                ]
            begin = [h.detach().requires_grad_() for h in entered[index * ctx.parts : (index + 1) * ctx.parts]]
            part = time.part(data, start, stop, sweep.reverse).detach().requires_grad_(d_data is not None)
            with torch.enable_grad(), ctx.autocast.again():
                output, new = sweep.run(part, (start, stop), begin, weights)
            wanted = [*begin, *weights, *([part] if d_data is not None else [])]
            given = [time.part(d_output, start, stop, sweep.reverse), *upstream]
            found = torch.autograd.grad([output, *new], wanted, given)
            upstream = list(found[: ctx.parts])
            for total, more in zip(d_weights, found[ctx.parts :], strict=False):
                total.add_(more)
            if d_data is not None:
                time.put_(d_data, start, stop, sweep.reverse, found[-1])
            del output, new, found
        return None, None, d_data, *upstream, *d_weights
