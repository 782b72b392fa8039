"""What is frozen and what is given back: told where a copy learns without it, and not of what is so on purpose."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from test_doctor_ask import answer, asked, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

LOADERS: list[DataLoader[tuple[torch.Tensor, ...]]] = []  # those of a script are there at its end
WORDS, LENGTH, DIM = 60, 8, 4
Vectors = Callable[[torch.Tensor], torch.Tensor]


def noise(scores: torch.Tensor) -> torch.Tensor:
    return 0.6 * torch.randn(WORDS, DIM)


def knowing(scores: torch.Tensor) -> torch.Tensor:
    """Vectors of which one number is what has to be known of a word, as those of a text have."""
    return torch.cat([scores[:, None], torch.randn(WORDS, DIM - 1)], 1)


class Mean(nn.Module):
    def __init__(self, vectors: torch.Tensor, freeze: bool) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding.from_pretrained(vectors, freeze=freeze), nn.Linear(DIM, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(self.table(tokens).mean(1)).squeeze(-1)
        return made


def trains(vectors: Vectors, *, freeze: bool = True, is_told: bool = True) -> Callable[[], None]:
    """A training on sums of scores of words, or on numbers that nothing tells."""

    def train() -> None:
        scores, tokens = torch.randn(WORDS), torch.randint(0, WORDS, (1600, LENGTH))
        y = scores[tokens].sum(1) if is_told else torch.randn(len(tokens))
        net = Mean(vectors(scores), freeze)
        optimizer = torch.optim.Adam([one for one in net.parameters() if one.requires_grad], lr=3e-2)
        loader = DataLoader(TensorDataset(tokens, y), 32, shuffle=True)
        LOADERS.append(loader)
        for _ in range(4):
            for x, target in loader:
                optimizer.zero_grad()
                F.mse_loss(net(x), target).backward()
                optimizer.step()

    return train


def test_a_frozen_table_of_noise_is_told_and_one_that_knows_or_learns_is_not() -> None:
    (found,) = asked(trains(noise), "frozen")
    assert found.answer == "yes"
    assert found.evidence["trained"] < 0.7 * found.evidence["guess"] < found.evidence["without"]
    assert (found.evidence["name"], found.evidence["table"]) == ("table.weight", True)


@pytest.mark.parametrize(
    "train", [trains(knowing), trains(noise, freeze=False), trains(noise, is_told=False)],
    ids=["knows", "trained", "noise"],
)  # fmt: skip
def test_a_frozen_table_is_not_told_of_where_it_is_not_what_is_missing(train: Callable[[], None]) -> None:
    assert answer(train, "frozen") == "no"


class Sentences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A data set of a class of its own, of which only the batches that were given are known."""

    def __init__(self) -> None:
        self.x = torch.randint(0, WORDS, (2500, 12))
        self.y = (self.x < 10).sum(1).gt((self.x >= WORDS - 10).sum(1)).float()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[at], self.y[at]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.out = nn.Embedding(WORDS, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(self.body(self.table(tokens))[0].mean(1)).squeeze(1)
        return made


@pytest.mark.parametrize(("is_frozen", "expected"), [(True, "yes"), (False, "no")])
def test_a_body_that_was_frozen_as_it_was_drawn_is_told_of_binary_labels(is_frozen: bool, expected: str) -> None:
    def train() -> None:
        net = Recurrent()
        for part in (net.table, net.body) if is_frozen else ():
            part.requires_grad_(False)
        optimizer = torch.optim.Adam([one for one in net.parameters() if one.requires_grad], lr=3e-3)
        for _ in range(3):
            for x, y in DataLoader(Sentences(), 50, shuffle=True):
                optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(net(x), y).backward()
                optimizer.step()

    found = asked(train, "frozen")[-1]
    assert found.answer == expected
    assert not found.evidence.get("table")


Syncs = Callable[[nn.Module, nn.Module], object]


def moves(slow: nn.Module, fast: nn.Module) -> nn.Module:
    with torch.no_grad():
        for one, other in zip(slow.parameters(), fast.parameters(), strict=True):
            one.lerp_(other, 0.1)
    return slow


def plays(sync: Syncs, *, every: int = 4) -> Callable[[], None]:
    """A training towards what another net says of the next state."""

    def train() -> None:
        online, target = nn.Linear(6, 3), nn.Linear(6, 3)
        target.load_state_dict(online.state_dict())
        optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
        for step in range(20):
            x = torch.randn(32, 6)
            with torch.no_grad():
                y = 1 + 0.9 * target(x.roll(1, 0))
            optimizer.zero_grad()
            F.mse_loss(online(x), y).backward()
            optimizer.step()
            if step % every == every - 1:
                sync(online, target)

    return train


def test_a_trained_net_that_is_given_the_weights_of_its_target_is_told() -> None:
    (found,) = asked(plays(lambda online, target: online.load_state_dict(target.state_dict())), "undone")
    assert (found.answer, found.evidence["kind"], found.evidence["times"]) == ("yes", "loaded", 5)
    assert found.file == __file__


@pytest.mark.parametrize("sync", [
    lambda online, target: target.load_state_dict(online.state_dict()),
    lambda online, target: moves(target, online),
    lambda online, target: (moves(target, online), online.load_state_dict(target.state_dict())),  # as Lookahead does
    lambda online, target: online.load_state_dict({key: one.clone() for key, one in online.state_dict().items()}),
], ids=["hard", "polyak", "lookahead", "own"])  # fmt: skip
def test_targets_that_follow_and_states_of_ones_own_are_not_told_of(sync: Syncs) -> None:
    assert asked(plays(sync), "undone") == []


def test_one_load_after_the_first_step_is_a_start() -> None:
    load: Syncs = lambda online, target: online.load_state_dict(target.state_dict())  # noqa: E731
    assert asked(plays(load, every=11), "undone") == []
