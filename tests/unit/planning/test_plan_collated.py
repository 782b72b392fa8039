"""Batches that ``collate`` puts one after the other, or in lists, are planned for by what each sample takes."""

import copy
import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import anybatch
from anybatch.batch.batches import Part
from anybatch.planning.lengths import Lengths
from memory_steps import peak_of_call, plan_of, sgd, smallest_of
from reference import assert_float64, gradients_of, whole_gradients

WIDTH = 48
IN = 6
LENGTHS = [4] * 9 + [150, 40] + [6] * 5


class Rows(nn.Module):
    """Layers on rows, whatever sample they are of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(IN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def texts(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randn(length, IN, generator=generator, dtype=torch.float64) for length in lengths]


def arrays(lengths: list[int]) -> list[Any]:
    return [text.numpy() for text in texts(lengths)]


def flat(samples: list[Tensor]) -> dict[str, Any]:
    """All rows in one tensor, where each sequence begins, and which one each row is of."""
    lengths = [len(sample) for sample in samples]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    owner = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])
    return {"x": torch.cat(samples), "cu_seqlens": starts, "owner": owner}


def of_sequences(model: Any, batch: Any) -> anybatch.Mean:
    sequences = len(batch["cu_seqlens"]) - 1
    rows = model(batch["x"])
    sums = rows.new_zeros(sequences, WIDTH).index_add(0, batch["owner"], rows)
    lengths = batch["cu_seqlens"].diff()[:, None]
    return anybatch.Mean(model.out(sums / lengths).square().sum(), sequences)


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    mask = pad_sequence([torch.ones(len(sample), 1, dtype=torch.float64) for sample in samples], batch_first=True)
    return {"x": pad_sequence(samples, batch_first=True), "mask": mask}


def of_padded(model: Any, batch: Any) -> anybatch.Mean:
    means = (model(batch["x"]) * batch["mask"]).sum(1) / batch["mask"].sum(1)
    return anybatch.Mean(model.out(means).square().sum(), len(means))


def joined_arrays(samples: list[Any]) -> dict[str, Any]:
    """Fills the memory of a tensor, as far as it has some."""
    batch = flat([torch.empty(len(sample), IN, dtype=torch.float64) for sample in samples])
    np.concatenate(samples, out=batch["x"].numpy())
    return batch


def views_of_arrays(samples: list[Any]) -> dict[str, Any]:
    return flat([torch.from_numpy(sample) for sample in samples])


def by_numbers(samples: list[Tensor]) -> dict[str, Any]:
    """Looks at numbers, which tensors without them can't show."""
    assert all(sample.abs().max().item() < 100 for sample in samples)
    return flat(samples)


def doubling(samples: list[Tensor]) -> dict[str, Any]:
    """Writes into what it is given."""
    return flat([sample.mul_(2) for sample in samples])


class Detector(nn.Module):
    """Images of any size, one after the other, and the boxes in them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv2d(WIDTH, 8, 3, padding=1))
        self.boxes = nn.Sequential(nn.Linear(4, 8 * WIDTH), nn.Tanh(), nn.Linear(8 * WIDTH, 8))

    def forward(self, images: list[Tensor], boxes: list[Tensor]) -> Tensor:
        seen = [self.body(image[None]).mean((2, 3)) for image in images]
        return torch.stack([(self.boxes(b) * s).sum(1).square().mean() for s, b in zip(seen, boxes, strict=True)]).sum()


def scenes(lengths: list[int]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """The first is the largest image, the last one has the most boxes."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ordered = sorted(lengths[8:13], reverse=True)
    sides = [4 + length // 8 for length in ordered]
    return [
        (drawn(3, side, side + 1), {"boxes": drawn(n, 4)}) for side, n in zip(sides, reversed(ordered), strict=True)
    ]


def listed(samples: list[Any]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    return [image for image, _ in samples], [target for _, target in samples]


def of_scenes(model: Any, batch: Any) -> anybatch.Mean:
    images, targets = batch
    return anybatch.Mean(model(images, [target["boxes"] for target in targets]), len(images))


class Case(NamedTuple):
    """How samples of some lengths are made, collated, and what is done with them."""

    samples: Callable[[list[int]], list[Any]]
    collate: Callable[[list[Any]], Any]
    loss_fn: Callable[[Any, Any], anybatch.Mean]
    model: Callable[[], nn.Module] = Rows


CASES = {
    "flat": Case(texts, flat, of_sequences),
    "padded": Case(texts, padded, of_padded),
    "arrays": Case(arrays, joined_arrays, of_sequences),
    "numbers": Case(texts, by_numbers, of_sequences),
    "writes": Case(texts, doubling, of_sequences),
    "scenes": Case(scenes, listed, of_scenes, Detector),
}


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model().double()


def least_and_whole(case: Case, samples: list[Any]) -> tuple[int, int]:
    model = model_of(case)
    plan = anybatch.plan(model, case.loss_fn, samples, sgd(model), memory=2**40, collate=case.collate)
    return plan.smallest_bytes, plan.whole_bytes


def assert_within(step: anybatch.TrainStep, case: Case, samples: list[Any], budget: int) -> int:
    """Calls a step; its peak is within the budget, also where it plans, and its gradient is that of the whole batch."""
    own = copy.deepcopy(samples)
    expected, _ = whole_gradients(step.model, case.loss_fn, case.collate(own))
    peak = peak_of_call(step, samples)
    assert peak <= budget, f"{peak} bytes, {peak / budget:.3f} of the budget"
    assert_float64(gradients_of(step.model), expected)
    return peak


@pytest.mark.parametrize(
    ("name", "share"),
    [("flat", 0), ("flat", 0.3), ("padded", 0), ("padded", 0.3), ("arrays", 0), ("numbers", 0.3), ("writes", 0),
     ("scenes", 0.3)],
)  # fmt: skip
def test_the_first_call_and_the_next_stay_within_the_budget(name: str, share: float) -> None:
    case = CASES[name]
    samples = case.samples(LENGTHS)
    least, whole = least_and_whole(case, samples)
    budget = int(1.05 * least + share * (whole - least))
    model = model_of(case)
    step = anybatch.TrainStep(model, case.loss_fn, sgd(model), memory=budget, collate=case.collate)
    peaks = [assert_within(step, case, samples, budget) for _ in range(2)]
    assert len(plan_of(step).chosen.optimizations) + plan_of(step).chosen.micro_batches > 1
    assert peaks[1] >= 0.85 * plan_of(step).peak_bytes, "so much was planned for nothing"


@pytest.mark.parametrize("name", ["flat", "padded"])
def test_the_whole_batch_takes_what_was_predicted(name: str) -> None:
    case = CASES[name]
    samples = case.samples(LENGTHS)
    _, whole = least_and_whole(case, samples)
    model = model_of(case)
    step = anybatch.TrainStep(model, case.loss_fn, sgd(model), micro_batch_size=len(samples), collate=case.collate)
    step(samples)
    assert 0.98 * whole <= peak_of_call(step, samples) <= whole


@pytest.mark.parametrize("name", ["flat", "arrays", "scenes"])
def test_a_batch_in_which_one_sample_grew_is_planned_for_again(name: str, constant_times: None) -> None:
    case = CASES[name]
    short = case.samples([4] * 9 + [20, 10] + [6] * 5)
    long = case.samples(LENGTHS)
    budget = int(1.1 * least_and_whole(case, long)[0])
    model = model_of(case)
    step = anybatch.TrainStep(model, case.loss_fn, sgd(model), memory=budget, collate=case.collate)
    assert_within(step, case, short, budget)
    first = plan_of(step)
    assert_within(step, case, long, budget)
    second = plan_of(step)
    assert second is not first
    assert_within(step, case, short, budget)


def test_batches_of_other_samples_that_are_nowhere_larger_keep_their_plan() -> None:
    case = CASES["flat"]
    budget = int(1.3 * least_and_whole(case, case.samples(LENGTHS))[0])
    model = model_of(case)
    step = anybatch.TrainStep(model, case.loss_fn, sgd(model), memory=budget, collate=case.collate)
    assert_within(step, case, case.samples(LENGTHS), budget)
    plan = plan_of(step)
    for lengths in (LENGTHS[::-1], [max(1, length - 2) for length in LENGTHS], LENGTHS[:7] + LENGTHS[8:]):
        assert_within(step, case, case.samples(lengths), budget)
        assert plan_of(step) is plan


def test_planning_leaves_samples_as_they_are_that_collate_writes_to() -> None:
    for case, samples in ((CASES["writes"], texts(LENGTHS)), (CASES["arrays"], arrays(LENGTHS))):

        def collate(some: list[Any], case: Case = case) -> Any:
            for sample in some:
                sample[...] = 2 * sample
            return case.collate(some)

        before = copy.deepcopy(samples)
        model = model_of(case)
        anybatch.plan(model, case.loss_fn, samples, sgd(model), memory=2**30, collate=collate)
        assert all(np.array_equal(a, b) for a, b in zip(samples, before, strict=True))


def test_collated_copies_of_large_samples_do_not_pile_up() -> None:
    """The samples take most of the budget, so that there is room for few that are collated, and for one micro-batch."""
    samples = [torch.randn(5_000, dtype=torch.float64) for _ in range(24)]
    taken = sum(sample.nbytes for sample in samples)

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(batch[:, :IN]).square().mean()

    case = Case(lambda _: samples, torch.stack, loss_fn, lambda: nn.Linear(IN, 2))
    budget = int(1.3 * taken)
    model = model_of(case)
    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory=budget, collate=torch.stack)
    for _ in range(2):
        assert_within(step, case, samples, budget)
    plan = plan_of(step)
    # Which of them is timed as the faster one varies, and whether ways that need more are listed beside them.
    rows = [row for row in (plan.chosen, *plan.alternatives) if row.peak_bytes <= budget]
    assert min(row.micro_batches for row in rows) >= 4
    assert any(row.micro_batch_size > 1 for row in rows)


class Collator:
    """Makes what it needs on its first call, and keeps it in one place or another."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.factor: Tensor | None = None
        self.factors: list[Tensor] = []
        self.of_widths: dict[int, Tensor] = {}

    def __call__(self, samples: list[Tensor]) -> dict[str, Any]:
        return flat([sample * self.found(sample) for sample in samples])

    def found(self, sample: Tensor) -> Tensor:
        if self.place == "attribute":
            self.factor = torch.arange(1.0, IN + 1) if self.factor is None else self.factor
            return self.factor
        if self.place == "cache":
            return powers(sample.shape[-1])
        if self.place == "list":
            self.factors = self.factors or [torch.arange(1.0, IN + 1)]
            return self.factors[0]
        return self.of_widths.setdefault(sample.shape[-1], torch.arange(1.0, IN + 1))


@functools.lru_cache
def powers(width: int) -> Tensor:
    return torch.arange(1.0, width + 1)


@pytest.mark.parametrize("place", ["attribute", "list", "dictionary", "cache"])
def test_a_collate_that_keeps_tensors_is_left_none_without_numbers(place: str) -> None:
    powers.cache_clear()
    case = Case(texts, Collator(place), of_sequences)
    samples = texts(LENGTHS)
    budget = int(1.1 * least_and_whole(CASES["flat"], samples)[0])
    model = model_of(case)
    step = anybatch.TrainStep(model, of_sequences, sgd(model), memory=budget, collate=Collator(place))
    step(samples)
    powers.cache_clear()
    assert_within(step, case, samples, budget)


def test_arrays_of_one_shape_whose_numbers_decide_how_long_they_are() -> None:
    def marked(lengths: list[int]) -> list[Any]:
        return [np.arange(200) < length for length in lengths]

    def collate(samples: list[Any]) -> dict[str, Any]:
        return flat([torch.linspace(0, 1, IN, dtype=torch.float64).expand(int(sample.sum()), IN) for sample in samples])

    case = Case(marked, collate, of_sequences)
    samples = marked(LENGTHS)
    least, whole = least_and_whole(case, samples)
    assert whole > 1.5 * least
    budget = int(1.1 * least)
    model = model_of(case)
    step = anybatch.TrainStep(model, of_sequences, sgd(model), memory=budget, collate=collate)
    assert_within(step, case, marked([4] * len(LENGTHS)), budget)
    assert_within(step, case, samples, budget)


def test_the_heaviest_micro_batch_has_its_largest_sample_last() -> None:
    each = (5, 1, 3, 2)
    lengths = Lengths(each, tuple((length, 10 * length) for length in each), 50)
    (found,) = lengths.heaviest([Part([0, 1], 2), Part([2, 3], 2)], packed=False)
    assert list(found.samples) == [3, 0]


def test_arrays_that_tensors_are_made_of_are_planned_for_as_tensors_are() -> None:
    least, whole = least_and_whole(CASES["flat"], texts(LENGTHS))
    own = sum(text.nbytes for text in texts(LENGTHS))
    found = least_and_whole(Case(arrays, views_of_arrays, of_sequences), arrays(LENGTHS))
    assert least <= found[0] <= least + own
    assert whole <= found[1] <= whole + own


def test_sparse_samples_are_planned_for() -> None:
    samples = [torch.eye(IN, dtype=torch.float64)[: 1 + i % 4].to_sparse() for i in range(12)]

    def loss_fn(model: Any, batch: Any) -> Any:
        return torch.sparse.mm(batch, model.layers[0].weight.T).square().mean()

    assert smallest_of(Rows().double(), loss_fn, samples, collate=torch.cat) > 0


class Recurrent(Rows):
    """Runs for real while it is planned, since what its kernel keeps is not known otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.GRU(IN, WIDTH, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def test_what_runs_for_real_begins_with_one_sample_of_the_longest() -> None:
    case = Case(texts, padded, of_padded, Recurrent)
    samples = texts([3] * 8 + [60] + [4] * 3)
    least, whole = least_and_whole(case, samples)
    assert whole > 3 * least
    budget = int(1.2 * least)
    model = model_of(case)
    step = anybatch.TrainStep(model, of_padded, sgd(model), memory=budget, collate=padded)
    for _ in range(2):
        assert_within(step, case, samples, budget)
