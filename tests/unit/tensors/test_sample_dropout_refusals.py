"""What split-independent dropout can't see or can't follow is refused, with the way out and the place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from anybatch.errors import AnyBatchError, NotSplittable
from anybatch.tensors.dropouts import SampleDropout, refuse_unseen

X = torch.ones(4, 3, 6)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), inner])

    def forward(self, x: Tensor) -> Any:
        return self.blocks[1](self.blocks[0](x))


class Multi(nn.MultiheadAttention):
    def forward(self, x: Tensor, **_: Any) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)


def on(model: nn.Module, x: Tensor = X, rows: int = 4) -> Any:
    with SampleDropout(0, [model]) as masks:
        masks.begin(range(rows))
        return model(x)


class Calls(nn.Module):
    """Calls a function.

    Args:
        function: of the input.
    """

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        (Multi(6, 2, dropout=0.2), "Set its dropout to 0"),
        (nn.LSTM(6, 5, 2, dropout=0.3), "modules of one layer"),
        (nn.GRU(6, 5, 3, dropout=0.3, batch_first=True), "modules of one layer"),
        (nn.RNN(6, 5, 2, dropout=0.3, nonlinearity="relu"), "modules of one layer"),
        (nn.RReLU(), "nn.LeakyReLU"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_modules_that_drop_out_by_themselves(module: nn.Module, remedy: str) -> None:
    model = Outer(module)
    refuse_unseen(model.eval())
    with pytest.raises(NotSplittable, match=remedy) as caught:
        refuse_unseen(model.train())
    assert caught.value.modules == ("blocks.1",)


@pytest.mark.parametrize("module", [Multi(6, 2), nn.LSTM(6, 5, 1), nn.LSTM(6, 5, 2), nn.RReLU(0.2, 0.2)])
def test_what_draws_nothing_passes(module: nn.Module) -> None:
    refuse_unseen(module)
    on(module)


def test_scripts() -> None:
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), X, check_trace=False)
    with pytest.raises(NotSplittable, match=r"'model' is a script"):
        refuse_unseen(scripted)
    refuse_unseen(torch.jit.trace(nn.Sequential(nn.Linear(6, 6)), X))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.dropout(input=x, p=0.5, training=True),
        lambda x: F.dropout1d(x, 0.5),
        lambda x: F.alpha_dropout(x, 0.5, True),
        lambda x: F.feature_alpha_dropout(x, p=0.5, training=True),
        lambda x: torch.dropout(x, 0.5, True),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5),
    ],
)
def test_functions_that_drop_out(function: Any) -> None:
    with pytest.raises(NotSplittable, match=r"at a rate of 0\.5 \(in test_sample_dropout_refusals.py:\d+\)") as caught:
        on(Calls(function))
    assert "nn.Dropout" in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout(x, 1.0),
        lambda x: F.dropout(x, 0.5, False),
        lambda x: F.dropout2d(x[..., None], 0.5, training=False),
        lambda x: F.alpha_dropout(x, 0.5),
        lambda x: F.scaled_dot_product_attention(x, x, x),
    ],
)
def test_functions_that_draw_nothing_pass(function: Any) -> None:
    before = torch.get_rng_state()
    on(Calls(function))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dropout_with_a_forward_of_its_own_is_what_it_calls() -> None:
    class Halved(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:
            return F.dropout(input, self.p / 2, self.training)

    with pytest.raises(NotSplittable, match=r"at a rate of 0\.25"):
        on(Halved(0.5))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_does_not_put_the_random_state_back(reentrant: bool) -> None:
    inner = Outer(nn.Sequential(nn.Dropout(0.5), nn.Tanh()))
    x = X.clone().requires_grad_()
    model = Calls(lambda x: checkpoint(inner, x, use_reentrant=reentrant, preserve_rng_state=False).sum().backward())
    model.inner = inner
    with pytest.raises(NotSplittable, match="preserve_rng_state=True") as caught:
        on(model, x)
    assert caught.value.modules == ("inner.blocks.1.0",)


@pytest.mark.parametrize("differentiate", ["method", "function", "grad", "inputs"])
def test_however_it_is_differentiated_the_same_is_recomputed(differentiate: str) -> None:
    x = torch.ones(4, 500, requires_grad=True)
    drop = nn.Dropout(0.5)

    def run(x: Tensor) -> tuple[Tensor, Any]:
        y: Any = checkpoint(lambda x: drop(x * x), x, use_reentrant=False)
        if differentiate == "method":
            y.sum().backward()
        elif differentiate == "function":
            torch.autograd.backward([y.sum()])
        elif differentiate == "inputs":
            y.backward(torch.ones_like(y), inputs=[x])
        else:
            return y, torch.autograd.grad(y.sum(), x)[0]
        return y, x.grad

    model = Calls(run)
    model.drop = drop
    y, gradient = on(model, x)
    assert torch.equal(gradient, 2 * y.detach())


def test_a_forward_that_computes_something_else_when_it_runs_again() -> None:
    state, module = torch.get_rng_state(), nn.Dropout(0.5)
    with SampleDropout(0, [module]) as masks:
        masks.begin(range(4))
        module(X)
        torch.set_rng_state(state)
        with pytest.raises(NotSplittable, match=r"shape \(4, 3\) when it was recomputed and of shape \(4, 3, 6\)"):
            module(X[..., 0])


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ([((8, 5), 4), ((8, 5), 8)], r"\(8, 5\) in a micro-batch of 8 samples, and of \(8, 5\) in one of 4"),
        ([((8, 5), 8), ((8, 5), 4)], r"\(8, 5\) in a micro-batch of 4 samples, and of \(8, 5\) in one of 8"),
        ([((8, 5), 4), ((8, 5), 3)], r"\(8, 5\) in a micro-batch of 3 samples, and of \(8, 5\) in one of 4"),
        ([((13, 5), 1), ((13, 5), 4)], r"\(13, 5\) in a micro-batch of 4 samples, and of \(13, 5\) in one of 1"),
        ([((9, 4, 5), 4)], r"shape \(9, 4, 5\) in a micro-batch of 4"),  # sequences first
        ([((13, 5), 4), ((11, 5), 4)], r"\(11, 5\) in a micro-batch of 4 samples, and of \(13, 5\)"),
        ([((13, 5), 4), ((3, 5), 3)], r"\(3, 5\) in a micro-batch of 3 samples, and of \(13, 5\)"),
    ],
)
def test_samples_that_do_not_lie_in_dimension_0(shapes: list[Any], text: str) -> None:
    module = nn.Dropout(0.5)
    with SampleDropout(0, [module]) as masks:
        for number, (shape, rows) in enumerate(shapes):
            masks.begin(range(rows))
            if number < len(shapes) - 1:
                module(torch.ones(shape))
        with pytest.raises(NotSplittable, match=text) as caught:
            module(torch.ones(shapes[-1][0]))
    assert "with the samples in dim 0" in str(caught.value)
    assert caught.value.modules == ("Dropout",)


@pytest.mark.parametrize(
    "shapes",
    [
        [((1, 5), 1), ((12, 5), 4)],  # tokens, flattened; one text of one token
        [((24, 5), 4), ((24, 5), 6), ((2, 5), 2)],  # packed to a number of tokens
        [((13, 5), 4), ((13, 5), 1), ((13, 5), 13)],  # weights
    ],
)
def test_sizes_that_fit_together(shapes: list[Any]) -> None:
    module = nn.Dropout(0.5)
    with SampleDropout(0, [module]) as masks:
        for shape, rows in shapes:
            masks.begin(range(rows))
            module(torch.ones(shape))


def test_weights_have_one_mask() -> None:
    module, other = nn.Dropout(0.5), nn.Dropout(0.5)
    with SampleDropout(0, [module, other]) as masks:
        drawn = []
        for rows in ([0, 1, 2, 3], [4, 5, 6], [7]):
            masks.begin(rows)
            drawn.append((module(torch.ones(13, 5)), other(nn.Parameter(torch.ones(12, 12)))))
    assert all(map(torch.equal, drawn[0], drawn[1]))
    assert all(map(torch.equal, drawn[0], drawn[2]))


def test_misuse() -> None:
    module = nn.Dropout(0.5)
    with SampleDropout(0, [module]) as masks:
        with pytest.raises(AnyBatchError, match="begin"):
            module(X)
        with pytest.raises(ValueError, match="expected indices"):
            masks.begin([0, -1])
        with pytest.raises(ValueError, match="stage"):
            masks.begin([0], stage=-1)
        masks.begin(range(4))
        with pytest.raises(NotSplittable, match="layout"):
            module(X.to_sparse())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
def test_compiled_models_drop_the_same() -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    compiled: Any = torch.compile(net, backend="eager")
    with SampleDropout(0, [net]) as masks:
        results = []
        for model in (net, compiled, compiled):
            masks.begin(range(4))
            results.append(model(X))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    torch._dynamo.reset()


def test_fakes() -> None:
    module = nn.Dropout(0.5)
    with FakeTensorMode(), SampleDropout(0, [module]) as masks:
        masks.begin([3, 1])
        x = torch.ones(2, 8, requires_grad=True)
        y: Any = checkpoint(module, x, use_reentrant=False)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (2, 8)


@pytest.mark.gpu
def test_the_masks_are_the_same_on_a_gpu() -> None:
    module = nn.Dropout(0.3)
    for shape in ((300, 4000), (2, 3, 900, 900)):
        kept = {}
        for device in ("cpu", "cuda"):
            x: Tensor = torch.ones(shape, device=device, requires_grad=True)
            with SampleDropout(5, [module]) as masks:
                masks.begin([*range(shape[0] - 1), 1000])
                y: Any = checkpoint(module, x, use_reentrant=False)
                y.sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad, y.detach())
            kept[device] = (y != 0).cpu()
        assert torch.equal(kept["cpu"], kept["cuda"])


@pytest.mark.gpu
def test_nothing_waits_for_a_gpu() -> None:
    x = torch.ones(4, 100, device="cuda", requires_grad=True)
    model = nn.Sequential(nn.Dropout2d(0.5), nn.Dropout(0.5))
    torch.cuda.set_sync_debug_mode("error")
    try:
        with SampleDropout(0, [model]) as masks:
            for rows in (range(4), [5, 9, 7, 4]):
                masks.begin(rows)
                model(x[..., None, None]).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
