"""Terms of a loss: one that is left, one that is minimised beside another, a sample among its own negatives."""

import ast
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask import source
from test_doctor_ask import ROWS, answer, asked, nothing_was_compiled, steps

__all__ = ["nothing_was_compiled"]

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SAME = torch.eye(ROWS, dtype=torch.bool)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([head(x) for head in self.heads])


def replaced(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = made.new_zeros(())
    for one in made.unbind():
        loss = 0.5 * F.cross_entropy(one, y)
    return loss / 2


def added(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = made.new_zeros(())
    for one in made.unbind():
        loss = loss + F.cross_entropy(one, y)
    return loss


class OfHeads(nn.Module):
    """Terms of two heads, of which the first begins later."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.heads, self.keeps = nn.ModuleList(nn.Linear(6, 3) for _ in range(2)), keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, loss = torch.arange(len(x)) % 3, x.new_zeros(())
        for number, head in enumerate(self.heads):
            term = F.cross_entropy(head(x), y)
            if number or self.keeps:
                loss = loss + term
        return loss


def overwriting(x: torch.Tensor, heads: nn.ModuleList) -> torch.Tensor:
    loss = x.new_zeros(())
    for head in heads:
        loss = 0.5 * F.cross_entropy(head(x), torch.arange(len(x)) % 3)
    return loss / 2


class Replaced(OfHeads):
    """A term in the variable of the loss, which another one takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.arange(len(x)) % 3
        loss = 10 * F.cross_entropy(self.heads[0](x), y)
        if not self.keeps:
            loss = F.cross_entropy(self.heads[1](x), y)
        return loss


class Overwriting(OfHeads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return overwriting(x, self.heads)


def left(net: nn.Module) -> tuple[str, bool]:
    found = asked(lambda: steps(net, lambda loss, y: loss), "dropped")[-1]
    assert found.answer == "no" or found.evidence["is_loss"] == found.evidence["op"].endswith("entropy")
    return found.answer, bool(found.evidence.get("again"))


def test_a_term_that_the_next_one_replaces_is_told_apart_from_one_that_waits() -> None:
    assert left(Overwriting(keeps=True)) == ("yes", True)
    assert left(Replaced(keeps=False)) == ("yes", True)
    assert left(Replaced(keeps=True))[0] == "no"
    assert left(OfHeads(keeps=False)) == ("yes", False)
    assert left(OfHeads(keeps=True)) == ("no", False)
    assert answer(lambda: steps(Heads(), added), "dropped") == "no"
    assert answer(lambda: steps(Heads(), replaced), "dropped") == "no"  # all heads are in one tensor


def monitored(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    F.mse_loss(made, F.one_hot(y, 3).float())  # shown, and of the same parameters
    return F.cross_entropy(made, y)


def test_a_number_that_is_only_shown_is_no_term() -> None:
    assert answer(lambda: steps(nn.Linear(6, 3), monitored), "dropped") == "no"


def overlap(made: torch.Tensor, y: torch.Tensor, sign: int) -> torch.Tensor:
    mask = F.one_hot(y, 3).float()
    probs = made.sigmoid()
    dice = 2 * (probs * mask).sum(1) / (probs.sum(1) + mask.sum(1))
    return 0.5 * F.binary_cross_entropy(probs, mask) + sign * dice.mean()


def other_target(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    probs, mask = made.sigmoid(), F.one_hot(y, 3).float()
    return F.binary_cross_entropy(probs, F.one_hot((y + 1) % 3, 3).float()) + (probs * mask).mean()


def test_an_overlap_that_is_minimised_beside_a_loss_with_the_same_target_is_told() -> None:
    assert answer(lambda: steps(nn.Linear(6, 3), functools.partial(overlap, sign=1)), "punished") == "yes"
    assert answer(lambda: steps(nn.Linear(6, 3), functools.partial(overlap, sign=-1)), "punished") == "no"
    assert answer(lambda: steps(nn.Linear(6, 3), other_target), "punished") == "unknown"


def hinge(pick: Callable[[torch.Tensor], torch.Tensor]) -> Loss:
    def loss(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pairs = (made[:, None] - made).pow(2).sum(-1)
        return (pairs.masked_fill(SAME, 0).max(1).values - pick(pairs) + 0.5).relu().mean()

    return loss


def contrast(pick: Callable[[torch.Tensor], torch.Tensor]) -> Loss:
    def loss(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.normalize(made, dim=1)
        return F.cross_entropy(pick(z @ z.T / 0.1), (torch.arange(ROWS) + ROWS // 2) % ROWS)

    return loss


def shifted(pick: Callable[[torch.Tensor], torch.Tensor]) -> Loss:
    """Scores are shifted by their largest, so that their exponentials do not overflow."""

    def loss(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.normalize(made, dim=1)
        scores = z @ z.T / 0.1
        scores = scores - pick(scores)
        others = (scores.exp() * ~SAME).sum(1, keepdim=True).log()
        return -((scores - others) * ((y[:, None] == y) & ~SAME)).mean()

    return loss


def two_sets(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    near = made.detach() + 1e-3 * torch.randn_like(made)
    return torch.cdist(made, near).min(1).values.mean() + F.cross_entropy(made @ near.T, torch.arange(ROWS))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (hinge(lambda pairs: pairs.min(1).values), "yes"),
        (hinge(lambda pairs: pairs.amin(dim=1)), "yes"),
        (hinge(lambda pairs: (-pairs).topk(1, dim=1).values[:, 0]), "yes"),
        (hinge(lambda pairs: pairs.masked_fill(SAME, 1e6).min(1).values), "no"),
        (hinge(lambda pairs: pairs.kthvalue(2, dim=1).values), "no"),
        (hinge(lambda pairs: pairs.min().expand(1)), "no"),
        (contrast(lambda scores: scores), "yes"),
        (contrast(lambda scores: scores.masked_fill(SAME, -1e9)), "no"),
        (two_sets, "no"),
        (shifted(lambda scores: scores.max(1, keepdim=True).values.detach()), "no"),
        (shifted(lambda scores: scores.amax(1, keepdim=True)), "no"),
    ],
)
def test_a_sample_that_is_its_own_nearest_negative_is_told(loss: Loss, expected: str) -> None:
    assert answer(lambda: steps(nn.Linear(6, 8), loss), "own negative") == expected


def pushed(pick: Callable[[torch.Tensor], torch.Tensor], margin: float = 2.0, *, alike: bool = False) -> Loss:
    """Drives apart what is picked of all pairs, by their distances or by what their rows have in common."""

    def loss(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if alike:
            z = F.normalize(made, dim=1)
            return (pick((z @ z.T).masked_fill(SAME, 1e6)) - margin).relu().mean() + 0 * made.sum()
        return (margin - pick(torch.cdist(made, made).masked_fill(SAME, 1e-3))).relu().mean()

    return loss


def gathered(pairs: torch.Tensor, *, largest: bool) -> torch.Tensor:
    found = pairs.detach().masked_fill(SAME, 0 if largest else 1e6).topk(2, dim=1, largest=largest).indices
    return pairs.gather(1, found)


def hard_positives(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    pairs, same = torch.cdist(made, made), y[:, None] == y
    return (pairs.masked_fill(~same, 0).max(1).values - pairs.masked_fill(same, 1e6).min(1).values + 9).relu().mean()


def of_a_bag(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (0.1 - made.sigmoid().max(1).values).relu().mean() + 0 * made.sum()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (pushed(lambda pairs: pairs.max(1).values), "yes"),
        (pushed(functools.partial(gathered, largest=True)), "yes"),
        (pushed(lambda pairs: pairs.gather(1, pairs.argmax(1, keepdim=True))), "yes"),
        (pushed(lambda pairs: pairs.min(1).values, 0.2, alike=True), "yes"),
        (pushed(functools.partial(gathered, largest=False)), "no"),
        (pushed(lambda pairs: pairs.masked_fill(SAME, 1e6).min(1).values), "no"),
        (pushed(lambda pairs: pairs.masked_fill(SAME, -1e6).max(1).values, 0.2, alike=True), "no"),
        (pushed(lambda pairs: pairs.max(1).values, 1e-4), "no"),  # all pairs keep it
        (hard_positives, "no"),
        (of_a_bag, "no"),
    ],
)
def test_farthest_negatives_are_told_where_the_nearest_ones_are_left_together(loss: Loss, expected: str) -> None:
    assert answer(lambda: steps(nn.Linear(6, 8), loss), "easiest") == expected


def mined(fill: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], sign: int = 1) -> Loss:
    """The least alike of the same class, or the nearest of the others, by what stands in the place of the rest."""

    def loss(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        same, alike = y[:, None] == y, F.normalize(made.abs(), dim=1) @ F.normalize(made.abs(), dim=1).T
        picked = fill(alike, same & ~SAME).argmin(1) if sign > 0 else fill(-alike, ~same).argmax(1)
        return alike.gather(1, picked[:, None]).mean() + 0 * made.sum()

    return loss


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (mined(torch.mul), "yes"),
        (mined(lambda alike, mask: alike * mask.float()), "yes"),
        (mined(torch.mul, -1), "yes"),
        (mined(lambda alike, mask: -(alike * mask)), "no"),  # 0 is never among what is picked
        (mined(lambda alike, mask: alike.masked_fill(~mask, 9)), "no"),
        (mined(lambda alike, mask: alike * mask + 9 * ~mask), "no"),
        (mined(lambda alike, mask: alike.masked_fill(~mask, -9), -1), "no"),
    ],
)
def test_what_a_mask_made_0_is_told_where_it_is_picked(loss: Loss, expected: str) -> None:
    assert answer(lambda: steps(nn.Linear(6, 8), loss), "picked masked") == expected


def supervised(same: Callable[[torch.Tensor], torch.Tensor]) -> Loss:
    def loss(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.normalize(made, dim=1)
        scores = (z @ z.T / 0.1).masked_fill(SAME, -1e9).log_softmax(1)
        return -(scores * (same(y).float().expand(ROWS, ROWS) * ~SAME)).mean()

    return loss


@pytest.mark.parametrize(
    ("same", "expected"),
    [
        (lambda y: torch.eq(y, y.t()), "yes"),
        (lambda y: y.view(-1, 1) == y.view(-1, 1).T, "no"),
        (lambda y: y[:, None] == y, "no"),
        (lambda y: y == y.clone().flip(0), "no"),
        (lambda y: torch.eq(*torch.stack([y, y.flip(0)], 1).t()), "no"),  # two columns of one table
        (lambda y: y.float() == y.float(), "no"),  # where a number is not NaN
    ],
)
def test_labels_that_are_compared_with_themselves_one_by_one_are_told(
    same: Callable[[torch.Tensor], torch.Tensor], expected: str
) -> None:
    assert answer(lambda: steps(nn.Linear(6, 8), supervised(same)), "itself") == expected


@pytest.mark.parametrize(("place", "expected"), [("unread", True), ("read", False), ("elsewhere", False)])
def test_a_penalty_beside_the_backward_of_a_loss_that_a_function_computes_is_told(place: str, expected: bool) -> None:
    """And none that is read, or that a function of its own measures, of which nothing goes back."""
    net, x, y = nn.Linear(6, 3), torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
    seen = []

    def compute() -> torch.Tensor:
        return F.cross_entropy(net(x), y)

    def measure() -> None:
        size = next(net.parameters()).abs().mean()  # noqa: F841

    def learn(optimizer: torch.optim.Optimizer) -> None:
        loss = compute()
        penalty = next(net.parameters()).abs().mean()  # noqa: F841
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def learn_and_look(optimizer: torch.optim.Optimizer) -> None:
        loss = compute()
        if place == "elsewhere":
            measure()
        penalty = next(net.parameters()).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(penalty.item())

    def script() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            (learn if place == "unread" else learn_and_look)(optimizer)

    found = [one.evidence["name"] for one in asked(script, "unread field")]
    assert found == (["penalty"] if expected else [])


def test_functions_of_a_file_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of many functions is not walked again for each line of a step."""
    source._functions.cache_clear()
    tree = ast.parse("\n".join(f"def f{k}(x):\n    a{k} = x.mean()" for k in range(300)))
    walks: list[ast.AST] = []

    def walked(node: ast.AST) -> tuple[ast.AST, ...]:
        walks.append(node)
        return tuple(ast.walk(node))

    monkeypatch.setattr(source, "walked", walked)
    assert len([name for line in range(1, 601) for name in source.unread_at(tree, line)]) == 300
    assert walks.count(tree) == 1


def test_scores_that_an_operation_hands_on_as_they_are_are_followed() -> None:
    """As ``logits.float()`` of scores in fp32: what it gives is what it was given."""
    assert answer(lambda: steps(nn.Linear(6, 3), lambda made, y: F.cross_entropy(made.float(), y)), "related") == "no"
