"""Ways that a loss or a gradient takes by mistake: told where it does, and not of what only looks alike."""

import functools
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.recorder import Doctor
from test_doctor_ask import ROWS, answer, asked, nothing_was_compiled, steps

__all__ = ["nothing_was_compiled"]

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TIME = 6


def policy(old: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    net = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        x, y, advantage = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,)), torch.randn(ROWS)
        past = old(net, x).gather(1, y[:, None])[:, 0]
        now = net(x).log_softmax(1).gather(1, y[:, None])[:, 0]
        loss = -((now - past).exp() * advantage).mean() + 0.1 * net(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def likely(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = net(x)
    return made.log_softmax(1)


def before(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return likely(net, x)


def test_a_ratio_with_itself_is_told_and_one_with_what_was_before_is_not() -> None:
    assert answer(lambda: policy(likely), "itself") == "yes"
    assert answer(lambda: policy(before), "itself") == "no"
    surrogate: Loss = lambda made, y: ((made - made.detach()).exp() * y[:, None]).mean()  # noqa: E731
    assert answer(lambda: steps(nn.Linear(6, 3), surrogate), "itself") == "no"


def test_scores_with_itself_as_targets_are_told_and_those_with_the_other_view_are_not() -> None:
    def own(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.normalize(made, dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(ROWS))

    def other(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.normalize(made, dim=1)
        scores = (z @ z.T / 0.1).masked_fill(torch.eye(ROWS, dtype=torch.bool), -1e9)
        return F.cross_entropy(scores, (torch.arange(ROWS) + ROWS // 2) % ROWS)

    assert answer(lambda: steps(nn.Linear(6, 3), own), "itself") == "yes"
    assert answer(lambda: steps(nn.Linear(6, 3), other), "itself") == "no"


def triples(loss: Loss) -> Loss:
    def of(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss((made * made.roll(1, 0)).sum(1), (made * made.roll(2, 0)).sum(1))

    return of


def apart(made: torch.Tensor, y: torch.Tensor, sign: int = 1) -> torch.Tensor:
    pos = (made - made.roll(1, 0)).pow(2).sum(1)
    neg = (made - made.roll(2, 0)).pow(2).sum(1)
    return ((pos - neg) * sign + 1.0).relu().mean()


def test_positive_pairs_that_are_driven_apart_are_told_and_distances_are_not() -> None:
    told = [
        triples(lambda pos, neg: -F.logsigmoid(neg - pos).mean()),
        triples(lambda pos_score, neg_score: (pos_score - neg_score + 1.0).relu().mean()),
    ]
    fine = [triples(lambda pos, neg: -F.logsigmoid(pos - neg).mean()),
            triples(lambda pos, neg: (1.0 - (pos - neg)).relu().mean()), apart]  # fmt: skip
    told += [
        triples(lambda pos, neg: -(F.logsigmoid(pos) + F.logsigmoid(neg)).mean()),
        lambda made, y: apart(made, y, -1),
    ]
    fine += [
        triples(lambda pos, neg: -(F.logsigmoid(pos) + F.logsigmoid(-neg)).mean()),
        triples(lambda pos, neg: (-neg - -pos).relu().mean() * 0 + (neg - pos).exp().mean()),
    ]
    answers = [answer(functools.partial(steps, nn.Linear(6, 3), loss), "misplaced") for loss in told + fine]
    assert answers == ["yes"] * 4 + ["no"] * 5


def overlap(made: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    probs = made.sigmoid()
    inter = (probs * mask).sum(1)
    return ((2 * inter + 1) / (probs.sum(1) + mask.sum(1) + 1)).mean()


def outside(made: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (made.sigmoid() * (1 - mask)).mean()


def gated(made: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (made.sum(1) - 1).pow(2).mean() + 0.1 * (made.sigmoid() * mask).mean()


def by_hand(made: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return -(F.logsigmoid(made) * mask + F.logsigmoid(-made) * (1 - mask)).mean()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (overlap, True), (lambda made, mask: -by_hand(made, mask) + 0 * overlap(made, mask), False),
        (lambda made, mask: 1 - overlap(made, mask), False), (outside, False), (gated, False), (by_hand, False),
    ],
)  # fmt: skip
def test_a_share_of_the_mask_that_is_made_small_is_told(loss: Loss, expected: bool) -> None:
    def train() -> None:
        net = nn.Linear(6, 5)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(ROWS, 6)
            optimizer.zero_grad()
            loss(net(x), (x[:, :5] > 0).float()).backward()
            optimizer.step()

    assert (answer(train, "punished") == "yes") is expected


def test_a_likelihood_that_is_minimised_is_told() -> None:
    def density(sign: int, drawn: bool) -> None:
        net = nn.Linear(6, 2)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(ROWS, 6)
            dist = torch.distributions.Normal(net(x)[:, :1], net(x)[:, 1:].exp())
            sample = dist.rsample()
            if drawn:
                loss = dist.log_prob(sample).mean()
            elif sign > 0:
                loss = dist.log_prob(x[:, :1]).mean()
            else:
                loss = -dist.log_prob(x[:, :1]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert answer(lambda: density(1, False), "unlikely") == "yes"
    assert answer(lambda: density(-1, False), "unlikely") != "yes"
    assert answer(lambda: density(1, True), "unlikely") == "no"


def test_what_is_done_with_a_loss_behind_its_backward_is_not_its_line() -> None:
    def train() -> None:
        net = nn.Linear(6, 2)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(ROWS, 6)
            dist = torch.distributions.Normal(net(x)[:, :1], net(x)[:, 1:].exp())
            loss = dist.log_prob(x[:, :1]).mean()
            optimizer.zero_grad()
            loss.backward()
            with torch.no_grad():
                loss /= 2
            optimizer.step()

    assert answer(train, "unlikely") == "yes"


def sequences(step: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor], *, each: bool = False) -> None:
    cell, head = nn.GRUCell(1, 5), nn.Linear(5, 1)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
    for _ in range(4):
        x = torch.randn(ROWS, TIME)
        h, made = torch.zeros(ROWS, 5), []
        for t in range(TIME):
            h = step(cell, x[:, t : t + 1], h)
            made.append(head(h))
        loss = (torch.stack(made).mean(0) if each else made[-1]) - x[:, :1]
        optimizer.zero_grad()
        loss.pow(2).mean().backward()
        optimizer.step()


def test_a_state_that_is_detached_at_each_step_is_told_unless_each_step_counts() -> None:
    assert answer(lambda: sequences(lambda cell, x, h: cell(x, h.detach())), "forgotten") == "yes"
    assert answer(lambda: sequences(lambda cell, x, h: cell(x, h)), "forgotten") == "no"
    assert answer(lambda: sequences(lambda cell, x, h: cell(x, h.detach()), each=True), "forgotten") == "no"
    fed: Any = lambda cell, x, h: cell(x + h.mean(1, keepdim=True).detach(), h)  # noqa: E731
    assert answer(lambda: sequences(fed), "forgotten") == "no"


def cells(state: str, cell: type[nn.Module] = nn.GRUCell, calls: int = TIME) -> None:
    """A cell that is called for each piece of a sequence, with some state."""
    made_by, first, head = cell(1, 5), nn.Linear(TIME, 5), nn.Linear(5, 1)
    adam = torch.optim.Adam([*made_by.parameters(), *first.parameters(), *head.parameters()])
    for _ in range(4):
        x = torch.randn(ROWS, TIME)
        start, total = first(x).tanh(), torch.zeros(ROWS, 1)
        h: Any = (start, start) if cell is nn.LSTMCell else start
        for t in range(calls):
            given = {"carried": h, "from zeros": None, "the first": h, "made anew": first(x + t).tanh()}
            given |= {"detached": tuple(one.detach() for one in h) if isinstance(h, tuple) else h.detach()}
            given |= {"half detached": (h[0].detach(), h[1]) if isinstance(h, tuple) else (h + h.detach()) / 2}
            new = made_by(x[:, t : t + 1], given[state])
            h = new if state in ("carried", "detached", "half detached") else h
            total = total + head(new[0] if cell is nn.LSTMCell else new)
        adam.zero_grad()
        (total - x.sum(1, keepdim=True)).pow(2).mean().backward()
        adam.step()


@pytest.mark.parametrize(
    ("state", "expected"), [("carried", "no"), ("from zeros", "yes"), ("the first", "yes"), ("made anew", "no")]
)
def test_a_cell_of_which_each_call_starts_from_the_same_state_is_told(state: str, expected: str) -> None:
    assert answer(lambda: cells(state), "not carried") == expected
    if state in ("carried", "the first"):
        assert answer(lambda: cells(state, nn.LSTMCell), "not carried") == expected


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell])
def test_a_state_that_is_detached_between_all_steps_is_told(cell: type[nn.Module]) -> None:
    found = {
        state: answer(functools.partial(cells, state, cell), "cut between")
        for state in ("detached", "half detached", "carried")
    }
    assert found == {"detached": "yes", "half detached": "no", "carried": "no"}


def test_a_few_branches_of_one_state_are_no_sequence() -> None:
    assert answer(lambda: cells("the first", calls=3), "not carried") == "no"


def test_what_is_made_again_and_again_of_the_same_may_be_trained_by_its_last_step() -> None:
    assert answer(lambda: sequences(lambda cell, x, h: cell(torch.ones_like(x), h.detach())), "forgotten") != "unknown"

    class Refining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.step = nn.Linear(6, 6), nn.Linear(12, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.start(x)
            for _ in range(4):
                made = self.step(torch.cat([x, made.detach()], 1))
            return made

    assert answer(lambda: steps(Refining(), F.cross_entropy), "forgotten") == "no"


@pytest.mark.parametrize(("turn", "expected"), [
    (lambda x: x.view(ROWS, 3, 5, 4), "yes"), (lambda x: x.reshape(ROWS, 3, 4, 5), "yes"),
    (lambda x: x.permute(0, 3, 1, 2), "no"), (lambda x: x.permute(0, 3, 1, 2).contiguous(), "no"),
    (lambda x: x.view(ROWS, 60)[:, :, None, None].expand(-1, -1, 2, 2)[:, :3], "no"),
])  # fmt: skip
def test_a_picture_that_is_viewed_in_another_order_before_the_net_is_told(turn: Any, expected: str) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.LazyLinear(3))
        net(turn(torch.randn(ROWS, 4, 5, 3)))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = turn(torch.randn(ROWS, 4, 5, 3))
            optimizer.zero_grad()
            F.cross_entropy(net(x), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "axes") == expected


@pytest.mark.parametrize(("marks", "expected"), [
    (lambda y: (torch.rand(ROWS, 3) > 0.5).float(), "yes"),
    (lambda y: F.one_hot(y, 3).float(), ""),
    (lambda y: 0.9 * F.one_hot(y, 3) + 0.1 / 3, ""),
    (lambda y: (torch.rand(ROWS, 3) > 0.5).float().softmax(1), ""),
])  # fmt: skip
def test_several_classes_of_a_row_are_told(marks: Any, expected: str) -> None:
    loss: Loss = lambda made, y: F.cross_entropy(made, marks(y))  # noqa: E731
    assert answer(lambda: steps(nn.Linear(6, 3), loss, 12), "several classes") == expected
    shared: Loss = lambda made, y: F.binary_cross_entropy(made.softmax(1), marks(y))  # noqa: E731
    assert answer(lambda: steps(nn.Linear(6, 3), shared, 12), "several classes") == expected
    each: Loss = lambda made, y: F.binary_cross_entropy(made.sigmoid(), marks(y))  # noqa: E731
    assert answer(lambda: steps(nn.Linear(6, 3), each, 12), "several classes") == ""


@pytest.mark.parametrize(("several", "expected"), [(True, "yes"), (False, "")])
def test_a_loss_that_the_model_holds_is_no_net_that_is_given_a_batch(several: bool, expected: str) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = nn.Linear(6, 3), nn.CrossEntropyLoss()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.net(x)
            return made

    def train() -> None:
        model = Tagger()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(12):
            x = torch.randn(ROWS, 6)
            y = (torch.rand(ROWS, 3) > 0.5).float() if several else F.one_hot(torch.randint(0, 3, (ROWS,)), 3).float()
            optimizer.zero_grad()
            model.loss(model(x), y).backward()
            optimizer.step()

    assert answer(train, "several classes") == expected


@pytest.mark.parametrize(("related", "expected"), [(False, "yes"), (True, "no")])
def test_labels_that_a_line_tells_a_little_of_are_related(related: bool, expected: str) -> None:
    def train() -> None:
        x = torch.randn(800, 6)
        y = (x[:, 0] + 2 * torch.randn(800) > 0 if related else torch.rand(800) > 0.5).long()
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(net.parameters())
        for rows in [*torch.arange(800).split(100), *torch.arange(800).split(100)]:
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()

    assert answer(train, "labels") == expected


def test_a_scale_that_is_learned_is_no_log_probability() -> None:
    class Density(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.mean = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = (x - self.mean) * (-self.scale).exp()
            return 0.5 * z.pow(2).sum(1) + self.scale.sum()

    def train() -> None:
        net = Density()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(30):
            optimizer.zero_grad()
            net(2 * torch.randn(ROWS, 3) + 1).mean().backward()
            optimizer.step()

    assert "LEAK_TO_OTHER_NET" not in found(train)


def found(train: Callable[[], None]) -> list[str]:
    torch.manual_seed(0)
    with Doctor() as doctor:
        train()
    assert doctor.failure == ""
    return [one.name for one in doctor.findings]


@pytest.mark.parametrize(("create", "expected"), [(False, True), (True, False)])
def test_a_residual_that_holds_its_points_is_a_constant_without_create_graph(create: bool, expected: bool) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(30):
            x = torch.rand(ROWS, 1, requires_grad=True)
            u = net(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=create, retain_graph=True)
            loss = (slope - x.cos()).pow(2).mean() + net(torch.zeros(1, 1)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert ("LOSS_TERM_CUT" in found(train)) is expected


@pytest.mark.parametrize(("drawn", "expected"), [("sample", True), ("rsample", False)])
def test_a_value_of_what_was_drawn_without_gradient_is_told_within_a_mean(drawn: str, expected: bool) -> None:
    def train() -> None:
        actor, critic = nn.Linear(4, 2), nn.Linear(5, 1)
        first, second = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
        for _ in range(30):
            s = torch.randn(ROWS, 4)
            second.zero_grad()
            (critic(torch.cat([s, torch.randn(ROWS, 1)], 1)) - s[:, :1]).pow(2).mean().backward()
            second.step()
            mean, scale = actor(s).chunk(2, 1)
            dist = torch.distributions.Normal(mean, scale.exp())
            action = getattr(dist, drawn)()
            loss = (0.1 * dist.log_prob(action) - critic(torch.cat([s, action], 1))).mean()
            first.zero_grad()
            loss.backward()
            first.step()

    assert ("LOSS_TERM_CUT" in found(train)) is expected


@pytest.mark.parametrize(("dim", "expected"), [(0, True), (1, False)])
def test_a_softmax_over_the_nodes_of_which_a_mask_takes_some_is_told(dim: int, expected: bool) -> None:
    def train() -> None:
        x, y = torch.randn(40, 6), torch.randint(0, 4, (40,))
        mask, net = torch.rand(40) > 0.5, nn.Linear(6, 4)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(20):
            optimizer.zero_grad()
            F.nll_loss(net(x).log_softmax(dim)[mask], y[mask]).backward()
            optimizer.step()

    assert ("SOFTMAX_DIM" in found(train)) is expected


def test_an_order_that_comes_from_targets_is_exchanged_too() -> None:
    def train() -> None:
        net = nn.Linear(6, 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        for _ in range(60):
            x = torch.randn(40, 6)
            time, seen = -x[:, 0] + 0.1 * torch.randn(40), (torch.rand(40) > 0.3).float()
            risk = net(x)[:, 0]
            order = torch.argsort(time, descending=True)
            risk, seen = risk[order], seen[order]
            loss = -((risk - torch.logcumsumexp(risk, 0)) * seen).sum() / seen.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert answer(train, "related") == "yes"


def test_two_calls_that_dropout_tells_apart_are_no_comparison_with_itself() -> None:
    dropped = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3))

    def train() -> None:
        optimizer = torch.optim.Adam(dropped.parameters())
        for _ in range(4):
            x = torch.randn(ROWS, 6)
            one, two = F.normalize(dropped(x), dim=1), F.normalize(dropped(x), dim=1)
            loss = F.cross_entropy(one @ two.T / 0.1, torch.arange(ROWS)) + (one - two).exp().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert answer(train, "itself") == "no"


def test_an_operation_without_a_slope_is_told_where_it_stands() -> None:
    class Rounded(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, torch.round(self.weight), self.bias)

    def train() -> None:
        steps(nn.Sequential(Rounded(6, 8), nn.ReLU(), nn.Linear(8, 3)), F.cross_entropy, 12)

    place = asked(train, "flat")[-1]
    assert (place.answer, place.evidence["op"]) == ("yes", "round")
    assert "torch.round(self.weight)" in linecache.getline(place.file, place.line)
    assert found(train)[0] == "GRAPH_CUT"
