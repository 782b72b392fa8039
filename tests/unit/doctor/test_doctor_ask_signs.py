"""Which way a loss goes, and what is compared with what: yes where it is so, no where it only looks alike."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.diagnosing import ranked
from anybatch.doctor.recorder import Doctor
from anybatch.records.findings import Finding
from test_doctor_ask import ROWS, answer, asked, nothing_was_compiled, steps, taught

__all__ = ["nothing_was_compiled"]

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def picked(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(made, 1).gather(1, y[:, None])


def sharp(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    likely = made.softmax(1)[torch.arange(ROWS), y]
    return (1 - likely).pow(2) * likely.log()


def directions(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cosine_similarity(made, torch.eye(3)[y])


def unit(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (F.normalize(made, dim=1) * torch.eye(3)[y]).sum(1)


def scores(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return made.gather(1, y[:, None])  # values of actions, and no probabilities


@pytest.mark.parametrize("likeness", [picked, sharp, directions, unit])
def test_a_loss_that_makes_what_it_should_make_large_small_is_told(likeness: Loss) -> None:
    assert answer(lambda: steps(nn.Linear(6, 3), lambda made, y: likeness(made, y).mean()), "punished") == "yes"
    assert answer(lambda: steps(nn.Linear(6, 3), lambda made, y: -likeness(made, y).mean()), "punished") == "no"


@pytest.mark.parametrize(
    "loss",
    [
        lambda made, y: scores(made, y).pow(2).mean(),
        F.cross_entropy,
        lambda made, y: (picked(made, y)[:, 0] * (y - 1.0)).mean(),  # each row has another sign
        lambda made, y: -torch.log(1 - made.softmax(1).gather(1, y[:, None]) + 1e-6).mean(),  # a class that it is not
        lambda made, y: -torch.log1p(-picked(made, y).exp()).mean(),
        lambda made, y: F.cross_entropy(made, y) + 0.1 * directions(made, (y + 1) % 3).mean(),  # away from another
    ],
)
def test_values_that_are_picked_or_weighed_are_not_punished(loss: Loss) -> None:
    assert answer(lambda: steps(nn.Linear(6, 3), loss), "punished") != "yes"


def likely(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    density: torch.Tensor = torch.distributions.Normal(made, 1.0).log_prob(y)
    return -density


def pairs(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of like and unlike pairs, the latter apart by a margin."""
    like, distances = (y[:, 0] > 0).float(), (made - y).pow(2).sum(1).sqrt()
    return like * distances.pow(2) + (1 - like) * (1 - distances).relu().pow(2)


def unlike(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one, two = made - made.mean(0), y - y.mean(0)
    return -(one * two).sum(0) / (one.pow(2).sum(0) * two.pow(2).sum(0)).sqrt()


RETURNS = -torch.linspace(1, 2, ROWS)
"""Of actions that were taken."""
MARKS = (torch.arange(3 * ROWS).view(ROWS, 3) % 7 < 1).float()
"""Of what is no padding."""


def numbers(of: Loss) -> Loss:
    """A loss with numbers as targets, which are taken from those of all samples where they are needed."""
    generator = torch.Generator().manual_seed(0)
    every = torch.randn(8 * ROWS, 3, generator=generator)
    return lambda made, y: of(made, every[ROWS : 2 * ROWS])


@pytest.mark.parametrize("error", [likely, unlike, F.mse_loss, F.smooth_l1_loss, lambda made, y: (made - y).abs()])
@pytest.mark.parametrize(("sign", "expected"), [(-1, "yes"), (1, "no")])
def test_an_error_that_is_made_large_is_told(error: Loss, sign: int, expected: str) -> None:
    loss = numbers(lambda made, y: sign * error(made, y).mean())
    assert answer(lambda: steps(nn.Linear(6, 3), loss), "error preferred") == expected


@pytest.mark.parametrize(
    "loss",
    [
        lambda made, y: pairs(made, y).mean(),
        lambda made, y: -(likely(made, y) * (y - 2)).mean(),  # rewards
        lambda made, y: likely(made, y).sum(1) @ RETURNS / ROWS,
        lambda made, y: likely(made, y).sum(1).dot(RETURNS) / ROWS,
        lambda made, y: (made - y).pow(2).mean() - 0.1 * (made - y.roll(1, 0)).pow(2).mean(),  # of other rows
        lambda made, y: (F.mse_loss(made, y, reduction="none") * MARKS).sum() / MARKS.sum(),
        lambda made, y: (F.mse_loss(made, torch.ones(ROWS, 3), reduction="none") * MARKS).sum() / MARKS.sum(),
        lambda made, y: ((made - 1).pow(2) * MARKS).sum() / MARKS.sum(),
        lambda made, y: (made + y).pow(2).mean(),  # the reverse is what is aimed at, as of noise in a score
    ],
)
def test_what_should_be_apart_is_not_told(loss: Loss) -> None:
    assert answer(lambda: steps(nn.Linear(6, 3), numbers(loss)), "error preferred") != "yes"


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda made, y: (made - (y + 9)).mean(), "yes"),
        (lambda made, y: (y + 9 - made).sum() + made.square().mean(), "no"),  # it is above 0
        (lambda made, y: made.square().mean() + (made - (y + 9)).mean(), "no"),  # which is held
        (lambda made, y: (made.softmax(1) - (y + 9)).mean(), "no"),
        (lambda made, y: (F.mse_loss(made, y, reduction="none") - 99).mean(), "no"),
        (lambda made, y: ((made - y).square() - (y + 99)).mean(), "no"),  # an error beside that of another model
        (lambda made, y: (made - y).abs().mean(), "no"),
        (lambda made, y: made.mean() - (y + 9).mean(), "no"),  # as of a critic
        (lambda made, y: (made.log_softmax(1) - y.log_softmax(1)).mean(), "no"),  # a likelihood
        (lambda made, y: (made - made.roll(1, 0) * 2 - 9).mean(), "no"),
    ],
)
def test_a_mean_of_differences_without_a_bound_is_told(loss: Loss, expected: str) -> None:
    assert answer(lambda: steps(nn.Linear(6, 3), numbers(loss)), "bottomless") == expected


class OfPairs(nn.Module):
    """A contrastive loss, with marks of pairs that belong together or, turned, of those that do not."""

    def __init__(self, *, near: bool, marks_near: bool, pulls_marked: bool) -> None:
        super().__init__()
        self.net, self.near, self.marks_near, self.pulls_marked = nn.Linear(6, 3), near, marks_near, pulls_marked

    def forward(self, x: torch.Tensor, other: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        d = F.pairwise_distance(self.net(x), self.net(other))
        pull, push = (marks, 1 - marks) if self.pulls_marked else (1 - marks, marks)
        return (pull * d**2 + push * (2 - d).clamp(min=0) ** 2).mean()

    def train_on(self) -> None:
        optimizer = torch.optim.Adam(self.parameters())
        for _ in range(20):
            x, same = torch.randn(32, 6), torch.arange(32) % 3 == 0
            noise = torch.randn(32, 6)
            other = torch.where(same[:, None], x + 0.3 * noise, noise) if self.near else noise
            optimizer.zero_grad()
            self(x, other, (same if self.marks_near else ~same).float()).backward()
            optimizer.step()


@pytest.mark.parametrize("marks_near", [True, False])
@pytest.mark.parametrize("pulls_marked", [True, False])
def test_pairs_that_are_near_and_drawn_apart_are_told(marks_near: bool, pulls_marked: bool) -> None:
    net = OfPairs(near=True, marks_near=marks_near, pulls_marked=pulls_marked)
    assert answer(net.train_on, "far pairs") == ("no" if marks_near == pulls_marked else "yes")
    assert answer(net.train_on, "error preferred") == "unknown"  # marks of pairs are no distances


def test_pairs_whose_inputs_do_not_show_what_belongs_together_are_not_told() -> None:
    net = OfPairs(near=False, marks_near=True, pulls_marked=False)
    assert answer(net.train_on, "far pairs") != "yes"


def test_the_first_rows_of_a_table_are_no_targets_of_the_rows() -> None:
    table = torch.randn(8 * ROWS, 3)
    loss = lambda made, y: (made + table[:ROWS] - torch.eye(3)[y]).pow(2).mean()  # noqa: E731
    with Doctor() as doctor:
        steps(nn.Linear(6, 3), loss)
    assert doctor.kept is not None
    sizes = [len(leaf) for tape in doctor.kept.tapes.values() for leaf in tape.leaves.values() if leaf.dim() > 1]
    assert 8 * ROWS in sizes


@pytest.mark.parametrize(("low", "expected"), [(0, "yes"), (-1, "no")])
def test_pairs_that_are_marked_with_other_numbers_than_1_and_minus_1_are_told(low: int, expected: str) -> None:
    def loss(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        marks = torch.where(y == 0, 1, low)
        return F.cosine_embedding_loss(made, torch.eye(3)[y], marks)

    assert answer(lambda: steps(nn.Linear(6, 3), loss), "signs") == expected


def views(same: bool, *, dropped: bool = False) -> Iterator[str]:
    """Both views of a batch go through the net in calls of their own."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5) if dropped else nn.ReLU(), nn.Linear(8, 4))

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            one = torch.randn(ROWS, 6)
            two = one if same else one + 0.1 * torch.randn(ROWS, 6)
            optimizer.zero_grad()
            F.cross_entropy(net(one) @ net(two).t(), torch.arange(ROWS)).backward()
            optimizer.step()

    yield answer(train, "itself")


def test_two_views_that_are_one_are_told_unless_dropout_tells_them_apart() -> None:
    assert [*views(True), *views(False), *views(True, dropped=True)] == ["yes", "no", "no"]


def test_all_pairs_of_one_call_are_no_comparison_with_itself() -> None:
    loss = lambda made, y: (made @ made.t()).fill_diagonal_(0).pow(2).mean()  # noqa: E731
    assert answer(lambda: steps(nn.Linear(6, 3), loss), "itself") == "no"


@pytest.mark.parametrize(("copies", "expected"), [(False, "yes"), (True, "")])
def test_rows_that_are_one_array_are_told(copies: bool, expected: str) -> None:
    buffer, kept = torch.empty(6), []
    torch.manual_seed(0)
    for _ in range(64):
        buffer.normal_()
        kept.append(buffer.clone() if copies else buffer)
    net = nn.Linear(6, 3)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(12):
            optimizer.zero_grad()
            rows = torch.randint(0, 64, (ROWS,)).tolist()
            F.cross_entropy(net(torch.stack([kept[one] for one in rows])), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    found = asked(train, "inputs alike")
    assert (found[-1].answer if found else "") == expected
    assert not found or found[-1].evidence["value"] is None


def test_labels_without_relation_follow_from_a_cut_that_is_seen_later() -> None:
    labels = Finding("", at=1, severity="warning", name="LABELS_UNRELATED")
    cut = Finding("", at=5, severity="warning", name="GRAPH_CUT")
    found = ranked([labels, cut], {"GRAPH_CUT": ("LABELS_UNRELATED",)})
    assert [(one.name, one.consequence_of) for one in found] == [("GRAPH_CUT", ""), ("LABELS_UNRELATED", "GRAPH_CUT")]


class Reader(nn.Module):
    """Classes of short texts, by attention."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.head = nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        seen: torch.Tensor = self.head(self.attention(x, x, x)[0].mean(1))
        return seen


@pytest.mark.parametrize(("batch_first", "expected"), [(False, "yes"), (True, "no")])
def test_tokens_whose_rows_attention_takes_for_time_are_told(batch_first: bool, expected: str) -> None:
    net = Reader(batch_first=batch_first)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randint(0, 9, (ROWS, 5))), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "batch") == expected


class Writer(nn.Module):
    """Scores of the next word of each place of a text."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.lstm = nn.LSTM(8, 8, batch_first=batch_first)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.lstm(self.words(words))[0])
        return scores


@pytest.mark.parametrize(
    ("batch_first", "samples", "expected"),
    [(False, 0, "yes"), (True, 0, "no"), (False, 1, "unknown")],  # the last is right: its places are along dim 0
)
def test_a_recurrence_over_the_batch_is_told_where_targets_are_the_next_words(
    batch_first: bool, samples: int, expected: str
) -> None:
    net = Writer(batch_first=batch_first)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            texts = torch.randint(0, 9, (ROWS, 21))
            given, wanted = (one if samples == 0 else one.T for one in (texts[:, :-1], texts[:, 1:]))
            optimizer.zero_grad()
            F.cross_entropy(net(given).reshape(-1, 9), wanted.reshape(-1)).backward()
            optimizer.step()

    assert answer(train, "batch") == expected


def test_what_adam_makes_nan_in_half_precision_is_told_of_its_eps() -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 3).half()
    optimizer = torch.optim.Adam(net.parameters())
    with Doctor() as doctor:
        for _ in range(4):
            x = torch.randn(ROWS, 6).half()
            x[:, 2] = 0
            optimizer.zero_grad()
            net(x).float().pow(2).mean().backward()
            optimizer.step()
    assert doctor.findings[0].name == "NAN_IN_FORWARD"
    assert "eps" in doctor.findings[0].fix


def test_a_grid_that_is_the_same_for_each_row_beside_a_code_that_is_not_is_fine() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 3)

        def forward(self, grid: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.last(torch.cat((grid, code), 1))
            return found

    net, grid = Decoder(), torch.linspace(0, 1, 4).expand(ROWS, 4)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(12):
            optimizer.zero_grad()
            F.cross_entropy(net(grid, torch.randn(ROWS, 4)), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert not asked(train, "inputs alike")


def test_a_sum_weighted_by_advantages_is_no_loss_of_targets() -> None:
    """They say how much a row counts, and a good policy has as small a sum of them as a bad one."""

    def surrogate(made: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return -(made.sigmoid() * advantage).mean()

    torch.manual_seed(0)
    assert answer(lambda: taught(nn.Linear(6, 1), lambda x: torch.randn(64, 1), surrogate), "related") == "unknown"


class Moved(nn.Module):
    """A step of a flow: where a sample goes, and by how much it is stretched."""

    def __init__(self) -> None:
        super().__init__()
        self.way, self.bend = nn.Linear(2, 1), nn.Parameter(0.1 * torch.randn(2))

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bent = torch.tanh(self.way(z))
        return z + self.bend * bent, (1 + (1 - bent**2) @ (self.way.weight * self.bend).sum(1)).abs().log()


def test_samples_of_a_flow_and_their_own_density_are_no_targets() -> None:
    """The density of a sample is added to the loss of a row, and a sample to what is made of it."""

    def train() -> None:
        flow = Moved()
        optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
        for _ in range(60):
            z = torch.randn(64, 2)
            there, stretched = flow(z)
            optimizer.zero_grad()
            (-0.5 * z.square().sum(1) - stretched + 0.01 * (there - 1).square().sum(1)).mean().backward()
            optimizer.step()

    torch.manual_seed(0)
    assert answer(train, "related") == "unknown"


def test_labels_of_either_sign_are_still_exchanged() -> None:
    """A hinge loss multiplies by them, as by an advantage."""

    def hinge(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (1 - wanted * made).clamp(min=0).mean()

    torch.manual_seed(0)
    assert answer(lambda: taught(nn.Linear(6, 1), lambda x: torch.randn(64, 1).sign(), hinge), "related") == "no"
