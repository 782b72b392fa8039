"""Modules, hooks, buffers and random numbers: who couples the samples, and what only seems to."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch import Certificate, check
from anybatch.records.certificates import Reason
from anybatch.testing import assert_exact

Batch = dict[str, Any]
RELATIVE_FLOAT64 = 1e-10


def vectors(rows: int = 8) -> Batch:
    return {"x": torch.randn(rows, 5), "y": torch.randint(0, 3, (rows,))}


def sequences(rows: int = 8) -> Batch:
    return {"x": torch.randn(rows, 4, 5), "y": torch.randint(0, 3, (rows,))}


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def only_reason(certificate: Certificate) -> Reason:
    assert len(certificate.reasons) == 1, certificate
    return certificate.reasons[0]


class Calls(nn.Module):
    """A module whose forward is a function, with submodules by name."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


# The module that couples the samples is named; what lies behind it is not.


def test_a_recurrent_network_that_takes_samples_for_time_is_named_with_its_remedy() -> None:
    model = Calls(
        lambda m, x: m.head(m.recurrent(m.embedding(x))[0][:, -1]),
        embedding=nn.Linear(5, 6), recurrent=nn.GRU(6, 8), head=nn.Linear(8, 3),
    )  # fmt: skip
    reason = only_reason(check(model, cross_entropy, sequences()))
    assert (reason.code, reason.where) == ("module", "recurrent")
    assert reason.remedy == "GRU(..., batch_first=True)"
    model.recurrent = nn.GRU(6, 8, batch_first=True)
    assert_exact(model, cross_entropy, sequences())


def test_attention_over_the_batch_is_named_also_under_dropout() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(5, 8), encoder, nn.Flatten(), nn.Linear(32, 3))
    reason = only_reason(check(model, cross_entropy, sequences()))
    assert (reason.code, reason.where) == ("module", "1.layers.0.self_attn")


def test_a_coupling_between_modules_is_laid_to_the_innermost_that_encloses_it() -> None:
    inner = Calls(
        lambda m, x: m.head((h := m.block(x)) - h.mean(0)),
        block=nn.Sequential(nn.Linear(5, 6), nn.Tanh()), head=nn.Linear(6, 3),
    )  # fmt: skip
    model = Calls(lambda m, x: m.after(m.net(m.before(x))), before=nn.Linear(5, 5), net=inner, after=nn.Linear(3, 3))
    assert only_reason(check(model, cross_entropy, vectors())).where == "net"
    outermost = Calls(lambda m, x: m.head(x - x.mean(0)), head=nn.Linear(5, 3))
    assert "The model's own forward" in only_reason(check(outermost, cross_entropy, vectors())).message


def test_a_module_that_only_orders_the_samples_anew_is_not_named() -> None:
    model = Calls(
        lambda m, x: m.couples(m.orders(x)).view(4, -1, 3).mean(0),
        orders=Calls(lambda m, x: m.linear(x.transpose(0, 1).reshape(-1, 5)), linear=nn.Linear(5, 5)),
        couples=Calls(lambda m, x: m.linear(x - x.mean(0)), linear=nn.Linear(5, 3)),
    )
    assert only_reason(check(model, cross_entropy, sequences())).where == "couples"


def test_two_modules_that_couple_side_by_side_are_both_named() -> None:
    def centred(module: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module.linear(x)
        return result - result.mean(0)

    model = Calls(
        lambda m, x: m.left(x) + m.right(x) + m.plain(x),
        left=Calls(centred, linear=nn.Linear(5, 3)), right=Calls(centred, linear=nn.Linear(5, 3)),
        plain=nn.Linear(5, 3),
    )  # fmt: skip
    certificate = check(model, cross_entropy, vectors())
    assert [(reason.code, reason.where) for reason in certificate.reasons] == [("module", "left"), ("module", "right")]


def test_a_module_that_only_the_loss_reaches_is_named_by_its_place_in_the_code() -> None:
    projection = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        result: torch.Tensor = projection(model(batch["x"])).tanh().pow(2).mean()
        return result

    assert only_reason(check(nn.Linear(5, 3), loss_fn, vectors())).where == "projection.1"


@pytest.mark.parametrize("layout", ["time first", "samples and time joined", "time and samples joined"])
def test_where_the_samples_lie_in_a_module_does_not_matter(layout: str) -> None:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        if layout == "time first":
            return module.head(module.drop(module.recurrent(x.transpose(0, 1))[0])[-1])  # type: ignore[no-any-return]
        first, last = x.shape[:2] if layout == "samples and time joined" else (x.size(1), x.size(0))
        joined = x.reshape(-1, 5) if first == len(x) else x.transpose(0, 1).reshape(-1, 5)
        each = module.wide(module.drop(joined)).view(first, last, 3)
        return each.mean(1 if first == len(x) else 0)  # type: ignore[no-any-return]

    model = Calls(
        forward,
        recurrent=nn.LSTM(5, 6, 2, dropout=0.3),
        drop=nn.Dropout(0.3),
        head=nn.Linear(6, 3),
        wide=nn.Linear(5, 3),
    )
    certificate = assert_exact(model, cross_entropy, sequences(7))
    assert [note.code for note in certificate.notes] == ["random"]


# Hooks and backwards that are not linear.


def test_a_hook_that_clips_is_named_and_one_that_scales_is_exact() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    handle = model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    reason = only_reason(check(model, cross_entropy, vectors()))
    assert (reason.code, reason.where) == ("hook", "parameter 0.weight")
    assert reason.evidence["error_without_hooks"] < RELATIVE_FLOAT64
    assert "clip_norm" in reason.remedy
    handle.remove()
    model[0].weight.register_hook(lambda gradient: gradient / 2)
    assert_exact(model, cross_entropy, vectors())


def test_a_backward_hook_on_a_module_that_clips_is_named() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def normalise(module: nn.Module, gradients: Any, _: Any) -> tuple[torch.Tensor, ...]:
        return tuple(gradient / gradient.norm() for gradient in gradients)

    model[1].register_full_backward_hook(normalise)
    assert only_reason(check(model, cross_entropy, vectors())).where == "1"


def test_a_hook_on_a_tensor_that_normalises_is_located() -> None:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = module.second(module.first(x).tanh())
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / gradient.norm())
        return module.head(hidden.tanh())  # type: ignore[no-any-return]

    model = Calls(forward, first=nn.Linear(5, 6), second=nn.Linear(6, 6), head=nn.Linear(6, 3))
    reason = only_reason(check(model, cross_entropy, vectors()))
    assert (reason.code, reason.where) == ("backward", "second")


class AddsGradient(torch.autograd.Function):
    """Sends a gradient of one to its second argument whatever comes back, as some auxiliary losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, auxiliary: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.ones((), dtype=gradient.dtype)


def test_an_auxiliary_loss_that_comes_in_by_the_backward_is_located() -> None:
    adds_gradient: Any = AddsGradient.apply
    model = Calls(
        lambda m, x: m.head(adds_gradient((h := m.first(x).tanh()), m.gate(h).softmax(-1).mean(0).pow(2).sum())),
        first=nn.Linear(5, 6), gate=nn.Linear(6, 2), head=nn.Linear(6, 3),
    )  # fmt: skip
    reason = only_reason(check(model, cross_entropy, vectors()))
    assert (reason.code, reason.where) == ("backward", "gate")


def test_a_hook_after_accumulation_is_off_during_the_check_and_is_a_reason() -> None:
    model = nn.Linear(5, 3)
    fired: list[int] = []
    model.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(1))
    reason = only_reason(check(model, cross_entropy, vectors()))
    assert (reason.code, reason.where, fired) == ("hook", "weight", [])
    cross_entropy(model, vectors()).backward()
    assert fired == [1]


# Buffers.


def test_a_buffer_that_goes_over_to_the_next_micro_batch_is_a_reason() -> None:
    def scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.size.mul_(0.9)
        out: torch.Tensor = m.head(x * m.size.clone())
        return out

    model: Any = Calls(scaled, head=nn.Linear(5, 3))
    model.register_buffer("size", torch.ones(()))
    reason = only_reason(check(model, cross_entropy, vectors()))
    assert (reason.code, reason.where) == ("buffer", "size")
    assert reason.evidence["error"] > 1e-6


def test_a_buffer_that_only_counts_is_a_note() -> None:
    model: Any = Calls(lambda m, x: (m.seen.add_(len(x)), m.head(x))[1], head=nn.Linear(5, 3))
    model.register_buffer("seen", torch.zeros(()))
    certificate = assert_exact(model, cross_entropy, vectors())
    assert [(note.code, note.where) for note in certificate.notes] == [("buffer", "seen")]
    assert model.seen.item() == 0


# Where a check can't run as it would like to.


def test_a_part_that_fails_is_a_reason() -> None:
    def squeezed(model: nn.Module, batch: Batch) -> torch.Tensor:
        return torch.stack(list(model(batch["x"]).squeeze())).pow(2).mean()

    reason = only_reason(check(nn.Linear(5, 1), squeezed, vectors(5), micro_batch_size=2))
    assert reason.code == "fails"
    assert reason.evidence == {"error": "TypeError", "smallest_micro_batch": 1}


def test_the_largest_part_that_fits_is_checked() -> None:
    def limited(model: nn.Module, batch: Batch) -> torch.Tensor:
        if len(batch["x"]) > 30:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return cross_entropy(model, batch)

    certificate = assert_exact(nn.Linear(5, 3), limited, vectors(100))
    assert (certificate.samples, certificate.samples_in_batch) == (25, 100)
    assert certificate.notes[0].code == "part-of-batch"

    def never(model: nn.Module, batch: Batch) -> torch.Tensor:
        raise MemoryError(f"no room for {model}")

    with pytest.raises(anybatch.DoesNotFit, match="no room"):
        check(nn.Linear(5, 3), never, vectors(9))


def test_a_model_that_can_not_run_in_float64_is_checked_in_its_own_precision() -> None:
    def float32_only(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(batch["x"])
        if logits.dtype is not torch.float32:
            raise TypeError("the kernel takes float32")
        return F.cross_entropy(logits, batch["y"])

    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 3))
    certificate = assert_exact(model, float32_only, vectors(50))
    assert certificate.dtype == "float32"
    assert 1e-7 < certificate.tolerance < 1e-4
    assert "the kernel takes float32" in certificate.notes[0].message
    wrong = {**vectors(), "y": torch.tensor([0, 1, -100, -100, -100, 2, 0, 1])}
    assert only_reason(check(model, float32_only, wrong)).remedy == 'count=anybatch.count_tokens("y")'


def float32_only(model: nn.Module, batch: Batch) -> torch.Tensor:
    if batch["x"].dtype is not torch.float32:
        raise TypeError("the kernel takes float32")
    return F.mse_loss(model(batch["x"]), batch["t"])


def wide(rows: int = 32) -> Batch:
    return {"x": torch.randn(rows, 512), "t": torch.randn(rows, 3)}


def chaotic(gain: float) -> nn.Module:
    """A recurrent network of which rounding grows in each of its steps."""
    recurrent = nn.Linear(256, 256)
    nn.init.orthogonal_(recurrent.weight, gain)

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = model.first(x).tanh()
        for _ in range(50):
            hidden = model.recurrent(hidden).tanh()
        result: torch.Tensor = model.head(hidden)
        return result

    return Calls(forward, first=nn.Linear(512, 256), recurrent=recurrent, head=nn.Linear(256, 3))


def test_rounding_that_a_model_lets_grow_is_no_reason_in_its_own_precision() -> None:
    sharp = Calls(lambda m, x: m.head((300 * m.first(x)).sin()), first=nn.Linear(512, 256), head=nn.Linear(256, 3))
    normed = [part for _ in range(60) for part in (nn.Linear(128, 128), nn.LayerNorm(128), nn.Tanh())]
    for model in (sharp, nn.Sequential(nn.Linear(512, 128), *normed, nn.Linear(128, 3)), chaotic(1.5)):
        certificate = check(model, float32_only, wide(), micro_batch_size=1)
        assert certificate.exact, certificate
        assert certificate.dtype == "float32"


def test_no_module_is_blamed_where_rounding_alone_may_be_the_cause() -> None:
    reason = only_reason(check(chaotic(3.0), float32_only, wide(12), micro_batch_size=1))
    assert "can't be told from another cause" in reason.message

    def ratio(model: nn.Module, batch: Batch) -> torch.Tensor:
        output: torch.Tensor = model(batch["x"])
        return float32_only(model, batch) / output.std()

    assert only_reason(check(chaotic(3.0), ratio, wide(12), micro_batch_size=1)).code == "not-additive"


def test_a_module_that_couples_is_named_in_its_own_precision() -> None:
    model = Calls(
        lambda m, x: m.head(m.recurrent(x.unflatten(1, (4, 128)))[0][:, -1]),
        recurrent=nn.GRU(128, 8), head=nn.Linear(8, 3),
    )  # fmt: skip
    reason = only_reason(check(model, float32_only, wide()))
    assert (reason.code, reason.where) == ("module", "recurrent")


def test_float32_within_the_model_is_no_rounding_error() -> None:
    weights = torch.tensor([1.0, 1.0, 1.0])

    def casts(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits, rows = model(batch["x"]).float(), torch.zeros(len(batch["x"]), 3)
        for row in range(len(rows)):
            rows[row] = logits[row].to(torch.bfloat16)
        rows = torch.empty(rows.shape, dtype=torch.float32).copy_(rows)
        total = torch.tensor(0.0)
        total += F.cross_entropy(F.log_softmax(rows, 1, dtype=torch.float32), batch["y"], weight=weights)
        return total

    for model in (nn.Linear(5, 3), nn.Linear(5, 3).bfloat16()):
        certificate = assert_exact(model, lambda m, b: casts(m, {**b, "x": b["x"].to(m.weight.dtype)}), vectors())
        assert certificate.dtype == "float64"
        assert certificate.error < RELATIVE_FLOAT64


def test_evaluation_mode_and_a_single_split_are_noted() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)).eval()
    assert [note.code for note in check(model, cross_entropy, vectors(2)).notes] == ["evaluation-mode", "one-split"]


def test_a_compiled_model_a_window_and_sparse_gradients_are_checked() -> None:
    compiled: Any = torch.compile(nn.Linear(5, 3), backend="eager")
    assert_exact(compiled, cross_entropy, vectors())
    window = next(anybatch.windows([vectors(4), vectors(6), vectors(2)], batches=3))
    assert assert_exact(nn.Linear(5, 3), cross_entropy, window).samples == 6
    bag = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True), nn.Linear(4, 3))
    assert_exact(bag, cross_entropy, {"x": torch.randint(0, 20, (8, 6)), "y": torch.randint(0, 3, (8,))})


class Padding(nn.Module):
    """Pads images to the largest that run together, as detectors do."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4) if norm else nn.Identity())

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        height, width = (max(one.shape[dim] for one in images) for dim in (1, 2))
        whole = [F.pad(one, (0, width - one.shape[2], 0, height - one.shape[1])) for one in images]
        found: torch.Tensor = self.body(torch.stack(whole))
        kept = [
            one[:, : image.shape[1], : image.shape[2]].mean((1, 2)) for one, image in zip(found, images, strict=True)
        ]
        return torch.stack(kept)


def pictures(sizes: Sequence[int]) -> dict[str, Any]:
    torch.manual_seed(1)
    return {"images": [torch.randn(3, n, 2 * n) for n in sizes], "t": torch.randn(len(sizes), 4)}


def test_images_that_the_model_pads_to_the_largest_of_a_micro_batch() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return (model(batch["images"]) - batch["t"]).square().mean()

    batch = pictures((4, 6, 8, 5, 7, 4, 9, 5))
    (found,) = anybatch.check(Padding(norm=True), loss_fn, batch).reasons
    assert (found.code, found.where) == ("padding", "model")
    assert "batch['images'][0] and the others have several sizes" in found.message
    images, height, width = batch["images"], 9, 18
    images = eval(found.remedy.partition("= ")[2], {"F": F, "images": images, "height": height, "width": width})
    assert anybatch.check(Padding(norm=True), loss_fn, {**batch, "images": images}).exact
    assert anybatch.check(Padding(norm=False), loss_fn, batch).exact


def test_images_of_several_sizes_are_not_the_cause_of_everything() -> None:
    def ratio(model: Any, batch: Any) -> Any:
        out = model(batch["images"])
        return out.square().sum() / (out - batch["t"]).abs().sum()

    (found,) = anybatch.check(Padding(norm=False), ratio, pictures((4, 6, 8, 5, 7, 4, 9, 5))).reasons
    assert found.code == "not-additive"
