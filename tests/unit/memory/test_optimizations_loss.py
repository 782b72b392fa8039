"""The loss in chunks is the loss, and so is its gradient."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import AnyBatchError
from anybatch.memory.losschunks import chunk_loss
from optimizations_classifier import Doubled, Model, Use, V, sample
from optimizations_models import Language, assert_near, language_loss, outcome, peak, texts
from reference import gradients_of


def huggingface(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    """As the losses of causal language models in Transformers are written."""
    logits = logits.to(torch.float64)
    labels = F.pad(y, (0, 1), value=options.get("ignore_index", -100))[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1).to(logits.device), **options)


def shifted(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    rows = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
    loss: Tensor = nn.CrossEntropyLoss(**options)(rows, y[..., 1:].contiguous().view(-1))
    return loss


USES: dict[str, Use] = {
    "flattened": lambda z, y, **o: F.cross_entropy(z.flatten(0, 1), y.flatten(), **o),
    "flattened by torch": lambda z, y, **o: F.cross_entropy(torch.flatten(z, end_dim=1), y.flatten(), **o),
    "transposed": lambda z, y, **o: F.cross_entropy(z.transpose(1, 2), y, **o),
    "permuted": lambda z, y, **o: F.cross_entropy(torch.permute(z, (0, 2, 1)).contiguous(), y, **o),
    "moved": lambda z, y, **o: F.cross_entropy(z.movedim(-1, 1), y, **o),
    "turned twice": lambda z, y, **o: F.cross_entropy(z.transpose(0, 1).transpose(-1, -2), y.t(), **o),
    "reshaped": lambda z, y, **o: F.cross_entropy(torch.reshape(z, (-1, V)), y.reshape(-1), **o),
    "unflattened": lambda z, y, **o: F.cross_entropy(z.view(2, 2, 3, V).permute(0, 3, 1, 2), y.view(2, 2, 3), **o),
    "selected": lambda z, y, **o: F.cross_entropy(z[y != 3], y[y != 3], **o),
    "last": lambda z, y, **o: F.cross_entropy(z[:, -1], y[:, -1], **o),
    "positions": lambda z, y, **o: F.cross_entropy(z[torch.tensor([2, 0])].flatten(0, 1), y[[2, 0]].flatten(), **o),
    "one row": lambda z, y, **o: F.cross_entropy(z[1, 2], y[1, 2], **o),
    "huggingface": huggingface,
    "shifted": shifted,
    "keywords": lambda z, y, **o: F.cross_entropy(target=y.view(-1), input=z.view(-1, V), **o),
}


CLASS_WEIGHTS = torch.linspace(0.1, 2, V, dtype=torch.float64)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"weight": CLASS_WEIGHTS},
    {"weight": CLASS_WEIGHTS, "label_smoothing": 0.3, "reduction": "sum"},
    {"ignore_index": 3},
    {"weight": CLASS_WEIGHTS, "ignore_index": 3, "label_smoothing": 0.2},
    {"ignore_index": 3, "label_smoothing": 0.2, "reduction": "none"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("use", USES)
def test_every_way_into_the_loss(use: str, options: dict[str, Any]) -> None:
    batch = sample()
    handles = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        loss = USES[use](model(batch["x"]), batch["y"], **options)
        assert type(loss) is Tensor
        factors = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
        return (loss * factors).sum() * 1.7

    for tied in (False, True):
        model = Model(tied=tied).double()
        plain = outcome(model, loss_fn, batch)
        for chunks in (1, 5, 40):

            def put(model: nn.Module, chunks: int = chunks) -> Any:
                handles.append(chunk_loss(model, "head", chunks))
                return handles[-1]

            assert_near(outcome(model, loss_fn, batch, put), plain)
            assert (handles[-1].taken, handles[-1].computed) == (1, 0)


def test_without_gradient() -> None:
    model, batch = Model().double(), sample()
    with torch.no_grad():
        plain = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"])
    with chunk_loss(model, "head", 3) as handle:
        with torch.no_grad():
            z = model(batch["x"])
            torch.testing.assert_close(F.cross_entropy(z.transpose(1, 2), batch["y"]), plain)
        assert not F.cross_entropy(z.transpose(1, 2), batch["y"]).requires_grad
        z = model(batch["x"])
        with torch.no_grad():
            assert not F.cross_entropy(z.transpose(1, 2), batch["y"]).requires_grad
            assert not z.softmax(-1).requires_grad
            assert z.view(-1, V).requires_grad  # torch's own views know their base even here
        with torch.inference_mode():
            F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"])
        assert handle.taken >= 1


@pytest.mark.parametrize("frozen", ["weight", "bias", "trunk", "all but weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    model, batch = Model().double(), sample()
    for name, parameter in model.named_parameters():
        is_head = name.startswith("head")
        parameter.requires_grad_(
            {
                "weight": name != "head.weight",
                "bias": name != "head.bias",
                "trunk": is_head,
                "all but weight": name == "head.weight",
            }[frozen]
        )

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"], label_smoothing=0.1)

    assert_near(outcome(model, loss_fn, batch, lambda m: chunk_loss(m, "head", 3)), outcome(model, loss_fn, batch))


def test_nothing_counts() -> None:
    """The loss is NaN as in torch, the gradient is 0."""
    model, batch = Model().double(), sample()
    batch["y"][:] = -100
    found = []
    for chunks in (0, 3):
        ours = copy.deepcopy(model)
        handle = chunk_loss(ours, "head", chunks) if chunks else None
        loss = F.cross_entropy(ours(batch["x"]).flatten(0, 1), batch["y"].flatten())
        assert bool(loss.isnan())
        loss.backward()
        found.append([p.grad for p in ours.parameters()])
        assert handle is None or handle.taken == 1
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [V, -1])
def test_a_class_that_there_is_not_is_refused(bad: int) -> None:
    model, batch = Model(), sample()
    batch["y"][1, 1] = bad
    with chunk_loss(model, "head", 3), pytest.raises((IndexError, RuntimeError)):
        F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["autocast", "autocast and float", "parameters", "parameters and float"])
def test_low_precision_is_as_good_as_without(dtype: torch.dtype, how: str) -> None:
    """The error against float64 is at most twice that of the ordinary way."""
    torch.manual_seed(1)
    exact = Model().double()
    batch = {"x": torch.randint(0, V, (64, 3)), "y": torch.randint(0, V, (64, 3))}

    def loss_fn(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled="autocast" in how):
            z = model(batch["x"])
            z = z.float() if "float" in how.split() else z
            return F.cross_entropy(z.view(-1, V), batch["y"].view(-1))

    model = copy.deepcopy(exact).to(dtype if "parameters" in how else torch.float32)
    truth = outcome(exact, lambda m, b: F.cross_entropy(m(b["x"]).view(-1, V), b["y"].view(-1)), batch)
    handles = []

    def put(model: nn.Module) -> Any:
        handles.append(chunk_loss(model, "head", 4))
        return handles[-1]

    plain, found = outcome(model, loss_fn, batch), outcome(model, loss_fn, batch, put)
    assert handles[0].taken == 1
    assert found["loss"].dtype == plain["loss"].dtype

    def error(which: dict[str, Any], names: list[str]) -> float:
        return float(sum(float((which[n].double() - truth[n]).square().sum()) for n in names) ** 0.5)

    names = [n for n in truth if n.startswith("gradient")]
    assert all(found[n].dtype == plain[n].dtype for n in names)
    assert error(found, names) <= 2 * error(plain, names)
    assert (
        abs(float(found["loss"]) - float(truth["loss"])) <= 2 * abs(float(plain["loss"]) - float(truth["loss"])) + 1e-6
    )


def test_the_scale_of_a_scaler_reaches_the_float16_gradient() -> None:
    """With so many rows the gradients of the logits are below what float16 can hold, unless they are scaled."""
    torch.manual_seed(1)
    rows = 1 << 18
    head, hidden = nn.Linear(4, 3).half(), torch.randn(rows, 4).half()
    y = torch.randint(0, 3, (rows,))
    x, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    (F.cross_entropy(copy.deepcopy(head).double()(exact), y) * 2.0**14).backward()
    with chunk_loss(nn.ModuleList([head]), "0", 4) as handle:
        (F.cross_entropy(head(x), y) * 2.0**14).backward()
    assert handle.taken == 1
    assert x.grad is not None
    assert exact.grad is not None
    assert float((x.grad.double() - exact.grad).norm()) <= 0.005 * float(exact.grad.norm())


def test_every_cast_rounds() -> None:
    model, batch = Model(), sample()

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]).bfloat16().double().view(-1, V), batch["y"].view(-1))

    assert_near(
        outcome(model, loss_fn, batch, lambda m: chunk_loss(m, "head", 3)), outcome(model, loss_fn, batch), 1e-6
    )


def test_many_chunks_of_low_precision_are_added_up_in_float32() -> None:
    torch.manual_seed(1)
    head, hidden = nn.Linear(4, 3).bfloat16(), torch.randn(4096, 4).bfloat16()
    y = torch.randint(0, 3, (4096,))
    exact = copy.deepcopy(head).double()
    F.cross_entropy(exact(hidden.double()), y).backward()
    errors = []
    for chunks in (0, 256):
        ours = copy.deepcopy(head)
        handle = chunk_loss(nn.ModuleList([ours]), "0", chunks) if chunks else None
        F.cross_entropy(ours(hidden), y).backward()
        assert handle is None or handle.taken == 1
        pairs = zip(gradients_of(ours), gradients_of(exact), strict=True)
        errors.append([float((a.double() - b).norm()) for a, b in pairs if a is not None and b is not None])
    assert all(found <= 2 * plain for plain, found in zip(*errors, strict=True)), errors


def test_a_loss_is_differentiated_once() -> None:
    model, batch = Model(), sample()
    with chunk_loss(model, "head", 3):
        loss = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
        loss.backward(retain_graph=True)
        with pytest.raises(AnyBatchError, match="differentiated twice"):
            loss.backward()
        for z in (model(batch["x"]), Doubled.apply(model(batch["x"]))):  # type: ignore[no-untyped-call]
            loss = F.cross_entropy(z.flatten(0, 1), batch["y"].flatten())
            with pytest.raises(AnyBatchError, match="create_graph=True"):
                torch.autograd.grad(loss, model.line.weight, create_graph=True)


def several(model: Any, batch: Any) -> Any:
    z = model(batch["x"])
    return {"one": F.cross_entropy(z[:, 0], batch["y"][:, 0]), "rest": F.cross_entropy(z[:, 1:].mT, batch["y"][:, 1:])}


def yielded(model: Any, batch: Any) -> Any:
    with anybatch.cut(model.line(model.tokens(batch["x"])).tanh()) as hidden:
        for at in range(3):
            yield f"at {at}", F.cross_entropy(model.head(hidden[:, at]), batch["y"][:, at])


def cut_logits(model: Any, batch: Any) -> Any:
    with anybatch.cut(model(batch["x"])) as z:
        for at in range(3):
            yield f"at {at}", F.cross_entropy(z[:, at], batch["y"][:, at])


def a_mean(model: Any, batch: Any) -> Any:
    total = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum", ignore_index=3)
    return anybatch.Mean(total, (batch["y"] != 3).sum())


@pytest.mark.parametrize("loss_fn", [several, yielded, cut_logits, a_mean])
@pytest.mark.parametrize("size", [None, 2, 3])
def test_under_backward(loss_fn: Any, size: int | None) -> None:
    model, batch = Model(tied=True).double(), sample(5)
    found = []
    for chunks in (0, 3):
        ours = copy.deepcopy(model)
        handle = chunk_loss(ours, "head", chunks) if chunks else None
        out = anybatch.backward(ours, loss_fn, batch, micro_batch_size=size, verify="off")  # a proof counts, too
        grads = {f"gradient {n}": p.grad for n, p in ours.named_parameters()}
        found.append({"loss": torch.tensor(out.loss, dtype=torch.float64), **grads})
        if handle is not None:
            assert (handle.taken > 0) == (loss_fn is not cut_logits)
    assert_near(found[1], found[0])


def test_the_peak_is_that_of_a_chunk() -> None:
    torch.manual_seed(0)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.head = nn.Linear(4, 4), nn.Linear(4, 2000)

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.head(self.line(x))
            return z

    batch = {"x": torch.randn(256, 4), "y": torch.randint(0, 2000, (256,))}

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    logits = 256 * 2000 * 4
    plain = peak(Wide(), loss_fn, batch)
    assert plain >= 3 * logits
    for chunks in (4, 16):
        found = peak(Wide(), loss_fn, batch, lambda m, c=chunks: chunk_loss(m, "head", c))  # type: ignore[misc]
        assert found <= 2.2 * logits / chunks + 2 * 2000 * 5 * 4


def test_the_language_model_with_a_tied_head() -> None:
    model, batch = Language().double(), texts()
    handles = []

    def put(model: nn.Module) -> Any:
        handles.append(chunk_loss(model, "head", 7))
        return handles[-1]

    assert_near(outcome(model, language_loss, batch, put), outcome(model, language_loss, batch))
    assert handles[0].taken == 1
