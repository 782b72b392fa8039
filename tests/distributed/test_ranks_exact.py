"""The gradient of several ranks is that of the batch of all of them, however it is split over them."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import anybatch
from ranks_running import Case, assert_same_everywhere, counted, raised, run_cases
from reference import assert_float64, assert_value64, gradients_of, whole_gradients

Batch = dict[str, torch.Tensor]


class Net(torch.nn.Module):
    """Has a part that only some samples use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(4, 8)
        self.rare = torch.nn.Linear(8, 8)
        self.unused = torch.nn.Linear(3, 3)
        self.last = torch.nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        if len(x) and float(x.detach()[:, 0].max()) > 1:  # in the whole batch the same rows take it, see rare_rows
            rows = (x[:, :1] > 1).double()
            hidden = hidden + rows * self.rare(hidden)
        found: torch.Tensor = self.last(hidden)
        return found


def batches_of(rows: Sequence[int], seed: int = 0, masked: float = 0.3) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n in rows:
        y = torch.randint(0, 3, (n,), generator=generator)
        y[torch.rand(n, generator=generator) < masked] = -100
        x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
        found.append({"x": x, "y": y, "z": torch.rand(n, generator=generator, dtype=torch.float64)})
    return found


def joined(batches: Sequence[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def mean_loss(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = (model(batch["x"]).sum(1) - batch["z"]).square().mean()
    return loss


def token_loss(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def counted_loss(model: Any, batch: Batch) -> anybatch.Mean:
    total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    return anybatch.Mean(total, (batch["y"] != -100).sum())


def several(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    out = model(batch["x"])
    return {"token": F.cross_entropy(out, batch["y"]), "square": (out.sum(1) - batch["z"]).square().mean()}


def several_means(model: Any, batch: Batch) -> dict[str, Any]:
    out = model(batch["x"])
    large = (batch["z"] > 0.5).double()
    return {
        "token": anybatch.Mean(F.cross_entropy(out, batch["y"], reduction="sum"), (batch["y"] != -100).sum()),
        "large": anybatch.Mean((out.sum(1).square() * large).sum(), large.sum()),
        "plain": out.square().mean(),
    }


def yielded(model: Any, batch: Batch) -> Any:
    with anybatch.cut(model(batch["x"])) as out:
        yield "token", F.cross_entropy(out, batch["y"])
        yield "square", out.square().mean()


TOKENS = anybatch.count_tokens("y")
LOSSES: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "mean": (mean_loss, {}),
    "tokens": (token_loss, {"count": TOKENS}),
    "one Mean": (counted_loss, {}),
    "several": (several, {"count": {"token": TOKENS, "square": anybatch.count_samples}}),
    "several Means": (several_means, {"count": "forward"}),
    "yielded": (yielded, {"count": {"token": TOKENS, "square": anybatch.count_samples}}),
}


def check(
    loss: str, rows: Sequence[int], sizes: Sequence[int | None], rank: int, *, wrap: Any = None, seed: int = 0
) -> None:
    """One gradient over ranks against the whole batch in one process."""
    loss_fn, options = LOSSES[loss]
    model, batches = Net(), batches_of(rows, seed)
    whole_fn = loss_fn if loss != "yielded" else several_uncut
    expected, values = whole_gradients(copy.deepcopy(model), whole_fn, joined(batches))
    wrapped = model if wrap is None else wrap(model)
    out = anybatch.backward(wrapped, loss_fn, batches[rank], micro_batch_size=sizes[rank], **options)
    assert_float64(gradients_of(model), expected)
    assert set(out.losses) == set(values) or sum(rows) == 0, (out.losses, values)
    for name, value in values.items():
        assert_value64(out.losses[name], value)
    assert model.unused.weight.grad is None


def several_uncut(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    out = model(batch["x"])
    return {"token": F.cross_entropy(out, batch["y"]), "square": out.square().mean()}


def each_loss(rank: int, world: int, *, wrap: Any = None, rows: Sequence[int] = (11, 3), sizes: Any = (4, 2)) -> None:
    for loss in LOSSES:
        check(loss, rows, sizes, rank, wrap=wrap)


def random_draws(rank: int, world: int) -> None:
    generator = torch.Generator().manual_seed(7)

    def draw(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    for number in range(200):
        rows = [draw(9) for _ in range(world)]
        rows[draw(world)] += 3
        sizes = [draw(6) or None for _ in range(world)]
        check(list(LOSSES)[draw(len(LOSSES))], rows, sizes, rank, seed=number)


def known_answer(rank: int, world: int) -> None:
    """Five tokens of gradient 1 and one of gradient 7: 2, and not the mean of the ranks, 4."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    rows = torch.ones(5, 1, dtype=torch.float64) if rank == 0 else torch.full((1, 1), 7.0, dtype=torch.float64)
    out = anybatch.backward(model, lambda model, x: model(x).mean(), rows, micro_batch_size=2)
    assert_float64([model.weight.grad], [torch.full((1, 1), 2.0, dtype=torch.float64)])
    assert out.micro_batches == (3 if rank == 0 else 1)
    assert out.count == 6


def no_rows_anywhere(rank: int, world: int) -> None:
    error = raised(lambda: anybatch.backward(Net(), mean_loss, batches_of([0])[0]))
    assert type(error) is anybatch.BatchError, error


def nothing_to_count(rank: int, world: int) -> None:
    for loss in ("tokens", "one Mean"):
        loss_fn, options = LOSSES[loss]
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = anybatch.TrainStep(model, loss_fn, optimizer, **options)
        out = step(batches_of([2 + rank], masked=2.0)[0] if rank == 0 or loss == "tokens" else batches_of([0])[0])
        assert out.skipped, loss
        assert (step.updates, step.skipped) == (0, 1)
        assert_same_everywhere(out.skipped)


def adds_to_what_was_there(rank: int, world: int) -> None:
    model, first, second = Net(), batches_of([3, 5], 1), batches_of([6, 0], 2)
    for batches in (first, second):
        anybatch.backward(model, mean_loss, batches[rank], micro_batch_size=2)
    one, other = (whole_gradients(Net(), mean_loss, joined(batches))[0] for batches in (first, second))
    assert_float64(
        gradients_of(model),
        [None if a is None else a + (0 if b is None else b) for a, b in zip(one, other, strict=True)],
    )


def collectives(rank: int, world: int) -> None:
    """Two rounds of messages and one bucket, however many micro-batches there are; one round more for a Mean."""
    for loss, gathers in (("mean", 2), ("tokens", 2), ("one Mean", 3), ("several", 2), ("several Means", 4)):
        loss_fn, options = LOSSES[loss]
        model = DistributedDataParallel(Net())
        for size in (None, 1):
            with counted() as numbers:
                anybatch.backward(model, loss_fn, batches_of([4, 7])[rank], micro_batch_size=size, **options)
            assert numbers == {"all_reduce": 1, "all_gather": gathers, "broadcast": 0}, (loss, size, numbers)
            model.zero_grad()


def apart_from_the_group(rank: int, world: int) -> None:
    for wrap in (lambda model: model, DistributedDataParallel):
        model, batches = Net(), batches_of([3, 5])
        wrapped = wrap(model)
        with counted() as numbers:
            anybatch.backward(wrapped, mean_loss, batches[rank], micro_batch_size=1 + rank, group=False)
        assert set(numbers.values()) == {0}
        assert_float64(gradients_of(model), whole_gradients(Net(), mean_loss, batches[rank])[0])


def no_row_of_its_own(rank: int, world: int) -> None:
    for rows in ((7, 0), (0, 7)):
        each_loss(rank, world, rows=rows, sizes=(3, 3))


def two_groups(rank: int, world: int) -> None:
    """A group of one rank has nothing to reduce over."""
    groups = [torch.distributed.new_group([0]), torch.distributed.new_group([1])]
    model, batches = Net(), batches_of([3, 5])
    anybatch.backward(model, mean_loss, batches[rank], micro_batch_size=2, group=groups[rank])
    assert_float64(gradients_of(model), whole_gradients(Net(), mean_loss, batches[rank])[0])


def raw_samples(rank: int, world: int) -> None:
    samples = [torch.full((n,), float(n), dtype=torch.float64) for n in range(1, 12)]
    mine = samples[:8] if rank == 0 else samples[8:]

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = model(x[..., None])[..., 0] * (x > 0)  # padding is 0
        return kept.sum() / (x > 0).sum()

    for mine_now in (mine, samples if rank == 0 else []):
        model = torch.nn.Linear(1, 1).double()
        torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
        anybatch.backward(
            model, loss_fn, mine_now, cost=len, micro_batch_size=24,
            collate=partial(torch.nn.utils.rnn.pad_sequence, batch_first=True), count=lambda x: (x > 0).sum(),
        )  # fmt: skip
        assert_float64([model.bias.grad], [torch.ones(1, dtype=torch.float64)])


def ddp(**options: Any) -> Callable[[torch.nn.Module], torch.nn.Module]:
    return lambda model: DistributedDataParallel(model, **options)


CASES: Mapping[str, Case] = {
    "known answer": known_answer,
    "plain modules": each_loss,
    "DistributedDataParallel": partial(each_loss, wrap=ddp()),
    "find_unused_parameters": partial(each_loss, wrap=ddp(find_unused_parameters=True)),
    "gradient_as_bucket_view": partial(each_loss, wrap=ddp(gradient_as_bucket_view=True)),
    "a rank without rows": no_row_of_its_own,
    "a rank without rows, DistributedDataParallel": partial(each_loss, wrap=ddp(), rows=(0, 5)),
    "no rows anywhere": no_rows_anywhere,
    "nothing to count": nothing_to_count,
    "adds up": adds_to_what_was_there,
    "collectives": collectives,
    "group=False": apart_from_the_group,
    "groups": two_groups,
    "raw samples": raw_samples,
    "200 random draws": random_draws,
}
FOUR: Mapping[str, Case] = {"four ranks": partial(each_loss, rows=(5, 0, 1, 9), sizes=(2, 1, None, 4))}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]


def test_four_ranks(tmp_path: Any) -> None:
    results = run_cases("test_ranks_exact", 4, tmp_path, "FOUR")
    assert not any(results.values()), results
