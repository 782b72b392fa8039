"""Arguments of loss functions, tables of positions and statistics of averages: each fault beside its healthy twin."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Rate = Callable[[torch.Tensor], torch.Tensor]
Goal = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ROWS = 12


def counts(rate: Rate, *, is_log: bool) -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        F.poisson_nll_loss(rate(net(torch.randn(16, 4))).squeeze(-1), torch.ones(16), log_input=is_log).backward()
        optimizer.step()


@pytest.mark.parametrize("rate", [F.softplus, torch.exp, lambda made: F.relu(made) + 1e-3])
def test_a_rate_where_its_logarithm_is_taken_is_told(rate: Rate) -> None:
    assert answer(lambda: counts(rate, is_log=True), "rates") == "yes"
    assert answer(lambda: counts(rate, is_log=False), "rates") == "no"


def test_the_logarithm_of_a_rate_is_what_a_poisson_loss_takes() -> None:
    assert answer(lambda: counts(lambda made: made, is_log=True), "rates") == "no"
    assert answer(lambda: counts(torch.tanh, is_log=True), "rates") == "no"


def denoises(
    compare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], same: bool, wide: int = 8, numbers: int = 256
) -> None:
    net = nn.Linear(wide, wide)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        x = torch.randn(numbers // wide, wide)
        noise = torch.randn_like(x)
        noisy = 0.8 * x + 0.6 * (noise if same else torch.randn_like(x))
        optimizer.zero_grad()
        compare(net(noisy), noise).backward()
        optimizer.step()


class Diffusion(nn.Module):
    """Draws its noise itself."""

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.net, self.same = nn.Linear(8, 8), same

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        return F.mse_loss(self.net(0.8 * x + 0.6 * (noise if self.same else torch.randn_like(x))), noise)


def diffuses(same: bool) -> None:
    model = Diffusion(same)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).backward()
        optimizer.step()


def test_noise_that_the_model_draws_twice_is_told() -> None:
    assert answer(lambda: diffuses(same=False), "drawn targets") == "yes"
    assert answer(lambda: diffuses(same=True), "drawn targets") == "no"


def squared(made: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return (made - noise).pow(2).mean()


def of_a_table(target: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """One number is predicted from another, of which it is no linear function."""
    net, x = nn.Linear(1, 1), torch.randn(256, 1)
    optimizer, y = torch.optim.Adam(net.parameters()), target(x)
    y = (y - y.mean()) / y.std()
    for _ in range(4):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()


def test_targets_that_are_spread_as_draws_are_and_go_with_the_input_along_a_curve_are_not() -> None:
    assert answer(lambda: of_a_table(lambda x: torch.sin(9 * x) + 0.9 * torch.randn_like(x)), "drawn targets") == "no"


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1)

    def forward(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.net(torch.cat((state, action), -1))
        return made


def judges(target: Goal) -> None:
    """Two inputs, of which one has the shape of the target; the step cuts its rows out of all of them."""
    net, states, actions = Critic(), torch.randn(2048, 4), torch.randn(2048, 1)
    optimizer, y = torch.optim.Adam(net.parameters()), target(states, actions)
    for at in range(0, len(y), 64):
        loss = F.mse_loss(net(states[at : at + 64], actions[at : at + 64]), y[at : at + 64])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_targets_beside_two_inputs_are_told_where_they_are_noise() -> None:
    assert answer(lambda: judges(lambda _, actions: torch.randn_like(actions)), "drawn targets") == "yes"
    assert answer(lambda: judges(lambda _, actions: actions.clone()), "drawn targets") == "no"


def in_order(made: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(made.sort(0).values, noise.sort(0).values)


def of_latents(made: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A latent is drawn, and the length of what it is made into is kept small."""
    return (made + 0.1 * noise).pow(2).mean() + (made - 1).pow(2).mean()


def labels(made: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(made, 1 - 0.1 * torch.rand_like(made))


@pytest.mark.parametrize("compare", [F.mse_loss, F.l1_loss, lambda made, noise: F.smooth_l1_loss(noise, made), squared])
def test_noise_that_is_in_no_input_is_told(compare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    assert answer(lambda: denoises(compare, same=False), "drawn targets") == "yes"
    assert answer(lambda: denoises(compare, same=True), "drawn targets") == "no"


def test_noise_of_two_numbers_in_a_row_is_told() -> None:
    assert answer(lambda: denoises(F.mse_loss, same=False, wide=2), "drawn targets") == "yes"
    assert answer(lambda: denoises(F.mse_loss, same=True, wide=2), "drawn targets") == "no"


def test_noise_of_which_one_step_has_few_numbers_is_told() -> None:
    assert answer(lambda: denoises(F.mse_loss, same=False, wide=2, numbers=64), "drawn targets") == "yes"
    assert answer(lambda: denoises(F.mse_loss, same=True, wide=2, numbers=64), "drawn targets") == "no"


@pytest.mark.parametrize("compare", [in_order, of_latents, labels])
def test_other_random_numbers_beside_a_loss_are_not(
    compare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    assert answer(lambda: denoises(compare, same=False), "drawn targets") == "no"


def weighed(weight: list[float], share: float) -> None:
    net, weights = nn.Linear(4, 2), torch.tensor(weight)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        y = (torch.arange(64) < share * 64).long()
        optimizer.zero_grad()
        F.cross_entropy(net(torch.randn(64, 4)), y, weight=weights).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("weight", "share", "expected"),
    [
        ([8.0, 1.1], 0.12, "yes"),
        ([1.1, 8.0], 0.12, "no"),
        ([1.1, 8.0], 0.88, "yes"),
        ([8.0, 1.1], 0.5, "no"),  # which class is rare can't be told
        ([1.3, 1.0], 0.12, "no"),
    ],
)
def test_weights_that_grow_with_the_number_of_targets_are_told(
    weight: list[float], share: float, expected: str
) -> None:
    assert answer(lambda: weighed(weight, share), "class weights") == expected


def marked(weight: float, share: float) -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        y = (torch.arange(64) < share * 64).float()
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits
        loss(net(torch.randn(64, 4))[:, 0], y, pos_weight=torch.tensor(weight)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("weight", "share", "expected"),
    [
        (0.14, 0.12, "yes"),
        (0.0, 0.12, "yes"),
        (7.0, 0.12, "no"),
        (7.0, 0.88, "yes"),
        (0.14, 0.88, "no"),
        (4.0, 0.5, "no"),
    ],
)
def test_positive_targets_that_are_rare_and_weigh_less_are_told(weight: float, share: float, expected: str) -> None:
    assert answer(lambda: marked(weight, share), "positive weights") == expected


@pytest.mark.parametrize(
    ("weight", "share", "expected"), [(500.0, 0.5, "yes"), (4.0, 0.5, "no"), (7.0, 0.12, "no"), (9.0, 0.97, "no")]
)
def test_a_class_that_is_nearly_all_of_a_loss_by_its_weight_is_told(weight: float, share: float, expected: str) -> None:
    assert answer(lambda: marked(weight, share), "drowning weights") == expected
    assert answer(lambda: weighed([1.0, weight], 1 - share), "drowning weights") == expected


def test_a_picture_that_is_full_of_what_is_rare_says_nothing_of_a_weight() -> None:
    net = nn.Conv2d(1, 1, 3, padding=1)
    optimizer = torch.optim.Adam(net.parameters())

    def train() -> None:
        for _ in range(4):
            full = (torch.arange(64) < 56).float().view(1, 1, 8, 8).repeat(4, 1, 1, 1)
            optimizer.zero_grad()
            scores = net(torch.randn(4, 1, 8, 8))
            F.binary_cross_entropy_with_logits(scores, full, pos_weight=torch.tensor(9.0)).backward()
            optimizer.step()

    assert answer(train, "positive weights") == "no"


class Placed(nn.Module):
    """Tokens with a table of places, cut along the batch or along the tokens."""

    table: torch.Tensor

    def __init__(self, *, along_batch: bool, rows: int | None = None) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
        self.along_batch = along_batch
        self.register_buffer("table", torch.randn(rows or 64, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.tokens(x)
        places = self.table[: len(x)] if self.along_batch else self.table[: x.shape[1]].transpose(0, 1)
        made: torch.Tensor = self.head((tokens + places).tanh().mean(1))
        return made


class PlacedOverTime(Placed):
    """The same for tokens whose places come first, which a layer goes through."""

    def __init__(self) -> None:
        super().__init__(along_batch=True)
        self.rnn, self.head = nn.GRU(8, 8), nn.Linear(8, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.rnn(self.tokens(x) + self.table[: len(x)])[0])
        return made


def over_time() -> None:
    net = PlacedOverTime()
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        tokens = torch.randint(0, 9, (13, 5))
        optimizer.zero_grad()
        F.cross_entropy(net(tokens[:-1]).view(-1, 9), tokens[1:].reshape(-1)).backward()
        optimizer.step()


def places(net: nn.Module) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(net(torch.randint(0, 9, (12, 5))), torch.randint(0, 3, (12,))).backward()
        optimizer.step()


def test_a_table_that_is_cut_along_the_batch_is_told() -> None:
    assert answer(lambda: places(Placed(along_batch=True)), "rows") == "yes"
    assert answer(lambda: places(Placed(along_batch=False)), "rows") == "no"
    assert answer(over_time, "rows") != "yes"


def test_a_table_with_an_entry_for_each_row_may_be_meant() -> None:
    assert answer(lambda: places(Placed(along_batch=True, rows=12)), "rows") != "yes"


class Averaged:
    """A net and its average, which is evaluated once, at the end; both live as long as this does."""

    def __init__(self, *, with_buffers: bool) -> None:
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.average = copy.deepcopy(self.net)
        self.with_buffers = with_buffers

    def __call__(self) -> None:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for _ in range(50):  # at a step that is measured, the evaluation is seen
            x = torch.randn(16, 4) + 2
            optimizer.zero_grad()
            F.cross_entropy(self.net(x), (x[:, 0] > 2).long()).backward()
            optimizer.step()
            with torch.no_grad():
                for mine, its in zip(self.average.parameters(), self.net.parameters(), strict=True):
                    mine.lerp_(its, 0.1)
        if self.with_buffers:
            for old, new in zip(self.average.buffers(), self.net.buffers(), strict=True):
                old.copy_(new)
        self.average.eval()
        with torch.no_grad():
            self.average(torch.randn(16, 4) + 2)


def test_an_average_that_is_evaluated_with_the_statistics_of_a_new_net_is_told() -> None:
    assert answer(Averaged(with_buffers=False), "copied buffers") == "yes"
    assert answer(Averaged(with_buffers=True), "copied buffers") == ""


def values(goal: Goal, *, by_hand: bool = False) -> None:
    net = nn.Linear(6, 3)
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        before, after, reward = torch.randn(ROWS, 6), torch.randn(ROWS, 6), torch.randn(ROWS)
        given = net(before).gather(1, torch.randint(3, (ROWS, 1))).squeeze(1)
        with torch.no_grad():
            wanted = goal(target(after), reward)
        optimizer.zero_grad()
        ((given - wanted).pow(2).mean() if by_hand else F.smooth_l1_loss(given, wanted)).backward()
        optimizer.step()


@pytest.mark.parametrize(("goal", "expected"), [
    (lambda q, r: r + 0.9 * q.argmax(1), "yes"),
    (lambda q, r: r + 0.9 * q.max(1)[1].float() * (r < 1), "yes"),
    (lambda q, r: torch.add(r, q.topk(1).indices.squeeze(1), alpha=0.9), "yes"),
    (lambda q, r: r + 0.9 * q.sort(1)[1][:, -1].double(), "yes"),
    (lambda q, r: r + 0.9 * q.max(1)[0], "no"),
    (lambda q, r: r + 0.9 * q.gather(1, q.argmax(1, keepdim=True)).squeeze(1), "no"),
    (lambda q, r: r + 0.9 * q[torch.arange(len(q)), q.argmax(1)], "no"),
    (lambda q, r: q.argmax(1).float() / 2, "no"),
    (lambda q, r: F.one_hot(q.argmax(1), 3)[:, 0] + r, "no"),
    (lambda q, r: r + (q.argmax(1) == 0).float(), "no"),
    (lambda q, r: r + torch.linspace(-1, 1, 3)[q.argmax(1)], "no"),
    (lambda q, r: r + 0.9 * torch.take_along_dim(q, q.argmax(1)[:, None], 1).squeeze(1), "no"),
    (lambda q, r: r + 0.9 * q.flatten()[3 * torch.arange(len(q)) + q.argmax(1)], "no"),
    (lambda q, r: (q.argmax(1) + 0.5) / 3, "no"),
], ids=["argmax", "max[1]", "topk", "sort", "max", "gathered", "picked", "alone", "one hot", "compared", "a support",
        "along a dim", "flat places", "middle of a bin"])  # fmt: skip
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_target_that_adds_places_to_numbers_is_told(goal: Goal, expected: str, by_hand: bool) -> None:
    assert answer(lambda: values(goal, by_hand=by_hand), "indices") == expected


class Timed(nn.Module):
    """Predicts noise at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.time = nn.Linear(8, 8), nn.Embedding(100, 8)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Gives the noise."""
        return self.net(x + self.time(t))  # type: ignore[no-any-return]


def scheduled(data: Callable[[torch.Tensor], torch.Tensor], times: str = "each") -> None:
    net, betas = Timed(), torch.linspace(1e-4, 0.08, 100)
    optimizer = torch.optim.Adam(net.parameters())
    kept = data(betas)
    for _ in range(4):
        x = torch.randn(32, 8)
        t = torch.full((32,), 99) if times == "late" else torch.randint(100, (32,))
        noise = torch.randn_like(x)
        noisy = kept[t].sqrt()[:, None] * x + (1 - kept[t]).sqrt()[:, None] * noise
        optimizer.zero_grad()
        F.mse_loss(net(noisy, t), noise).backward()
        optimizer.step()


@pytest.mark.parametrize(("data", "times", "expected"), [
    (lambda betas: betas.cumprod(0), "each", "yes"),
    (lambda betas: (1 - betas).cumprod(0), "each", "no"),
    (lambda betas: betas.cumprod(0), "late", "no"),
    (lambda betas: 1 - betas, "each", "no"),
], ids=["betas", "alphas", "one time", "no product"])  # fmt: skip
def test_data_that_are_nothing_beside_the_noise_are_told(data: Rate, times: str, expected: str) -> None:
    assert answer(lambda: scheduled(data, times), "drowned") == expected


Terms = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def multitask(total: Terms, start: float = 0.0) -> None:
    net, s = nn.Linear(6, 4), nn.Parameter(torch.full((2,), start))
    optimizer = torch.optim.SGD([*net.parameters(), s], lr=0.01)
    for _ in range(4):
        x = torch.randn(ROWS, 6)
        made = net(x)
        optimizer.zero_grad()
        first, second = F.mse_loss(made[:, 0], x.sum(1)), F.cross_entropy(made[:, 1:], x[:, :3].argmax(1))
        total(s, first, second).backward()
        optimizer.step()


@pytest.mark.parametrize(("total", "start", "expected"), [
    (lambda s, a, b: (-s[0]).exp() * a + (-s[1]).exp() * b, 0.0, "yes"),
    (lambda s, a, b: a / (2 * s[0] ** 2) + b / s[1] ** 2, 1.0, "yes"),
    (lambda s, a, b: ((-s).exp() * torch.stack([a, b])).sum(), 0.0, "yes"),
    (lambda s, a, b: (-s[0]).exp() * a + s[0] + (-s[1]).exp() * b + s[1], 0.0, "no"),
    (lambda s, a, b: a / (2 * s[0] ** 2) + b / s[1] ** 2 + (1 + s**2).log().sum(), 1.0, "no"),
    (lambda s, a, b: s.softmax(0)[0] * a + s.softmax(0)[1] * b, 0.0, "no"),
    (lambda s, a, b: s[0] * a + s[1] * b, 1.0, "no"),
    (lambda s, a, b: (-s[0]).exp().detach() * a + b, 0.0, "no"),
    (lambda s, a, b: a + b, 0.0, "no"),
    (lambda s, a, b: s[0].sigmoid() * a + s[1].sigmoid() * b, 0.0, "yes"),
    (lambda s, a, b: F.softplus(s[0]) * (a + b), 0.0, "yes"),
    (lambda s, a, b: s[0].sigmoid() * a + (1 - s[0].sigmoid()) * b, 0.0, "no"),
    (lambda s, a, b: ((-s).exp() * torch.stack([a, b]) + s).mean(), 0.0, "no"),
    (lambda s, a, b: (-s[0]).exp() * a + (-s[1]).exp() * b + s.pow(2).sum(), 0.0, "no"),
    (lambda s, a, b: a / s[0].exp() + b / s[1].exp() + torch.distributions.Normal(0.0, 1.0).log_prob(s).sum().neg(),
     0.0, "no"),
    (lambda s, a, b: (s / s.norm())[0] ** 2 * a + (s / s.norm())[1] ** 2 * b, 1.0, "no"),
], ids=["exp", "variance", "stacked", "held", "held by hand", "softmax", "linear", "detached", "none", "sigmoid",
        "softplus", "a share", "held in a mean", "decayed", "a prior", "on a sphere"])  # fmt: skip
def test_a_weight_that_may_make_the_loss_nothing_is_told(total: Terms, start: float, expected: str) -> None:
    assert answer(lambda: multitask(total, start), "weighed away") == expected


def test_a_denoiser_of_little_noise_has_to_predict_its_data() -> None:
    def train() -> None:
        net = Timed()
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x, level = torch.randn(32, 8), torch.randint(100, (32,))
            optimizer.zero_grad()
            F.mse_loss(net(x + level[:, None] * torch.randn_like(x), level), x).backward()
            optimizer.step()

    assert answer(train, "drowned") == "no"


def of_nodes(pick: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Some nodes of one graph are trained."""
    net, x, y = nn.Linear(4, 3), torch.randn(60, 4), torch.randint(0, 3, (60,))
    optimizer, mask = torch.optim.Adam(net.parameters()), torch.rand(60) < 0.4
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(*pick(net(x), y, mask)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        (lambda made, y, mask: (made[mask], y[: int(mask.sum())]), "yes"),
        (lambda made, y, mask: (made[: int(mask.sum())], y[mask]), "yes"),
        (lambda made, y, mask: (made.log_softmax(1)[mask.nonzero()[:, 0]], y[mask].flip(0)), "no"),  # not followed
        (lambda made, y, mask: (made[mask.nonzero()[:, 0]], y[mask]), "no"),
        (lambda made, y, mask: (made[mask, :], y[mask]), "no"),
        (lambda made, y, mask: (made[:-1], y[1:]), "no"),  # the next one in time
        (lambda made, y, mask: (made[mask.nonzero()[:, 0]], y[mask.nonzero()[:, 0] - 1]), "no"),  # of neighbours
        (lambda made, y, mask: (made, y[torch.randperm(60)]), "no"),
    ],
)
def test_targets_of_other_rows_than_those_that_were_picked_are_told(pick: Any, expected: str) -> None:
    assert answer(lambda: of_nodes(pick), "picked apart") == expected


TABLE = nn.Parameter(torch.randn(16, 3))


def of_marks(pick: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Only marked rows are to count."""
    net, x, marks = nn.Linear(4, 3), torch.randn(16, 4), torch.arange(16) % 3 // 2
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        pick(net(x), marks).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        (lambda made, marks: made[marks], "yes"),
        (lambda made, marks: made.index_select(0, marks), "yes"),
        (lambda made, marks: made[marks.bool()], "no"),
        (lambda made, marks: made[marks.nonzero()[:, 0]], "no"),
        (lambda made, marks: made[:2][marks], "no"),  # a table of two
        (lambda made, marks: made.t().index_select(1, marks), "no"),
        (lambda made, marks: made + TABLE[marks], "no"),
        (lambda made, marks: made[torch.arange(16), marks], "no"),  # a class of each row
        (lambda made, marks: made[marks + 1], "no"),
        (lambda made, marks: made[torch.zeros(16, dtype=torch.long)], "no"),
    ],
)
def test_rows_that_are_picked_by_zeros_and_ones_are_told(pick: Any, expected: str) -> None:
    assert answer(lambda: of_marks(pick), "rows of marks") == expected
