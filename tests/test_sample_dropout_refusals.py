"""What split-independent dropout can't see or can't follow is refused, with the way out and the place."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from anybatch.errors import AnyBatchError, NotSplittable
from anybatch.tensors.dropouts import SampleDropout
from anybatch.tensors.droprefusals import refuse_unseen

X = torch.ones(4, 3, 6)


class Attends(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.rate)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), inner])

    def forward(self, x: Tensor) -> Any:
        return self.blocks[1](self.blocks[0](x))


class Multi(nn.MultiheadAttention):
    def forward(self, x: Tensor, **_: Any) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)


def on(function: Callable[[], Any], rows: int = 4) -> Any:
    with SampleDropout(0) as masks:
        masks.begin(range(rows))
        return function()


@pytest.mark.parametrize(
    ("module", "what", "way"),
    [
        (Attends(0.1), "scaled_dot_product_attention with dropout_p=0.1", "write attention as softmax"),
        (Multi(6, 2, dropout=0.2), "multi_head_attention_forward with dropout_p=0.2", "Set its dropout to 0"),
        (nn.LSTM(6, 5, 2, dropout=0.3), "2 layers with dropout=0.3", "modules of one layer"),
        (nn.GRU(6, 5, 3, dropout=0.3, batch_first=True), "3 layers with dropout=0.3", "modules of one layer"),
        (nn.RNN(6, 5, 2, dropout=0.3), "2 layers with dropout=0.3", "modules of one layer"),
        (nn.RNN(6, 5, 2, dropout=0.3, nonlinearity="relu"), "2 layers with dropout=0.3", "modules of one layer"),
        (nn.RReLU(), "rrelu with training=True", "nn.LeakyReLU"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_drops_out_by_itself(module: nn.Module, what: str, way: str) -> None:
    model = Outer(module)
    with pytest.raises(NotSplittable) as caught:
        on(lambda: model(X))
    assert what in str(caught.value)
    assert way in str(caught.value)
    assert "blocks.1 at test_sample_dropout_refusals.py:" in str(caught.value)
    assert caught.value.modules == ("blocks.1",)
    on(lambda: model.eval()(X)) if not isinstance(module, Attends) else None
    if not isinstance(module, Attends):
        refuse_unseen(model)
        with pytest.raises(NotSplittable, match=way) as early:
            refuse_unseen(model.train())
        assert early.value.modules == ("blocks.1",)


def test_packed_sequences_and_attention_by_position() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(X, torch.tensor([3, 2, 2, 1]), batch_first=True)
    for kind in (nn.LSTM, nn.GRU):
        with pytest.raises(NotSplittable, match="2 layers"):
            on(functools.partial(kind(6, 5, 2, dropout=0.3), packed))
        on(functools.partial(kind(6, 5, 1), packed))
        on(functools.partial(kind(6, 5, 2), packed))
    with pytest.raises(NotSplittable, match=r"dropout_p=0\.5"):
        on(lambda: F.scaled_dot_product_attention(X, X, X, None, 0.5))


@pytest.mark.parametrize(
    "module", [Attends(0.0), Multi(6, 2), nn.LSTM(6, 5, 1), nn.LSTM(6, 5, 2), nn.RReLU(0.2, 0.2), nn.Dropout(0.5)]
)
def test_what_draws_nothing_or_is_seen_passes(module: nn.Module) -> None:
    on(lambda: module(X))


def test_scripts() -> None:
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), X, check_trace=False)
    with pytest.raises(NotSplittable, match=r"'model' is a script"):
        refuse_unseen(scripted)
    refuse_unseen(torch.jit.trace(nn.Sequential(nn.Linear(6, 6)), X))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_does_not_put_the_random_state_back(reentrant: bool) -> None:
    model = Outer(nn.Sequential(nn.Dropout(0.5), nn.Tanh()))
    x = X.clone().requires_grad_()

    def run() -> None:
        checkpoint(model, x, use_reentrant=reentrant, preserve_rng_state=False).sum().backward()

    with pytest.raises(NotSplittable, match="preserve_rng_state=True") as caught:
        on(run)
    assert "blocks.1.0" in str(caught.value)
    assert caught.value.modules == ("blocks.1.0",)


@pytest.mark.parametrize("differentiate", ["method", "function", "grad", "inputs"])
def test_every_way_to_differentiate_recomputes_the_same(differentiate: str) -> None:
    x = torch.ones(4, 500, requires_grad=True)

    def run() -> tuple[Tensor, Any]:
        y: Any = checkpoint(lambda x: F.dropout(x * x, 0.5), x, use_reentrant=False)
        if differentiate == "method":
            y.sum().backward()
        elif differentiate == "function":
            torch.autograd.backward([y.sum()])
        elif differentiate == "inputs":
            y.backward(torch.ones_like(y), inputs=[x])
        else:
            return y, torch.autograd.grad(y.sum(), x)[0]
        return y, x.grad

    y, gradient = on(run)
    assert torch.equal(gradient, 2 * y.detach())


def test_a_forward_that_computes_something_else_when_it_runs_again() -> None:
    state = torch.get_rng_state()
    with SampleDropout(0) as masks:
        masks.begin(range(4))
        F.dropout(X, 0.5)
        torch.set_rng_state(state)
        with pytest.raises(
            NotSplittable, match=r"shape \(4, 3\) when it ran for the second time and of shape \(4, 3, 6\)"
        ):
            F.dropout(X[..., 0], 0.5)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ([((8, 5), 4), ((8, 5), 8)], r"2 entries for each; in a micro-batch of 8 its shape is \(8, 5\)"),
        ([((8, 5), 8), ((8, 5), 4)], r"dim 0; in a micro-batch of 4 its shape is \(8, 5\)"),
        ([((8, 5), 4), ((8, 5), 3)], r"2 entries for each; in a micro-batch of 3 its shape is \(8, 5\)"),
        ([((9, 4, 5), 4), ((9, 4, 5), 3)], r"lie in dim 1; in a micro-batch of 3 its shape is \(9, 4, 5\)"),
        ([((8, 1, 5), 1), ((8, 4, 5), 4), ((6, 9, 5), 3)], r"lie in dim 1; in a micro-batch of 3"),
        ([((13, 5), 4), ((11, 5), 4)], r"shape \(11, 5\) in a micro-batch of 4 samples and of shape \(13, 5\)"),
        ([((13, 5), 4), ((3, 5), 3)], r"shape \(3, 5\) in a micro-batch of 3 samples and of shape \(13, 5\)"),
        ([((7, 9, 4, 4), 4)], r"which dimension of shape \(7, 9, 4, 4\) is that of the 4 samples: \[2, 3\]"),
    ],
)
def test_samples_that_lie_elsewhere_in_another_micro_batch(shapes: list[Any], text: str) -> None:
    with SampleDropout(0) as masks:
        for number, (shape, rows) in enumerate(shapes):
            masks.begin(range(rows))
            if number < len(shapes) - 1:
                F.dropout(torch.ones(shape), 0.5)
        with pytest.raises(NotSplittable, match=text) as caught:
            F.dropout(torch.ones(shapes[-1][0]), 0.5)
    assert "Apply dropout where the samples lie in dim 0" in str(caught.value)


@pytest.mark.parametrize(
    "shapes",
    [
        [((1, 5), 1), ((12, 5), 4)],  # tokens, flattened; one text of one token
        [((6, 1, 5), 1), ((6, 4, 5), 4), ((4, 3, 5), 3)],  # sequences first
        [((1, 1, 5), 1), ((8, 4, 5), 4), ((3, 3, 5), 3)],
        [((8, 4, 5), 4), ((1, 1, 5), 1), ((3, 3, 5), 3)],
        [((24, 5), 4), ((24, 5), 6), ((2, 5), 2)],  # packed to a number of tokens
        [((13, 5), 4), ((13, 5), 1), ((13, 5), 13)],  # weights
    ],
)
def test_sizes_that_fit_together(shapes: list[Any]) -> None:
    with SampleDropout(0) as masks:
        for shape, rows in shapes:
            masks.begin(range(rows))
            F.dropout(torch.ones(shape), 0.5)


def test_weights_have_one_mask() -> None:
    with SampleDropout(0) as masks:
        drawn = []
        for rows in ([0, 1, 2, 3], [4, 5, 6], [7]):
            masks.begin(rows)
            drawn.append((F.dropout(torch.ones(13, 5), 0.5), F.dropout(nn.Parameter(torch.ones(12, 12)), 0.5)))
    assert all(map(torch.equal, drawn[0], drawn[1]))
    assert all(map(torch.equal, drawn[0], drawn[2]))


def test_misuse() -> None:
    with SampleDropout(0) as masks:
        with pytest.raises(AnyBatchError, match="begin"):
            F.dropout(X, 0.5)
        with pytest.raises(ValueError, match="expected indices"):
            masks.begin([0, -1])
        with pytest.raises(ValueError, match="stage"):
            masks.begin([0], stage=-1)
        masks.begin(range(4))
        with pytest.raises(NotSplittable, match="layout"):
            F.dropout(X.to_sparse(), 0.5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
def test_compiled_models_drop_the_same() -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    compiled: Any = torch.compile(net, backend="eager")
    with SampleDropout(0) as masks:
        results = []
        for model in (net, compiled, compiled):
            masks.begin(range(4))
            results.append(model(X))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    torch._dynamo.reset()


def test_fakes() -> None:
    with FakeTensorMode(), SampleDropout(0) as masks:
        masks.begin([3, 1])
        x = torch.ones(2, 8, requires_grad=True)
        y: Any = checkpoint(nn.Dropout(0.5), x, use_reentrant=False)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (2, 8)


@pytest.mark.gpu
def test_the_masks_are_the_same_on_a_gpu() -> None:
    for shape, dim in (((300, 4000), 0), ((7, 9, 65), 1), ((2, 3, 900, 900), 0)):
        kept = {}
        for device in ("cpu", "cuda"):
            x: Tensor = torch.ones(shape, device=device, requires_grad=True)
            with SampleDropout(5) as masks:
                masks.begin([*range(shape[dim] - 1), 1000])
                y: Any = checkpoint(lambda x: F.dropout(x, 0.3), x, use_reentrant=False)
                y.sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad, y.detach())
            kept[device] = (y != 0).cpu()
        assert torch.equal(kept["cpu"], kept["cuda"])


@pytest.mark.gpu
def test_nothing_waits_for_a_gpu() -> None:
    x = torch.ones(4, 100, device="cuda", requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with SampleDropout(0) as masks:
            for rows in (range(4), [5, 9, 7, 4]):
                masks.begin(rows)
                F.dropout(F.dropout2d(x[..., None, None], 0.5), 0.5).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
