"""Pairs that are far as given and brought near, pictures that a data set turns, scalers that are fitted anew.

How it could be silently wrong: a distance that is to have a value is taken for one that a label says; pairs that were
mined to be hard are called turned; axes that are cut or permuted as they lie are called torn.
"""

import ast
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask.calls import fitted_anew
from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def contrast(distance: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, turned: bool = False) -> Loss:
    def loss(one: torch.Tensor, other: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        d, near = distance(one, other), 1 - same if turned else same
        return (near * d.pow(2) + (1 - near) * F.relu(2 - d).pow(2)).mean()

    return loss


def by_cosine(one: torch.Tensor, other: torch.Tensor, same: torch.Tensor, *, turned: bool = False) -> torch.Tensor:
    return F.cosine_embedding_loss(one, other, (1 - 2 * same) if turned else (2 * same - 1))


def to_a_value(one: torch.Tensor, other: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(F.pairwise_distance(one, other), 0.3 + torch.rand(len(one)))


def by_hand(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return ((one - other).pow(2).sum(1) + 1e-6).sqrt()


def pairs(loss: Loss, *, mined: bool = False) -> None:
    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    people = torch.randn(30, 20)
    near = torch.cdist(people, people).fill_diagonal_(99.0).argmin(1)
    for _ in range(8):
        who, same = torch.randint(0, 30, (64,)), (torch.rand(64) < 0.5).float()
        others = near[who] if mined else (who + torch.randint(1, 30, (64,))) % 30
        second = torch.where(same.bool(), who, others)
        one, other = (people[it] + 0.5 * torch.randn(64, 20) for it in (who, second))
        optimizer.zero_grad()
        loss(net(one), net(other), same).backward()
        optimizer.step()


@pytest.mark.parametrize("loss", [
    contrast(F.pairwise_distance, turned=True),
    contrast(by_hand, turned=True),
    lambda one, other, same: by_cosine(one, other, same, turned=True),
])  # fmt: skip
def test_far_pairs_that_are_brought_together_are_told(loss: Loss) -> None:
    assert answer(lambda: pairs(loss), "far pairs") == "yes"


@pytest.mark.parametrize("mined", [False, True])
@pytest.mark.parametrize("loss", [contrast(F.pairwise_distance), contrast(by_hand), by_cosine, to_a_value])
def test_near_pairs_and_distances_that_have_a_value_are_not(loss: Loss, mined: bool) -> None:
    assert answer(lambda: pairs(loss, mined=mined), "far pairs") == "no"


@pytest.mark.parametrize("distance", [F.pairwise_distance, by_hand])
def test_marks_of_alike_pairs_are_not_what_a_distance_should_be(
    distance: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    assert answer(lambda: pairs(contrast(distance)), "error preferred") != "yes"
    assert answer(lambda: pairs(contrast(distance), mined=True), "error preferred") != "yes"


def turned_or_moved(*, learned: bool) -> None:
    """A pair is a point and the one across, or one beside it: what belongs together is far apart, and can be seen."""
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2 if learned else 0.0)
    for _ in range(150 if learned else 5):
        one, same = torch.randn(64, 4), (torch.rand(64) < 0.5).float()
        other = torch.where(same[:, None] > 0, -one, one + 0.3 * torch.randn(64, 4).sign())
        optimizer.zero_grad()
        contrast(by_hand)(net(one), net(other), same).backward()
        optimizer.step()


def test_far_pairs_that_a_net_learned_to_have_near_are_not_told() -> None:
    assert answer(lambda: turned_or_moved(learned=True), "far pairs") != "yes"
    assert answer(lambda: turned_or_moved(learned=False), "far pairs") == "yes"


def padded(*, at: str, longest: int, late: bool = False, both: bool = False) -> None:
    """Rows of 5 to 10 tokens of which some are longer."""
    rnn, head = nn.LSTM(8, 8, batch_first=not late, bidirectional=both), nn.Linear(16 if both else 8, 1)
    embed = nn.Embedding(20, 8)
    net = nn.ModuleDict({"embed": embed, "rnn": rnn, "head": head})
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(5):
        lengths = torch.randint(5, 11, (24,))
        lengths[:2] = longest
        tokens = torch.randint(1, 20, (24, longest)) * (torch.arange(longest) < lengths[:, None])
        out, (final, _) = rnn(embed(tokens.T if late else tokens))
        out = out.transpose(0, 1) if late else out
        if at in ("end", "last"):
            state = out[torch.arange(24), lengths - 1 if at == "last" else -1]
        else:
            state = torch.cat([*final], 1) if at == "final" else out.mean(1)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(head(state)[:, 0], (tokens[:, 0] > 9).float()).backward()
        optimizer.step()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", ["end", "final"])
def test_a_state_far_behind_the_last_token_is_told(at: str, late: bool) -> None:
    assert answer(lambda: padded(at=at, longest=60, late=late), "padding forgotten") == "yes"


@pytest.mark.parametrize(("at", "longest"), [("last", 60), ("mean", 60), ("end", 11)])
def test_a_state_at_the_last_token_or_near_it_is_not(at: str, longest: int) -> None:
    assert answer(lambda: padded(at=at, longest=longest), "padding forgotten") == "no"


def test_a_layer_of_both_directions_has_read_a_row_last_in_one_of_them() -> None:
    assert answer(lambda: padded(at="final", longest=60, both=True), "padding forgotten") == "no"


@pytest.mark.parametrize(("text", "told"), [
    ("X_train = StandardScaler().fit_transform(X_train)\nX_test = StandardScaler().fit_transform(X_test)", True),
    ("self.s = MinMaxScaler()\nself.s.fit(df['train'])\ny = self.s.fit_transform(df['val'])", True),
    ("s = StandardScaler()\nX_train = s.fit_transform(X_train)\nX_test = s.transform(X_test)", False),
    ("s = StandardScaler()\nfor train, x in folds:\n  s.fit(train)\n  f(s.transform(x))", False),
    ("s, m = StandardScaler(), TSNE()\ns.fit(x_train)\nm.fit_transform(x_test)", False),
    ("s = LabelEncoder()\ns.fit(y_train)\ns.fit_transform(y_test)", False),
    ("s = MinMaxScaler()\ns.fit_transform(train)\ns.fit_transform(latest)", False),
    ("s = StandardScaler()\nfor c in names:\n  s.fit_transform(train_df[c])\n  s.fit_transform(test_df[c])", True),
    ("s = StandardScaler()\ns.fit(x_train)\ns.fit(x_train)\ns.fit_transform(x_valid)", True),
    ("s = StandardScaler()\ns.fit(train)\ns = StandardScaler()\ns.fit(test)", False),  # the other way round
    ("s, t = f()\ns = StandardScaler()\nt = StandardScaler()\ns.fit(train_x)\nt.fit(y.to(dev))", False),
    ("s = MinMaxScaler()\nt = MinMaxScaler()\ns.fit(X_train)\nt.fit(X_test)", False),
    ("s = MinMaxScaler()\ns.fit(X_train)\ns.fit(val_scores)", False),
    ("s = MinMaxScaler()\ns.fit(x[train])\ns.fit(x[~test])", False),
    ("s = MinMaxScaler()\nif anew:\n  s.fit(train)\nelse:\n  s.fit(test)", False),
    ("a = [StandardScaler().fit(train[i]) for i in own]\nb = [StandardScaler().fit(test[i]) for i in own]", False),
    ("for i in own:\n  StandardScaler().fit(train[i])\nfor i in own:\n  StandardScaler().fit(test[i])", False),
    ("s = TemperatureScaler()\ns.fit(train)\ns.fit(val)", False),
])  # fmt: skip
def test_scalers_that_are_fitted_to_held_out_data_are_told(text: str, told: bool) -> None:
    assert bool([*fitted_anew(ast.parse(text))]) == told
