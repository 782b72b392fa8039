"""Questions after public reports: yes for what was reported, and no for its repaired twin."""

import ast
import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask.source import unread
from test_doctor_ask import ROWS, answer, nothing_was_compiled, steps

__all__ = ["nothing_was_compiled"]


class Quantised(nn.Module):
    """An autoencoder with a table in the middle."""

    def __init__(self, way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.encoder, self.decoder, self.table = nn.Linear(6, 4), nn.Linear(4, 6), nn.Embedding(8, 4)
        self.way = way

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encoder(x)
        q = self.table(torch.cdist(z, self.table.weight).argmin(1))
        return self.decoder(self.way(z, q)), F.mse_loss(q, z.detach()) + F.mse_loss(z, q.detach())


@pytest.mark.parametrize(
    ("way", "expected"),
    [(lambda z, q: q, "yes"), (lambda z, q: z + (q - z).detach(), "no"), (lambda z, q: q + 0.1 * z, "no")],
)
def test_a_quantiser_without_its_way_back_is_told(way: Callable[..., torch.Tensor], expected: str) -> None:
    def train() -> None:
        net = Quantised(way)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(ROWS, 6)
            made, more = net(x)
            optimizer.zero_grad()
            (F.mse_loss(made, x) + more).backward()
            optimizer.step()

    assert answer(train, "quantised") == expected


class Nearest(torch.autograd.Function):
    """The nearest row of a table, with the gradient passed on as it is."""

    @staticmethod
    def forward(ctx: object, z: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table[torch.cdist(z, table).argmin(1)]

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class OfFunction(Quantised):
    """Has its way back in a function, which may be given what has no graph."""

    def __init__(self, cuts: bool) -> None:
        super().__init__(lambda z, q: q)
        self.cuts = cuts

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encoder(x)
        given = z.detach() if self.cuts else z
        q: torch.Tensor = Nearest.apply(given, self.table.weight)  # type: ignore[no-untyped-call]
        return self.decoder(q), F.mse_loss(self.table(torch.zeros(ROWS).long()), z)


@pytest.mark.parametrize(("cuts", "expected"), [(False, "no"), (True, "yes")])
def test_a_quantiser_with_a_backward_of_its_own_is_told_where_it_gets_no_graph(cuts: bool, expected: str) -> None:
    def train() -> None:
        net = OfFunction(cuts)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(ROWS, 6)
            made, more = net(x)
            optimizer.zero_grad()
            (F.mse_loss(made, x) + more).backward()
            optimizer.step()

    assert answer(train, "quantised") == expected


class Heads(nn.Module):
    """Two heads, of which both names may mean one."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.body, self.mean, self.spread, self.second = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3), second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x).relu()
        made: torch.Tensor = self.mean(h) + torch.randn(3) * getattr(self, self.second)(h).exp()
        return made


@pytest.mark.parametrize(("second", "expected"), [("mean", "yes"), ("spread", "no")])
def test_a_head_that_is_taken_twice_is_told(second: str, expected: str) -> None:
    def train() -> None:
        net = Heads(second)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(ROWS, 6)), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "twice") == expected


@pytest.mark.parametrize(("rate", "expected"), [(0.3, "no"), (0.0, "yes")])
@pytest.mark.parametrize("apart", [F.mse_loss, lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="sum")])
def test_two_draws_of_one_batch_are_not_itself(apart: Callable[..., torch.Tensor], rate: float, expected: str) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(rate) if rate else nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(ROWS, 6)
            one, other = net(x), net(x)
            optimizer.zero_grad()
            (F.cross_entropy(one, x[:, :3].argmax(1)) + apart(one, other)).backward()
            optimizer.step()

    assert answer(train, "itself") == expected


class Evaluated:
    """An average that is made with a share of the net, and only evaluated."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self) -> None:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        slow, weights = copy.deepcopy(net), torch.randn(6, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(1, 101):
            x = torch.randn(ROWS, 6)
            optimizer.zero_grad()
            F.mse_loss(net(x), x @ weights).backward()
            optimizer.step()
            with torch.no_grad():
                for one, other in zip(slow.parameters(), net.parameters(), strict=True):
                    one.lerp_(other, self.share)
                if step % 50 == 0:
                    slow(x)


@pytest.mark.parametrize(("share", "expected"), [(0.995, "yes"), (0.1, ""), (0.01, "")])
def test_an_average_that_is_only_evaluated_and_follows_at_once_is_told(share: float, expected: str) -> None:
    assert answer(Evaluated(share), "close copy") == expected


class Steep(Evaluated):
    """The same with a net that learns nearly all there is, and a copy that is called every so many steps."""

    def __init__(self, share: float, every: int = 50, learned: bool = True) -> None:
        super().__init__(share)
        self.every, self.learned = every, learned

    def __call__(self) -> None:
        net = nn.Linear(6, 1)
        slow, weights = copy.deepcopy(net), torch.randn(6, 1)
        self.nets = net, slow  # they are asked after it
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(1, 101):
            x = torch.randn(ROWS, 6)
            optimizer.zero_grad()
            F.mse_loss(net(x), x @ weights if self.learned else 3 * torch.randn(ROWS, 1)).backward()
            optimizer.step()
            with torch.no_grad():
                for one, other in zip(slow.parameters(), net.parameters(), strict=True):
                    one.lerp_(other, self.share)
                if step % self.every == 0:
                    slow(x)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (Steep(0.0001), "yes"),
        (Steep(0.001), "yes"),
        (Steep(0.05), ""),
        (Steep(0.5), ""),
        (Steep(0.001, every=1), ""),  # a net that makes targets
        (Steep(0.001, learned=False), ""),  # it is no worse than the net
    ],
)
def test_an_average_that_is_evaluated_and_still_is_the_beginning_is_told(train: Steep, expected: str) -> None:
    assert answer(train, "slow copy") == expected


def test_an_average_is_asked_by_a_batch_where_no_step_was_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybatch.doctor.ask.keeping.has_compiled", lambda: True)
    assert answer(Steep(0.0001), "slow copy") == "yes"


@pytest.mark.parametrize(("again", "expected"), [(True, "yes"), (False, "")])
def test_an_evaluation_that_draws_several_times_for_one_batch_is_told(again: bool, expected: str) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        same = torch.randn(ROWS, 6)
        with torch.no_grad():
            for _ in range(5):
                net(same if again else torch.randn(ROWS, 6))

    assert answer(train, "drawn again") == expected


def aim(reward: torch.Tensor, value: torch.Tensor, gamma: float = 0.9) -> torch.Tensor:
    """Far from the line of the loss, as in a function of its own."""
    return reward + gamma * value.detach()


def test_draws_behind_the_last_step_that_is_sampled_are_told() -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(15):
            optimizer.zero_grad()
            net(torch.randn(ROWS, 6)).pow(2).mean().backward()
            optimizer.step()
        same = torch.randn(ROWS, 6)
        with torch.no_grad():
            for _ in range(5):
                net(same)

    assert answer(train, "drawn again") == "yes"


def test_one_call_for_the_same_rows_behind_each_step_draws_nothing_again() -> None:
    """As where all of a validation set is one batch."""

    def train() -> None:
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(net.parameters())
        same = torch.randn(ROWS, 6)
        for _ in range(6):
            optimizer.zero_grad()
            net(torch.randn(ROWS, 6)).pow(2).mean().backward()
            optimizer.step()
            with torch.no_grad():
                net(same)

    assert answer(train, "drawn again") == ""


@pytest.mark.parametrize(("related", "expected"), [(True, "no"), (False, "yes")])
@pytest.mark.parametrize("ends", [[], [nn.Sigmoid()]])
def test_labels_of_yes_and_no_are_asked_of_too(ends: list[nn.Module], related: bool, expected: str) -> None:
    loss = F.binary_cross_entropy if ends else F.binary_cross_entropy_with_logits

    def train() -> None:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), *ends)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(12):
            x = torch.randn(96, 6)
            y = (x[:, :1] > 0).float()
            optimizer.zero_grad()
            loss(net(x), y if related else y.roll(1, 0)).backward()
            optimizer.step()

    assert answer(train, "labels") == expected


@pytest.mark.parametrize(("squashes", "expected"), [(True, "yes"), (False, "no")])
def test_scores_that_are_probabilities_in_evaluation_only_are_told(squashes: bool, expected: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.layer(x)
            return scores.softmax(1) if squashes and not self.training else scores

    def train() -> None:
        net = Net()
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x, y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            net.eval()
            with torch.no_grad():
                F.cross_entropy(net(x), y)
            net.train()

    assert answer(train, "evaluated scores") == expected


@pytest.mark.parametrize(("sign", "expected"), [(1.0, "yes"), (-1.0, "no")])
def test_an_actor_that_looks_for_small_values_is_told(sign: float, expected: str) -> None:
    def train() -> None:
        actor, critic = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), nn.Linear(5, 1)
        of_actor, of_critic = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
        for _ in range(6):
            s, a, r, after = torch.randn(ROWS, 3), torch.rand(ROWS, 2), torch.randn(ROWS, 1), torch.randn(ROWS, 3)
            target = aim(r, critic(torch.cat([after, actor(after)], 1)))
            of_critic.zero_grad()
            F.mse_loss(critic(torch.cat([s, a], 1)), target).backward()
            of_critic.step()
            of_actor.zero_grad()
            (sign * critic(torch.cat([s, actor(s)], 1)).mean()).backward()
            of_actor.step()

    assert answer(train, "small value") == expected


class TwoHeads(nn.Module):
    """A critic with two heads, the second of which is the larger at first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 1), nn.Linear(5, 1)
        with torch.no_grad():
            self.one.bias.fill_(-0.5)
            self.two.bias.fill_(3.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.two(x)


@pytest.mark.parametrize(("sign", "expected"), [(1.0, "yes"), (-1.0, "no")])
def test_an_actor_of_the_smaller_of_two_heads_is_told(sign: float, expected: str) -> None:
    def train() -> None:
        actor, critic = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), TwoHeads()
        of_actor, of_critic = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters(), lr=0.3)
        for _ in range(16):
            s, a, r = torch.randn(ROWS, 3), torch.rand(ROWS, 2), torch.randn(ROWS, 1)
            one, two = critic(torch.cat([s, a], 1))
            target = aim(r, torch.zeros_like(r))
            of_critic.zero_grad()
            (F.mse_loss(one, target) + F.mse_loss(two, target)).backward()
            of_critic.step()
            of_actor.zero_grad()
            (sign * torch.min(*critic(torch.cat([s, actor(s)], 1))).mean()).backward()
            of_actor.step()

    assert answer(train, "small value") == expected


def test_an_action_that_a_best_value_does_without_is_unread() -> None:
    text = "def learn(batch):\n  s, a, r, t = batch\n  y = r + GAMMA * q(t).max(1)[0]\n  loss({}, y).backward()"
    assert list(unread(ast.parse(text.format("q(s).max(1)[0]")), {4})) == [("a", 2)]
    assert not list(unread(ast.parse(text.format("q(s).gather(1, a)")), {4}))
    assert not list(unread(ast.parse(text.replace("q(t).max(1)[0]", "v(t)").format("v(s)")), {4}))  # of states alone


@pytest.mark.parametrize(("kind", "expected"), [("column", "yes"), ("row", "no"), ("pairs", "no")])
def test_the_line_where_a_column_meets_a_row_is_told(kind: str, expected: str) -> None:
    def train() -> None:
        net = nn.Linear(6, 1)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            made = net(torch.randn(ROWS, 6))
            other = made.squeeze(1)
            apart = (other if kind == "row" else made) - (other if kind == "pairs" else torch.randn(ROWS))
            optimizer.zero_grad()
            apart.square().mean().backward()
            optimizer.step()

    assert answer(train, "outer") == expected


@pytest.mark.parametrize(("draw", "expected"), [("sample", "yes"), ("rsample", "no")])
def test_a_draw_that_cuts_the_graph_is_told_with_its_line(draw: str, expected: str) -> None:
    def train() -> None:
        actor, critic = nn.Linear(6, 2), nn.Linear(2, 1)
        optimizer = torch.optim.Adam(actor.parameters())
        for _ in range(6):
            act = getattr(torch.distributions.Normal(actor(torch.randn(ROWS, 6)), 1.0), draw)()
            optimizer.zero_grad()
            (-critic(act.tanh()).mean() + 0.1 * actor.weight.square().sum()).backward()
            optimizer.step()

    assert answer(train, "cut off") == expected


def test_a_target_that_is_detached_at_the_loss_cuts_nothing_else() -> None:
    def train() -> None:
        net = nn.Linear(6, 3)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            made = net(torch.randn(ROWS, 6))
            optimizer.zero_grad()
            F.mse_loss(made, torch.randn(ROWS, 3)).backward()
            optimizer.step()

    assert answer(train, "cut off") == "no"


def of_one_row(places: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As many places as rows, and those of the last row where the last one of each was meant."""
    return F.cross_entropy(places.unflatten(1, (ROWS, 3))[-1], y)


def of_each_row(places: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(places.unflatten(1, (ROWS, 3))[:, -1], y)


@pytest.mark.parametrize(("loss", "expected"), [(of_one_row, "yes"), (of_each_row, "no")])
def test_one_row_that_is_taken_for_all_is_found(loss: Callable[..., torch.Tensor], expected: str) -> None:
    assert answer(lambda: steps(nn.Linear(6, 3 * ROWS), loss), "rows") == expected
