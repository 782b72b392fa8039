"""A loss over the samples of all ranks has the gradient that one process has for the whole batch."""

import copy
import functools
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import anybatch
from coupled_losses import CASES as LOSSES
from coupled_losses import Batch, ByPixel, Case, Towers, clip, clip_of_rows, dice, parameters_of, samples, towers
from ranks_running import Case as RankCase
from ranks_running import assert_same_everywhere, assert_weights_same, counted, hashed, raised, run_cases
from reference import assert_bitwise, assert_float64, assert_value64, whole_gradients
from test_ranks_faults import shortage

ROWS = ((5, 9), (7, 0), (0, 6), (1, 8))


class Wrapped(DistributedDataParallel):
    """As people write it whose loss reads a parameter of the model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def shares(rows: Sequence[int], seed: int = 0) -> list[Batch]:
    """Views into one batch, whose storage has the rows of all ranks."""
    whole = samples(sum(rows), seed)
    ends = list(itertools.accumulate(rows))
    return [{name: value[e - n : e] for name, value in whole.items()} for e, n in zip(ends, rows, strict=True)]


def joined(batches: Sequence[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def gradients(parameters: Any) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in parameters]


def check(
    case: Case, rows: Sequence[int], sizes: Sequence[int | None], rank: int, *, wrap: Any = None, **options: Any
) -> None:
    model, batches = case.model(), shares(rows)
    parameters = parameters_of(case, model)
    expected, values = whole_gradients(copy.deepcopy(model), case.whole, joined(batches))
    if len(parameters) > len(expected):  # a loss that has some of its own
        expected, values = whole_gradients(model, case.whole, joined(batches), parameters)
    for parameter in parameters:
        parameter.grad = None
    with_others = model if wrap is None else wrap(model)
    out = anybatch.backward(with_others, case.coupled(**options), batches[rank], micro_batch_size=sizes[rank])
    assert_float64(gradients(parameters), expected)
    for name, value in values.items():
        assert_value64(out.losses[name], value)
    assert out.count == sum(rows) or case is LOSSES["supcon"], out.count


def every_loss(rank: int, world: int, *, wrap: Any = None, **options: Any) -> None:
    """Every kind of coupled loss, with uneven rows and ranks that have none."""
    for case in LOSSES.values():
        if options.get("row_block") and case.of_rows is None:
            continue
        for rows in ROWS if world == 2 else [(5, 0, 1, 9)]:
            check(case, rows, (2, 4, None, 3), rank, wrap=wrap, **options)


def collectives(rank: int, world: int) -> None:
    """Two messages, the outputs and their gradients more than other losses take, whatever the micro-batches."""
    for case, size in itertools.product(("clip", "dice"), (None, 2)):
        model = LOSSES[case].model()
        with counted() as numbers:
            anybatch.backward(model, LOSSES[case].coupled(), shares((4, 6))[rank], micro_batch_size=size)
        assert numbers == {"all_reduce": 2, "all_gather": 6, "broadcast": 0}, numbers


def training(rank: int, world: int) -> None:
    """Weights stay equal on all ranks, and the same as in one process, temperature included."""
    model, alone = Towers(), Towers()
    steps = [
        anybatch.TrainStep(
            one, LOSSES["clip"].coupled(row_block=block), torch.optim.AdamW(one.parameters(), lr=0.1), clip_norm=0.5,
            micro_batch_size=3, group=group,
        )
        for one, block, group in ((model, 4, None), (alone, None, False))
    ]  # fmt: skip
    steps[1].loss_fn = LOSSES["clip"].coupled()
    for seed in range(6):
        batches = shares((5, 4), seed)
        out, expected = steps[0](batches[rank]), steps[1](joined(batches))
        assert_value64(out.loss, expected.loss)
        assert out.grad_norm is not None
        assert expected.grad_norm is not None
        assert_value64(out.grad_norm, expected.grad_norm)
        assert_weights_same(model)
    assert_float64(list(model.parameters()), list(alone.parameters()), "the weights")
    batches = shares((3, 0), 9)
    assert_value64(steps[0].evaluate(batches[rank]).loss, steps[1].evaluate(joined(batches)).loss)


def random_draws(rank: int, world: int) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    cases = list(LOSSES)
    for _ in range(60):
        case = LOSSES[cases[draw(len(cases))]]
        rows = [draw(6) for _ in range(world)]
        rows[draw(world)] += 4
        sizes = [draw(5) or None for _ in range(world)]
        block = 1 + draw(6) if case.of_rows is not None and draw(2) else None
        check(case, rows, sizes, rank, keep=draw(4), row_block=block)


def dropped(model: Any, outputs: Any) -> torch.Tensor:
    """Draws random numbers in the loss."""
    return clip(model, (F.dropout(outputs[0], 0.5), outputs[1]))


def random_numbers(rank: int, world: int) -> None:
    """Dropout in the encoder and in the loss: the second pass has the masks of the first, and all see one loss."""
    model, batches = Towers(dropout=0.4), shares((4, 6))
    outcomes = []
    for keep in (0, 100):
        torch.manual_seed(10 + rank)
        one = copy.deepcopy(model)
        out = anybatch.backward(one, anybatch.Coupled(towers, dropped, keep=keep), batches[rank], micro_batch_size=2)
        assert_same_everywhere([out.loss, hashed(gradients(one.parameters()))])
        outcomes.append([p.grad for p in one.parameters()])
    assert_float64(outcomes[0], outcomes[1])


def collated(rank: int, world: int) -> None:
    """Raw samples, of which the loss sees the list of all ranks."""
    model = torch.nn.Linear(4, 3).double()
    with torch.no_grad():
        model.weight.fill_(0.3)
        model.bias.zero_()
    raw = [{"x": torch.full((4,), float(i), dtype=torch.float64), "name": f"sample {i % 3}"} for i in range(7)]
    mine = raw[:5] if rank == 0 else raw[5:]

    def encode(model: Any, batch: Any) -> Any:
        return model(batch).tanh()

    def loss(model: Any, outputs: Any, batch: Any) -> Any:
        names = torch.tensor([int(sample["name"][-1]) for sample in batch])
        return F.cross_entropy(outputs @ outputs.T[:, :3], names)

    whole = torch.stack([sample["x"] for sample in raw])  # type: ignore[misc]
    expected, _ = whole_gradients(copy.deepcopy(model), lambda model, x: loss(model, encode(model, x), raw), whole)
    anybatch.backward(
        model, anybatch.Coupled(encode, loss), mine, micro_batch_size=2,
        collate=lambda samples: torch.stack([sample["x"] for sample in samples]),
    )  # fmt: skip
    assert_float64(gradients(model.parameters()), expected)


def faulty(function: Any, number: int, error: Any) -> Any:
    """A loss, or an encoder, that raises once."""
    seen = []

    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        seen.append(1)
        if len(seen) == number:
            raise error
        return function(*arguments)

    return called


def faults(rank: int, world: int) -> None:
    """Memory that runs out, or an error, in a first pass, in the loss and in a second pass; nobody waits."""
    batches = shares((6, 5))
    expected, _ = whole_gradients(Towers(), LOSSES["clip"].whole, joined(batches))
    for where, (victim, number), error in itertools.product(
        ("encode", "loss"), ((0, 1), (1, 1), (0, 4), (1, 4)), (shortage(), ValueError("a bad sample"))
    ):
        if where == "loss" and number > 1:
            continue
        functions: list[Any] = [towers, clip_of_rows]
        if rank == victim:
            functions[where == "loss"] = faulty(functions[where == "loss"], number, error)
        coupled = anybatch.Coupled(*functions, row_block=6)  # one block for each rank
        model = Towers()
        step = anybatch.TrainStep(model, coupled, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=2)
        failure = raised(lambda step=step: step(batches[rank]))  # type: ignore[misc]
        if isinstance(error, ValueError):
            expected_kind = ValueError if rank == victim else anybatch.AnyBatchError
            assert isinstance(failure, expected_kind), failure
            assert "a bad sample" in str(failure), failure
            step(batches[rank])
        else:
            assert failure is None, failure
        assert_float64(gradients(model.parameters()), expected)
        assert_same_everywhere([step.updates, step._limit.value])


def own_samples(rank: int, world: int) -> None:
    """With gather=False each rank's loss sees its own samples, and group=False reduces nothing."""
    batches = shares((3, 6))
    for wrap in (lambda model: model, Wrapped):
        model = Towers()
        coupled = anybatch.Coupled(towers, clip, gather=False)
        anybatch.backward(wrap(model), coupled, batches[rank], micro_batch_size=2)

        def loss(model: Any, batches: Any) -> torch.Tensor:
            parts = [LOSSES["clip"].whole(model, batch) * len(batch["text"]) for batch in batches]
            return torch.stack(parts).sum() / 9

        assert_float64(gradients(model.parameters()), whole_gradients(Towers(), loss, batches)[0])
    model = Towers()
    with counted() as numbers:
        anybatch.backward(model, LOSSES["clip"].coupled(), batches[rank], micro_batch_size=2, group=False)
    assert set(numbers.values()) == {0}
    expected, _ = whole_gradients(Towers(), LOSSES["clip"].whole, batches[rank])
    assert_float64(gradients(model.parameters()), expected)
    assert "gather" in str(raised(lambda: anybatch.Coupled(towers, clip, gather=1)))  # type: ignore[arg-type]


def refusals(rank: int, world: int) -> None:
    """Outputs that do not belong together are named, and budgets do not know what other ranks' samples take."""
    batches = shares((3, 6))

    def ragged(model: Any, batch: Any) -> Any:
        return model.image(batch["image"])[:, : 2 + rank]

    error = raised(
        lambda: anybatch.backward(Towers(), anybatch.Coupled(ragged, lambda m, o: o.square().mean()), batches[rank])
    )
    assert isinstance(error, anybatch.LossError)
    assert "rows of shape (2,), on rank 1 torch.float64 rows of shape (3,)" in str(error), error
    other = anybatch.Coupled(lambda m, b: (m.image(b["image"]), rank), lambda m, o: o[0].square().mean())
    assert "on rank 0 0, on rank 1 1" in str(raised(lambda: anybatch.backward(Towers(), other, batches[rank])))
    error = raised(
        lambda: anybatch.backward(
            Towers(), anybatch.Coupled(towers, lambda m, o, b: clip(m, o)) if rank else LOSSES["clip"].coupled(),
            batches[rank],
        )
    )  # fmt: skip
    assert "takes the batch on rank 1 and not on rank 0" in str(error), error
    model = Towers()
    step = anybatch.TrainStep(model, LOSSES["clip"].coupled(), torch.optim.SGD(model.parameters()), memory="1GiB")
    assert "gather=False" in str(raised(lambda: step(batches[rank])))
    apart = anybatch.Coupled(towers, clip, gather=False)
    anybatch.TrainStep(model, apart, torch.optim.SGD(model.parameters()), memory="1GiB")(batches[rank])


def metrics(rank: int, world: int) -> None:
    """A Mean beside the loss is of all samples, on every rank."""

    def loss(model: Any, outputs: Any) -> Any:
        hits = (outputs[0] @ outputs[1].T).argmax(1) == torch.arange(len(outputs[0]))
        return clip(model, outputs), {"hits": anybatch.Mean(hits.sum(), len(hits))}

    batches = shares((4, 6))
    out = anybatch.backward(Towers(), anybatch.Coupled(towers, loss), batches[rank], micro_batch_size=2)
    alone = anybatch.backward(Towers(), anybatch.Coupled(towers, loss), joined(batches), group=False)
    assert out.metrics == alone.metrics
    assert_same_everywhere(out.metrics)


def pictures(rank: int, world: int) -> None:
    """A batch that the loss looks at goes to all ranks without the rows that its storage has beside."""
    for broadcast in ((), ("weight",)):
        model = ByPixel()
        batches: list[Any] = shares((3, 4))
        whole: Any = joined(batches)
        if broadcast:
            for batch in (*batches, whole):
                batch["weight"] = torch.ones(())
        expected, _ = whole_gradients(ByPixel(), LOSSES["dice"].whole, whole)
        anybatch.backward(model, anybatch.Coupled(ByPixel.__call__, dice), batches[rank], broadcast=broadcast)
        assert_float64(gradients(model.parameters()), expected)


def repeated(rank: int, world: int) -> None:
    """Two runs are bitwise the same."""
    found = []
    for _ in range(2):
        model = Towers()
        anybatch.backward(model, LOSSES["clip"].coupled(row_block=3), shares((5, 8))[rank], micro_batch_size=2)
        found.append(gradients(model.parameters()))
    assert_bitwise(found[0], found[1])


CASES: Mapping[str, RankCase] = {
    "every loss": every_loss,
    "every loss, DistributedDataParallel": partial(every_loss, wrap=Wrapped),
    "in blocks of rows": partial(every_loss, row_block=3),
    "no graph kept": partial(every_loss, keep=0),
    "collectives": collectives,
    "training": training,
    "random draws": random_draws,
    "random numbers": random_numbers,
    "raw samples": collated,
    "faults": faults,
    "gather=False": own_samples,
    "refusals": refusals,
    "metrics": metrics,
    "a batch for the loss": pictures,
    "repeated": repeated,
}
FOUR: Mapping[str, RankCase] = {"four ranks": every_loss, "four ranks, in blocks": partial(every_loss, row_block=2)}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]


@pytest.mark.slow  # two ranks see most, and four in test_ranks_exact.py and test_sharding_lockstep.py
def test_four_ranks(tmp_path: Any) -> None:
    results = run_cases("test_ranks_coupled", 4, tmp_path, "FOUR")
    assert not any(results.values()), results
