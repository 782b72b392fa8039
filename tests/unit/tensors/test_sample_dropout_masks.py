"""The masks themselves: the formula, how random they are, and that they are used as torch uses its own."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.memory.measuring import measure
from anybatch.tensors.dropouts import SampleDropout, keys_of, mask_of, mixed

M64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
CPU = torch.device("cpu")
Z = 5.0  # of a normal number: one in two millions


def masks_of(calls: Sequence[int], rows: int, places: int, seed: int = 0, keep: float = 0.5) -> Tensor:
    """Masks of shape ``[calls, rows, places]``, as bool."""
    drawn = [mask_of((rows, places), keys_of(seed, call, range(rows), CPU), keep) for call in calls]
    return torch.stack(drawn).bool()


def signs(bits: Tensor) -> Tensor:
    return bits.double().mul_(2).sub_(1)


def by_hand(seed: int, call: int, sample: int, position: Sequence[int], keep: float) -> bool:
    """The formula in Python's integers."""

    def shifted(number: int, by: int) -> int:  # of a signed number
        return ((number ^ (1 << 63)) - (1 << 63) >> by) & M64

    own = sample * GOLDEN & M64
    first, second = (mixed(mixed((2 * call + which) * GOLDEN + mixed(seed)) ^ own) for which in (0, 1))
    x = sum(place * (mixed(dim + 1) | 1) for dim, place in enumerate(position)) & M64
    x = (x ^ shifted(x, 32)) * 0xBF58476D1CE4E5B9 & M64
    x ^= shifted(x, 29)
    value = (x ^ first) * (second | 1) & M64
    return ((value ^ (1 << 63)) - (1 << 63)) < round(keep * 2**64) - 2**63


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 + 11])
@pytest.mark.parametrize("call", [0, 40, 2**32])
def test_the_formula(seed: int, call: int) -> None:
    samples = (3, 10**12, 0)
    keys = keys_of(seed, call, samples, CPU)
    mask = mask_of((3, 5, 6), keys, 0.7)
    places = ((row, a, b) for row in range(3) for a in range(5) for b in range(6))
    for (row, a, b), bit in zip(places, mask.flatten(), strict=True):
        assert bool(bit) == by_hand(seed, call, samples[row], (0, a, b), 0.7)
    flat = mask_of((6, 4), keys, 0.7)
    assert all(
        bool(flat[2 * row + t, h]) == by_hand(seed, call, samples[row], (t, h), 0.7)
        for row in range(3) for t in range(2) for h in range(4)
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 40_000), (2, 5, 9000), (40_000, 3), (7, 2, 3, 5000), (100_003,), (1, 70, 1000)])
def test_large_tensors_are_made_in_slices_that_join(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(0, 0, range(shape[0]), CPU)
    whole = mask_of(shape, keys, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr("anybatch.tensors.dropouts._AT_ONCE_ON_CPU", 777)
        small = mask_of(shape, keys, 0.5) if math.prod(shape) < 2e5 else whole
    with monkeypatch.context() as patch:
        patch.setattr("anybatch.tensors.dropouts._AT_ONCE_ON_CPU", 2**22)
        assert torch.equal(mask_of(shape, keys, 0.5), whole)
    assert torch.equal(small, whole)


@pytest.mark.parametrize("keep", [1e-5, 0.01, 0.1, 0.5, 0.7, 0.9, 0.999, 1 - 2**-53])
def test_the_share_of_ones(keep: float) -> None:
    mask = masks_of(range(4), 64, 16384, seed=7, keep=keep)
    deviation = (keep * (1 - keep) * mask.numel()) ** 0.5
    assert abs(int(mask.sum()) - keep * mask.numel()) <= Z * deviation + 1


DRAWS: dict[str, Callable[[], Tensor]] = {  # bits, neighbours in the last dimension
    "positions": lambda: masks_of(range(2), 32, 8192),
    "positions of one sample": lambda: masks_of([3], 1, 2**18),
    "samples": lambda: masks_of(range(2), 8192, 32).transpose(1, 2).contiguous(),
    "calls": lambda: masks_of(range(1024), 16, 16).permute(1, 2, 0).contiguous(),
    "seeds": lambda: torch.stack([masks_of([0], 8, 64, seed)[0] for seed in range(512)], -1).contiguous(),
    "powers of two as seeds": lambda: torch.stack(
        [masks_of([0], 64, 64, 1 << n)[0] for n in range(64)], -1
    ).contiguous(),
    "rows of a picture": lambda: (
        mask_of((8, 256, 256), keys_of(5, 1, range(8), CPU), 0.5).bool().transpose(1, 2).contiguous()
    ),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_eight_neighbours_take_all_patterns_equally_often(draw: str) -> None:
    bits = DRAWS[draw]().reshape(-1, 8)
    patterns = (bits.long() << torch.arange(8)).sum(1)
    counts, expected = torch.bincount(patterns, minlength=256).double(), len(patterns) / 256
    chi_square = float(((counts - expected).square() / expected).sum())
    assert abs(chi_square - 255) <= Z * (2 * 255) ** 0.5


@pytest.mark.parametrize("draw", DRAWS)
def test_no_correlation_at_any_distance(draw: str) -> None:
    values = signs(DRAWS[draw]()).flatten(0, -2)
    for lag in (*range(1, 34), 48, 63):
        if lag < values.shape[1]:
            products = values[:, lag:] * values[:, :-lag]
            assert abs(float(products.sum())) <= Z * products.numel() ** 0.5


@pytest.mark.parametrize("draw", ["samples", "positions", "calls"])
def test_all_pairs_are_uncorrelated(draw: str) -> None:
    masks = {
        "samples": lambda: masks_of([2], 256, 4096)[0],
        "positions": lambda: masks_of([2], 4096, 256)[0].T,
        "calls": lambda: masks_of(range(256), 16, 256).flatten(1),
    }[draw]()
    values = signs(masks)
    scores = (values @ values.T / values.shape[1] ** 0.5)[*torch.triu_indices(256, 256, 1)]
    assert float(scores.abs().max()) <= 5.6  # of 32640 scores
    spread = float((scores.square() - 1).sum() / (2 * len(scores)) ** 0.5)
    assert abs(spread) <= Z


def test_rectangles_are_uncorrelated() -> None:
    """Two samples and two positions: what goes wrong if a sample's number and a position's are merely combined."""
    values = signs(masks_of([0, 1], 128, 2048))
    products = values[:, :-1] * values[:, 1:]
    squares = products[..., :-1] * products[..., 1:]
    assert abs(float(squares.sum())) <= Z * squares.numel() ** 0.5
    between_calls = values[0] * values[1]
    assert abs(float((between_calls[:-1] * between_calls[1:]).sum())) <= Z * between_calls[1:].numel() ** 0.5


@pytest.mark.parametrize("calls", [[0], range(256)])
def test_masks_are_not_linear(calls: Sequence[int]) -> None:
    """A square matrix of random bits has a rank over GF(2) of at most three less than its size."""
    matrix = masks_of([0], 256, 256)[0] if len(calls) == 1 else masks_of(calls, 1, 256)[:, 0]
    rows = [int("".join("1" if bit else "0" for bit in row), 2) for row in matrix.tolist()]
    rank = 0
    while rows:
        pivot = rows.pop()
        if pivot:
            rank += 1
            low = pivot & -pivot
            rows = [row ^ pivot if row & low else row for row in rows]
    assert rank >= 252


def on(rows: int, module: nn.Module, x: Tensor, seed: int = 0) -> Any:
    with SampleDropout(seed, [module]) as masks:
        masks.begin(range(rows))
        return module(x)


ELEMENTS: dict[str, Callable[..., nn.Module]] = {
    "nn.Dropout": nn.Dropout,
    "in place": lambda p: nn.Sequential(Cloned(), nn.Dropout(p, inplace=True)),
}


class Cloned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


class Reshaped(nn.Module):
    """Runs a module on another shape of its input.

    Args:
        module: drops channels.
        reshape: gives the other shape.
    """

    def __init__(self, module: nn.Module, reshape: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.reshape = module, reshape

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(self.reshape(x))
        return y.view(x.shape)


FEATURES: dict[str, Callable[..., nn.Module]] = {
    "2d": nn.Dropout2d,
    "2d in place": lambda p: nn.Sequential(Cloned(), nn.Dropout2d(p, inplace=True)),
    "1d": lambda p: Reshaped(nn.Dropout1d(p), lambda x: x.flatten(2)),
    "3d": lambda p: Reshaped(nn.Dropout3d(p), lambda x: x.unsqueeze(2)),
}
ALPHAS: dict[str, Callable[..., nn.Module]] = {
    "nn.AlphaDropout": nn.AlphaDropout,
    "in place": lambda p: nn.Sequential(Cloned(), nn.AlphaDropout(p, inplace=True)),
}
ALPHA_FEATURES: dict[str, Callable[..., nn.Module]] = {
    "nn.FeatureAlphaDropout": nn.FeatureAlphaDropout,
    "in place": lambda p: nn.Sequential(Cloned(), nn.FeatureAlphaDropout(p, inplace=True)),
}


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("make", ELEMENTS.values(), ids=ELEMENTS)
def test_elements_are_scaled_as_by_torch(make: Any, rate: float) -> None:
    x = torch.randn(8, 50, dtype=torch.float64, requires_grad=True)
    y = on(8, make(rate), x)
    kept = y != 0
    assert torch.equal(kept, masks_of([0], 8, 50, keep=1 - rate)[0])
    assert torch.allclose(y, x * kept / (1 - rate), rtol=1e-15, atol=0)
    y.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, kept.double() / (1 - rate), rtol=1e-15, atol=0)


@pytest.mark.parametrize("kinds", [FEATURES, ALPHA_FEATURES, ALPHAS], ids=["features", "alpha features", "alpha"])
def test_other_kinds_do_what_torch_does_with_such_a_mask(kinds: Any) -> None:
    """Each element is one of the two values that torch gives it, and the same for all modules of the kind."""
    x = torch.randn(6, 40, 3, 2, dtype=torch.float64, requires_grad=True)
    theirs = next(iter(kinds.values()))(0.3)
    either = torch.stack([theirs(x) for _ in range(60)]).detach()
    low, high = either.min(0).values, either.max(0).values
    results = []
    for make in kinds.values():
        y = on(6, make(0.3), x)
        assert bool((torch.isclose(y, low, rtol=1e-12) | torch.isclose(y, high, rtol=1e-12)).all())
        (gradient,) = torch.autograd.grad(y.sum(), x)
        results.append(torch.stack([y.detach(), gradient]))
    assert all(torch.allclose(result, results[0], rtol=1e-12) for result in results)
    whole_channels = results[0][1].flatten(2).var(2).max() == 0
    assert bool(whole_channels) == (kinds is not ALPHAS)
    assert 0.1 < float((results[0][1] == 0).double().mean()) < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_the_mask_does_not_depend_on_the_precision(dtype: torch.dtype) -> None:
    y = on(3, nn.Dropout(0.1), torch.ones(3, 40, dtype=dtype))
    assert y.dtype == dtype
    assert torch.equal(y != 0, masks_of([0], 3, 40, keep=0.9)[0])
    kept = y[y != 0]
    assert torch.allclose(kept.to(torch.complex128), torch.tensor(1 / 0.9, dtype=torch.complex128), rtol=4e-3)


def test_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = on(3, model, torch.randn(3, 5))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_nothing_random_is_left_to_torch(rate: float) -> None:
    x = torch.randn(3, 4)
    before = torch.get_rng_state()
    assert torch.equal(on(3, nn.Dropout(rate), x), x * (1 - rate))
    assert torch.equal(on(3, nn.Dropout(0.5).eval(), x), x)
    assert torch.equal(on(3, nn.AlphaDropout(0.5).eval(), x), x)
    assert on(3, nn.Dropout2d(0.5).eval(), x[:, :, None, None]).shape == (3, 4, 1, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_torch_refuses_is_refused_in_the_same_words() -> None:
    leaf = torch.ones(3, 4, requires_grad=True)
    wrongs: list[tuple[nn.Module, Tensor]] = [
        (nn.Dropout(0.5, inplace=True), leaf),
        (nn.Dropout1d(0.5), torch.ones(3)),
        (nn.Dropout3d(0.5), torch.ones(3, 3)),
        (nn.Dropout(0.5), torch.ones(3, 4, dtype=torch.int64)),
    ]
    for module, x in wrongs:
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            module(x)
        with pytest.raises(type(theirs.value)) as ours:
            on(3, module, x)
        assert str(ours.value) == str(theirs.value)
    with pytest.warns(UserWarning, match="dropout2d: Received a 3D input"):
        on(3, nn.Dropout2d(0.5), torch.ones(3, 4, 5))


IN_PLACE = [nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout]


@pytest.mark.parametrize("kind", IN_PLACE)
def test_in_place_is_in_place(kind: Any) -> None:
    x = torch.ones(6, 20, 3, 2)
    assert on(6, kind(0.5, inplace=True), x) is x
    assert len(x.unique()) == 2


def test_samples_alone_without_a_dimension_for_them() -> None:
    for module, shape in ((nn.Dropout1d(0.5), (40, 7)), (nn.Dropout3d(0.5), (40, 7, 2, 2))):
        kept = on(1, module, torch.ones(shape)).flatten(1)
        assert torch.equal(kept.min(1).values, kept.max(1).values)
        assert 0 < kept[:, 0].mean() < 2


def test_no_more_is_kept_than_a_byte_for_an_element() -> None:
    x, saved = torch.ones(4, 1000, requires_grad=True), []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        on(4, nn.Dropout(0.5), x)
    assert sum(saved) == 4000
    count = 2**18
    large = torch.ones(4, count)
    memory = measure(lambda: on(4, nn.Dropout(0.5), large))
    assert memory.peak_bytes - 4 * count * (4 + 4 + 1) <= 2**20  # beside the tensor, the result and the mask


def test_channels_last_stays() -> None:
    x = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    y = on(3, nn.Dropout(0.5), x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, on(3, nn.Dropout(0.5), x.contiguous()))
    sliced = torch.randn(3, 20, 8)[:, ::2, 1:5]
    assert torch.equal(on(3, nn.Dropout(0.5), sliced), on(3, nn.Dropout(0.5), sliced.contiguous()))


def test_second_derivatives() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: on(3, nn.Dropout(0.5), x) ** 3, x)


def test_warnings_of_torch_are_not_repeated() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        on(3, nn.Dropout2d(0.5), torch.ones(3, 4, 5, 5))
    assert not found
