"""Pairs of views, collate functions, overlaps of boxes and large weights: yes where it is so, else no."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from test_doctor_ask import answer, asked, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Tensor = torch.Tensor
N = 24


def train(net: nn.Module, loss: Callable[[], Tensor], count: int = 3, rate: float = 0.01) -> None:
    optimizer = torch.optim.Adam(net.parameters(), rate)
    for _ in range(count):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def contrast(one: Tensor, two: Tensor, pair: Callable[[Tensor], Tensor], *, turns: bool) -> Tensor:
    """The loss of pairs, whose views lie in turns or one behind the other."""
    z = F.normalize(torch.stack([one, two], 1).flatten(0, 1) if turns else torch.cat([one, two]), dim=1)
    scores = (z @ z.t() / 0.2).masked_fill(torch.eye(2 * N, dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, pair(torch.arange(2 * N)))


def by_hand(one: Tensor, two: Tensor, pair: Callable[[Tensor], Tensor]) -> Tensor:
    z = F.normalize(torch.cat([one, two]), dim=1)
    scores, rows = torch.exp(torch.mm(z, z.t()) / 0.5), torch.arange(2 * N)
    return -(scores[rows, pair(rows)] / (scores.sum(1) - scores.diagonal())).log().mean()


def across(one: Tensor, two: Tensor) -> Tensor:
    scores = F.normalize(one, dim=1) @ F.normalize(two, dim=1).t() / 0.2
    return (F.cross_entropy(scores, torch.arange(N)) + F.cross_entropy(scores.t(), torch.arange(N))) / 2


def of_classes(one: Tensor, two: Tensor) -> Tensor:
    """Several positives for each row."""
    z, y = F.normalize(torch.cat([one, two]), dim=1), torch.arange(2 * N) % 4
    same = (y[:, None] == y).float() - torch.eye(2 * N)
    return -((z @ z.t()).log_softmax(1) * same).sum(1).mean()


def behind(rows: Tensor) -> Tensor:
    return (rows + N) % (2 * N)


def in_turns(rows: Tensor) -> Tensor:
    return rows ^ 1


@pytest.mark.parametrize(("loss", "expected"), [
    (lambda a, b: contrast(a, b, in_turns, turns=False), "yes"),
    (lambda a, b: contrast(a, b, behind, turns=True), "yes"),
    (lambda a, b: by_hand(a, b, in_turns), "yes"),
    (lambda a, b: across(a, b.flip(0)), "yes"),
    (lambda a, b: contrast(a, b, behind, turns=False), "no"),
    (lambda a, b: contrast(a, b, in_turns, turns=True), "no"),
    (lambda a, b: by_hand(a, b, behind), "no"),
    (across, "no"),
    (of_classes, "unknown"),
    (lambda a, b: F.mse_loss(a, b.detach()), "unknown"),
])  # fmt: skip
def test_pairs_of_another_order_are_told(loss: Callable[[Tensor, Tensor], Tensor], expected: str) -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))

    def step() -> Tensor:
        x = torch.randn(N, 16)
        return loss(net(x + 0.1 * torch.randn(N, 16)), net(x + 0.1 * torch.randn(N, 16)))

    assert answer(lambda: train(net, step), "mispaired") == expected


@pytest.mark.parametrize(("pair", "turns", "other"), [(in_turns, False, "(i + n // 2) % n"), (behind, True, "i ^ 1")])
def test_the_right_order_of_the_pairs_is_named(pair: Callable[[Tensor], Tensor], turns: bool, other: str) -> None:
    net = nn.Linear(16, 32)

    def step() -> Tensor:
        one, two = torch.randn(2, N, 16)
        return contrast(net(one), net(two), pair, turns=turns)

    assert asked(lambda: train(net, step), "mispaired")[-1].evidence["other"] == other


@pytest.mark.parametrize(("pair", "expected"), [(in_turns, "yes"), (behind, "no")])
def test_pairs_in_one_input_are_those_that_are_alike(pair: Callable[[Tensor], Tensor], expected: str) -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))

    def step() -> Tensor:
        x = torch.randn(N, 16)
        one, two = net(torch.cat([x, x + 0.1 * torch.randn(N, 16)])).chunk(2)
        return contrast(one, two, pair, turns=False)

    assert answer(lambda: train(net, step), "mispaired") == expected


@pytest.mark.parametrize(("pair", "expected"), [(in_turns, "yes"), (behind, "no")])
def test_pairs_that_are_a_little_more_alike_than_others_are_told_in_many_rows(
    pair: Callable[[Tensor], Tensor], expected: str
) -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))

    def step() -> Tensor:
        x = torch.randn(N, 16)
        one, two = net(torch.cat([x, 0.5 * x + torch.randn(N, 16)])).chunk(2)
        return contrast(one, two, pair, turns=False)

    assert answer(lambda: train(net, step), "mispaired") == expected


def test_two_kinds_of_input_that_no_pairing_fits_at_first_are_no_wrong_pairs() -> None:
    net, other = nn.Linear(16, 8), nn.Linear(5, 8)
    both = nn.ModuleList([net, other])
    step = lambda: across(net(torch.randn(N, 16)), other(torch.randn(N, 5)))  # noqa: E731
    assert answer(lambda: train(both, step), "mispaired") == "no"


Collate = Callable[[list[tuple[Tensor, int]]], Any]


def padded(some: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(some, batch_first=True)


def sorted_apart(batch: list[tuple[Tensor, int]]) -> Any:
    lengths, order = torch.tensor([len(x) for x, _ in batch]).sort(descending=True)
    return padded([batch[i][0] for i in order]), lengths, torch.tensor([y for _, y in batch])


def by_mean(batch: list[tuple[Tensor, int]]) -> Any:
    x = torch.stack([x[:4] for x, _ in batch])
    return {"x": x[x.mean(1).argsort()], "y": torch.tensor([y for _, y in batch])}


def sorted_together(batch: list[tuple[Tensor, int]]) -> Any:
    return sorted_apart(sorted(batch, key=lambda one: -len(one[0])))


def with_the_order(batch: list[tuple[Tensor, int]]) -> Any:
    order = torch.tensor([len(x) for x, _ in batch]).sort(descending=True).indices
    return padded([batch[i][0] for i in order]), torch.tensor([y for _, y in batch]), order.argsort()


def as_they_come(batch: list[tuple[Tensor, int]]) -> Any:
    x = padded([x for x, _ in batch])
    return x, x != 0, torch.tensor([y for _, y in batch])


def mixed(batch: list[tuple[Tensor, int]]) -> Any:
    x, y = as_they_come(batch)[0], torch.tensor([float(y) for _, y in batch])
    share, order = torch.rand(()), torch.randperm(len(x))
    return share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]


@pytest.mark.parametrize(("collate", "expected"), [
    (sorted_apart, "yes"), (by_mean, "yes"),
    (sorted_together, "no"), (with_the_order, "no"), (as_they_come, "no"), (mixed, ""), (None, ""),
])  # fmt: skip
def test_collate_functions_that_tear_samples_apart_are_told(collate: Collate | None, expected: str) -> None:
    data = [(1 + torch.rand(length), length % 2) for length in torch.randint(4, 30, (60,)).tolist()]
    if collate is None:
        data = [(x[:4], y) for x, y in data]
    net = nn.Linear(1, 1)

    def run() -> None:
        for _ in DataLoader(data, batch_size=12, collate_fn=collate):  # type: ignore[arg-type]
            train(net, lambda: net(torch.ones(4, 1)).mean(), 1)

    assert answer(run, "collate") == expected


def sides(a: Tensor, b: Tensor) -> Tensor:
    return torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])


def area(a: Tensor) -> Tensor:
    return (a[:, 2:] - a[:, :2]).prod(1)


@pytest.mark.parametrize(("overlap", "expected"), [
    (lambda a, b: sides(a, b)[:, 0] * sides(a, b)[:, 1], "yes"),
    (lambda a, b: sides(a, b).prod(1), "yes"),
    (lambda a, b: sides(a, b).clamp(min=0).prod(1), "no"),
    (lambda a, b: sides(a, b).relu()[:, 0] * sides(a, b).relu()[:, 1], "no"),
    (lambda a, b: sides(a, b).prod(1) * (sides(a, b) > 0).all(1), "no"),
    (lambda a, b: area(a), "no"),  # sides of a box itself
], ids=["product", "prod", "clamped", "relu", "masked", "own area"])  # fmt: skip
def test_overlaps_of_boxes_that_lie_apart_are_told(overlap: Callable[[Tensor, Tensor], Tensor], expected: str) -> None:
    net = nn.Linear(6, 4)

    def step() -> Tensor:
        corner, size, given = torch.rand(32, 2), torch.rand(32, 2) / 5, net(torch.randn(32, 6)).sigmoid()
        truth = torch.cat([corner, corner + size], 1)
        boxes = torch.cat([given[:, :2], given[:, :2] + given[:, 2:] / 5], 1)
        inner = overlap(boxes, truth)
        return (1 - inner / (area(boxes) + area(truth) - inner + 1e-6)).mean()

    assert answer(lambda: train(net, step), "overlap") == expected


class Tables(nn.Module):
    """Scores of users and items as products of two rows."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(40, 64), nn.Embedding(40, 64)
        for one in (self.user, self.item):
            nn.init.normal_(one.weight, std=std)

    def forward(self, u: Tensor, i: Tensor) -> Tensor:
        return torch.sum(self.user(u) * self.item(i), -1)


def wide(std: float) -> nn.Module:
    last = nn.Linear(64, 5)
    nn.init.normal_(last.weight, std=std)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), last)


@pytest.mark.parametrize(("std", "expected"), [(1.0, "yes"), (0.05, "no")])
def test_tables_that_begin_too_large_are_told(std: float, expected: str) -> None:
    torch.manual_seed(0)
    net = Tables(std)
    step = lambda: F.binary_cross_entropy_with_logits(  # noqa: E731
        net(torch.randint(0, 40, (64,)), torch.randint(0, 40, (64,))), torch.randint(0, 2, (64,)).float()
    )
    assert answer(lambda: train(net, step), "start") == expected


@pytest.mark.parametrize(("std", "expected"), [(1.0, "yes"), (0.05, "no")])
def test_a_tied_table_that_begins_too_large_is_told_where_few_of_its_classes_are_targets(
    std: float, expected: str
) -> None:
    table = nn.Embedding(300, 64)
    nn.init.normal_(table.weight, std=std)

    def step() -> torch.Tensor:
        tokens = torch.randint(0, 6, (512,))
        return F.cross_entropy(F.layer_norm(table(tokens), (64,)) @ table.weight.T, (tokens + 1) % 6)

    assert answer(lambda: train(table, step), "start") == expected


@pytest.mark.parametrize(("std", "scale", "expected"), [(3.0, 1.0, "yes"), (0.1, 1.0, "no"), (0.1, 200.0, "no")])
def test_layers_that_begin_too_large_are_told_and_large_inputs_are_not(std: float, scale: float, expected: str) -> None:
    torch.manual_seed(0)
    net = wide(std)
    step = lambda: F.cross_entropy(net(scale * torch.randn(64, 16)), torch.randint(0, 5, (64,)))  # noqa: E731
    assert answer(lambda: train(net, step), "start") == expected


def test_all_parameters_drawn_far_too_large_are_told_with_their_biases() -> None:
    torch.manual_seed(0)
    net = wide(0.1)
    for one in net.parameters():
        nn.init.normal_(one, std=10.0)
    step = lambda: F.cross_entropy(net(torch.randn(64, 16)), torch.randint(0, 5, (64,)))  # noqa: E731
    (found,) = [one for one in asked(lambda: train(net, step), "start") if one.answer == "yes"]
    assert {*found.evidence["names"]} >= {"0.weight", "0.bias", "2.weight"}


class Decaying(nn.Module):
    """A state space, whose rates of decay are spread over powers of ten."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.out = nn.Linear(4, 32), nn.Linear(32, 4)
        self.rates = nn.Parameter(torch.linspace(-9.2, -2.3, 32))
        nn.init.normal_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        state, kept = torch.zeros(len(x), 32), torch.exp(-self.rates.exp())
        for each in x.unbind(1):
            state = kept * state + self.read(each)
        made: Tensor = self.out(state)
        return made


def test_numbers_that_are_no_biases_may_be_spread_widely() -> None:
    torch.manual_seed(0)
    net = Decaying()
    step = lambda: F.cross_entropy(net(torch.randn(64, 20, 4)), torch.randint(0, 4, (64,)))  # noqa: E731
    answers = [one for one in asked(lambda: train(net, step), "start") if one.answer]
    assert answers
    assert all("rates" not in one.evidence.get("names", ()) for one in answers)


@pytest.mark.parametrize(("std", "names"), [(1.5, ["0.weight", "2.weight"]), (0.1, ["2.weight"])])
def test_layers_that_were_drawn_alike_are_named_together(std: float, names: list[str]) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(16, 64), nn.Linear(64, 5)
    net = nn.Sequential(first, nn.Tanh(), last)
    nn.init.normal_(first.weight, std=std)
    nn.init.normal_(last.weight, std=1.5)
    step = lambda: F.cross_entropy(net(torch.randn(64, 16)), torch.randint(0, 5, (64,)))  # noqa: E731
    (found,) = [one for one in asked(lambda: train(net, step), "start") if one.answer == "yes"]
    assert found.evidence["names"] == names


@pytest.mark.parametrize(("std", "expected"), [(0.1, "no"), (3.0, "yes")])
def test_layers_of_a_second_net_that_the_first_step_made_large_did_not_begin_so(std: float, expected: str) -> None:
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(16, 16), wide(std)
    step = lambda: F.cross_entropy(decoder(encoder(torch.randn(64, 16))), torch.randint(0, 5, (64,)))  # noqa: E731
    assert answer(lambda: train(nn.ModuleList([encoder, decoder]), step, 12, rate=2.0), "start") == expected


def test_large_targets_are_no_large_weights() -> None:
    net = wide(0.1)
    step = lambda: F.mse_loss(net(torch.randn(64, 16))[:, 0], 50 + torch.randn(64))  # noqa: E731
    assert answer(lambda: train(net, step), "start") == "no"


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a line": lambda x: x[:, 0] + torch.randn(len(x)),
    "a product": lambda x: 2 * x[:, 0] * x[:, 1],
    "other rows": lambda x: x[torch.randperm(len(x)), 0],
    "the row before": lambda x: x[:, 0].roll(1),
    "one number": lambda x: torch.ones(len(x)),
}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("a line", "no"),
        ("a product", "no"),
        ("other rows", "yes"),
        ("the row before", "yes"),
        ("one number", "unknown"),
    ],
)
def test_numbers_of_other_rows_are_unrelated_and_those_that_are_hard_are_not(kind: str, expected: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))

    def step() -> Tensor:
        x = torch.randn(96, 4)
        return F.mse_loss(net(x).squeeze(1), NUMBERS[kind](x))

    assert answer(lambda: train(net, step, 12), "labels") == expected


class Named(Dataset[Tensor]):
    def __init__(self, names: list[str], numbers: dict[str, int] | None = None) -> None:
        self.numbers = numbers or {name: number for number, name in enumerate(dict.fromkeys(names))}
        self.names = names
        self.counts = {f"film {number}": 10 * number + len(names) for number in range(20)}  # which number no names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, place: int) -> Tensor:
        return torch.tensor(self.numbers[self.names[place]])


def folds(again: bool) -> Iterator[tuple[Named, Named]]:
    """Of a cross validation, each with a numbering of its own for the training."""
    names = [f"film {number}" for number in torch.randint(0, 20, (200,)).tolist()]
    for part in (slice(0, 40), slice(40, 80)):
        train = Named(names[: part.start] + names[part.stop :])
        yield train, Named(names[part], None if again else train.numbers)


def squared(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("again", "expected"), [(True, "yes"), (False, "")])
def test_names_that_are_numbered_anew_for_the_evaluation_are_told(again: bool, expected: str) -> None:
    net = nn.Sequential(nn.Embedding(20, 1), nn.Flatten())

    def run() -> None:
        for trained, read in folds(again):
            for x in DataLoader(trained, batch_size=20, shuffle=True):
                train(net, partial(squared, net, x), 1)
            for x in DataLoader(read, batch_size=20):
                net(x)

    assert answer(run, "numbering") == expected
