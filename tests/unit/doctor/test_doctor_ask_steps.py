"""Questions about rates, averages, axes and targets: yes where it is so, and no where it only looks alike."""

import ast
import copy
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask import fitting
from anybatch.doctor.ask.calls import beside, saved_only
from test_doctor_ask import ROWS, answer, asked, nothing_was_compiled, steps

__all__ = ["nothing_was_compiled"]


def learns(kind: Any, rate: float, scale: float = 1.0, times: int = 12) -> None:
    """Some steps of a classifier."""
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = kind(net.parameters(), lr=rate)
    for _ in range(times):
        x = torch.randn(ROWS, 6)
        optimizer.zero_grad()
        F.cross_entropy(scale * net(x), x[:, :3].argmax(1)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "rate", "expected"),
    [
        (torch.optim.SGD, 1e-5, "yes"),
        (torch.optim.SGD, 0.3, "no"),
        (torch.optim.Adam, 1e-2, "no"),
        (torch.optim.Adam, 1e-7, "yes"),
    ],
)
def test_a_batch_that_is_learned_at_another_rate_is_told(kind: Any, rate: float, expected: str) -> None:
    assert answer(lambda: learns(kind, rate), "rate") == expected


def test_the_steps_that_are_told_are_those_that_time_was_left_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(fitting, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * fitting._SECONDS / 50))
    found = asked(lambda: learns(torch.optim.SGD, 1e-5), "rate")[-1]
    assert found.evidence["steps"] == 49


@pytest.mark.parametrize(("times", "expected"), [(12, "yes"), (60, "no")])
def test_fewer_steps_of_adam_than_the_run_made_blame_no_rate(
    times: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine there is time for few, and in few of them every rate that is usual learns little."""
    ticks = count()
    monkeypatch.setattr(fitting, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * fitting._SECONDS / 35))
    assert answer(lambda: learns(torch.optim.Adam, 1e-4, times=times), "rate") == expected


def test_a_loss_without_a_floor_says_nothing_about_the_rate() -> None:
    assert answer(lambda: steps(nn.Linear(6, 3), lambda made, y: 1 + made[:, 0].mean()), "rate") == "no"


class Averaged:
    """A teacher, and the share of the student that it takes in each step; or both as parts of one net."""

    def __init__(self, share: Callable[[int], float], *, whole: bool = False) -> None:
        self.share, self.whole = share, whole

    def __call__(self) -> None:
        student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        teacher = copy.deepcopy(student)
        both = Pair(student, teacher) if self.whole else None
        optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
        for step in range(40):
            x, other = torch.randn(ROWS, 6), torch.randn(ROWS, 6)
            optimizer.zero_grad()
            if both is not None:
                made, wanted = both(x, other)
            else:
                with torch.no_grad():
                    wanted = teacher(other)
                made = student(x)
            F.mse_loss(made, wanted + torch.randn(ROWS, 1)).backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, self.share(step))


class Pair(nn.Module):
    """Both nets in one."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher, self.same = student, teacher, False

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x if self.same else other)
        return self.student(x), wanted


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (lambda step: 0.99, "yes"),
        (lambda step: 1.0, "yes"),
        (lambda step: 0.01, ""),
        (lambda step: 9 / (10 + step), ""),  # a warm-up
        (lambda step: float(step % 10 == 9), ""),
        (lambda step: 0.99 * (step % 2), "yes"),  # of which every second step is one of an actor
        (lambda step: 0.01 * (step % 2), ""),
        (lambda step: float(step % 2), ""),
    ],
)
def test_an_average_that_follows_at_once_is_told(share: Callable[[int], float], whole: bool, expected: str) -> None:
    assert answer(Averaged(share, whole=whole), "close copy") == expected


def test_a_part_that_was_a_copy_and_never_changes_is_told() -> None:
    assert answer(Averaged(lambda step: 0.0, whole=True), "frozen copy") == "yes"
    assert answer(Averaged(lambda step: 0.1, whole=True), "frozen copy") == ""


def test_layers_that_began_alike_and_are_trained_are_no_copies() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    net[1].load_state_dict(net[0].state_dict())
    assert answer(lambda: steps(net, F.cross_entropy, 40), "frozen copy") == ""
    assert answer(lambda: steps(net, F.cross_entropy, 40), "close copy") == ""


class Frames(nn.Module):
    """Scores of each frame; the axes of features and times change places on the way."""

    def __init__(self, turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.turn, self.layer = turn, nn.Conv1d(6, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(self.turn(x)).mean(-1)
        return made


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (lambda x: x.reshape(ROWS, 6, 9), "yes"),
        (lambda x: x.transpose(1, 2).reshape(ROWS, 6, 9), "no"),
        (lambda x: x.reshape(ROWS, 54).view(ROWS, 9, 6).transpose(1, 2), "no"),
    ],
)
def test_axes_that_change_places_by_a_reshape_are_told(turn: Callable[..., torch.Tensor], expected: str) -> None:
    net = Frames(turn)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(ROWS, 9, 6)), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "axes") == expected


def pictures(count: int) -> torch.Tensor:
    """Bright and smooth spots, nearly the same in three channels: rows, columns, channels."""
    place = torch.arange(12.0)
    x, y = torch.rand(2, count, 1, 1) * 12
    spots = torch.exp(-((place - x) ** 2 + (place[:, None] - y) ** 2) / 8)
    return spots[..., None] + 0.1 * torch.randn(count, 12, 12, 3)


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda x: x.reshape(ROWS, 3, 12, 12), "yes"),
        (lambda x: x.permute(0, 3, 1, 2), "no"),
        (lambda x: torch.randn(ROWS, 3, 12, 12), "no"),
    ],
)
def test_pictures_whose_pixels_are_torn_before_the_call_are_told(read: Callable[..., Any], expected: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(read(pictures(ROWS))), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "axes") == expected


@pytest.mark.parametrize(("ahead", "expected"), [(0, "yes"), (1, "no")])
def test_a_target_that_the_model_is_given_is_told(ahead: int, expected: str) -> None:
    net = nn.Linear(5, 1)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            window = torch.randn(ROWS, 6)
            optimizer.zero_grad()
            F.mse_loss(net(window[:, 1 - ahead : 6 - ahead].clone()), window[:, 5:].clone()).backward()
            optimizer.step()

    assert answer(train, "target given") == expected


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (lambda y: y.float(), "yes"),
        (lambda y: (y.float() - 1.2) / 0.7, "yes"),  # scaled with the table
        (lambda y: (y > 0).float(), ""),  # it tells one class of three
        (lambda y: y.float() + 0.1 * torch.randn(len(y)), ""),
        (lambda y: torch.where(torch.rand(len(y)) < 0.95, y, 2 - y).float(), ""),  # it is a good feature
    ],
)
def test_a_column_that_tells_the_class_is_told(column: Callable[[torch.Tensor], torch.Tensor], expected: str) -> None:
    net = nn.Linear(6, 3)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(8):
            y = torch.randint(0, 3, (160,))
            optimizer.zero_grad()
            F.cross_entropy(net(torch.cat([torch.randn(160, 5), column(y)[:, None]], 1)), y).backward()
            optimizer.step()

    assert [one.answer for one in asked(train, "target given") if one.answer == "yes"][:1] == [expected][
        : bool(expected)
    ]


@pytest.mark.parametrize(
    ("padding", "first", "reduction", "expected"),
    [
        (0, 1, "mean", "yes"), (-100, 1, "mean", ""), (0, 0, "mean", "yes"),  # a word, too
        (0, 1, "none", ""),  # what is padding is masked behind it
    ],
)  # fmt: skip
def test_padding_that_a_loss_counts_is_told(padding: int, first: int, reduction: str, expected: str) -> None:
    net = nn.Sequential(nn.Embedding(29, 8), nn.Linear(8, 29))

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            tokens, length = torch.randint(first, 29, (ROWS, 10)), torch.randint(3, 11, (ROWS, 1))
            behind = torch.arange(10) >= length
            targets = (tokens % 28 + 1).masked_fill(behind, padding)
            optimizer.zero_grad()
            scores = net(tokens.masked_fill(behind, 0)).transpose(1, 2)
            F.cross_entropy(scores, targets, reduction=reduction)[
                ... if reduction == "mean" else ~behind
            ].mean().backward()
            optimizer.step()

    assert answer(train, "padding") == expected


@pytest.mark.parametrize("runs", [True, False])
def test_what_ends_rows_of_real_data_is_no_padding(runs: bool) -> None:
    """Dark pixels at the ends of rows come in runs elsewhere, too; an end that is asked for once is one place."""
    net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            tokens, length = torch.randint(1, 9, (ROWS, 8)), torch.randint(3, 9, (ROWS, 1))
            behind = torch.arange(8) >= length
            tokens = tokens.masked_fill(behind, 0)
            if runs:
                tokens[::4, 1:3] = 0
                targets = tokens
            else:
                targets = torch.cat([tokens[:, 1:], torch.zeros(ROWS, 1, dtype=torch.long)], 1)
                targets = targets.masked_fill(torch.arange(8) > length, -100)
            optimizer.zero_grad()
            F.cross_entropy(net(tokens).transpose(1, 2), targets).backward()
            optimizer.step()

    assert answer(train, "padding") == ""


@pytest.mark.parametrize(
    ("low", "frames", "expected"), [(0, 12, "yes"), (1, 12, "no"), (1, 2, "yes")], ids=["blank", "right", "too short"]
)
def test_targets_of_a_ctc_loss_that_do_not_fit_are_told(low: int, frames: int, expected: str) -> None:
    net = nn.Linear(6, 5)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        lengths = torch.full((ROWS,), 4)
        for _ in range(4):
            scores = net(torch.randn(ROWS, 12, 6)).log_softmax(-1).transpose(0, 1)
            targets = torch.randint(low, 5, (ROWS, 4))
            optimizer.zero_grad()
            loss = F.ctc_loss(scores, targets, torch.full((ROWS,), frames), lengths, zero_infinity=True)
            loss.backward()
            optimizer.step()

    assert answer(train, "blank") == expected


@pytest.mark.parametrize(("counted", "expected"), [("all", True), ("symbols", False)])
def test_target_lengths_that_count_the_padding_are_told(counted: str, expected: bool) -> None:
    net = nn.Linear(6, 5)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for step in range(4):
            lengths = 1 + (torch.arange(ROWS) + step) % 4
            targets = torch.randint(1, 5, (ROWS, 4)) * (torch.arange(4) < lengths[:, None])
            scores = net(torch.randn(ROWS, 12, 6)).log_softmax(-1).transpose(0, 1)
            given = lengths if counted == "symbols" else torch.full((ROWS,), 4)
            optimizer.zero_grad()
            F.ctc_loss(scores, targets, torch.full((ROWS,), 12), given).backward()
            optimizer.step()

    (found,) = asked(train, "blank")
    assert (found.answer == "yes", found.evidence.get("padded", False)) == (expected, expected)


def test_a_divergence_of_a_distribution_from_itself_is_told() -> None:
    def itself(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        same = F.kl_div((scores / 2).log_softmax(1), (scores.detach() / 2).softmax(1), reduction="batchmean")
        return F.cross_entropy(scores, y) + same

    def another(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        other = F.kl_div((scores / 2).log_softmax(1), (scores.detach().flip(1) / 2).softmax(1), reduction="batchmean")
        return F.cross_entropy(scores, y) + other

    assert answer(lambda: steps(nn.Linear(6, 3), itself), "itself") == "yes"
    assert answer(lambda: steps(nn.Linear(6, 3), another), "itself") == "no"


class Attending(nn.Module):
    """Attention over tokens, with or without heads, that hides some of them."""

    def __init__(self, dim: int, hide: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.dim, self.hide, self.table, self.out = dim, hide, nn.Embedding(9, 8), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens).unflatten(-1, (2, 4)).transpose(1, 2)
        scores = (x @ x.transpose(-2, -1)).masked_fill(self.hide(tokens)[:, None, None], -1e9)
        made: torch.Tensor = self.out((scores.softmax(self.dim) @ x).transpose(1, 2).flatten(2).mean(1))
        return made


@pytest.mark.parametrize(("dim", "inverted"), [(-1, False), (1, False), (-1, True)])
def test_weights_of_another_axis_and_masks_of_what_is_kept_are_told(dim: int, inverted: bool) -> None:
    def train() -> None:
        net = Attending(dim, lambda tokens: (tokens != 0) if inverted else (tokens == 0))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            tokens, length = torch.randint(1, 9, (ROWS, 10)), torch.randint(3, 10, (ROWS, 1))
            optimizer.zero_grad()
            scores = net(tokens.masked_fill(torch.arange(10) >= length, 0))
            F.cross_entropy(scores, torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "softmax axis") == ("yes" if dim == 1 else "no")
    assert answer(train, "hidden tokens") == ("yes" if inverted else "no")


@pytest.mark.parametrize("inverted", [False, True])
def test_a_mask_of_booleans_of_the_fused_attention_says_what_takes_part(inverted: bool) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.labels, self.out = nn.Embedding(9, 8), nn.Embedding(3, 8), nn.Linear(8, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.table(tokens).unflatten(-1, (2, 4)).transpose(1, 2)
            labels = self.labels.weight.expand(len(tokens), -1, -1).unflatten(-1, (2, 4)).transpose(1, 2)
            kept = (tokens == 0 if inverted else tokens != 0)[:, None, None]
            made = F.scaled_dot_product_attention(labels, x, x, attn_mask=kept)
            scores: torch.Tensor = self.out(made.transpose(1, 2).flatten(2)).squeeze(-1)
            return scores

    def train() -> None:
        net = Fused()
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            tokens, length = torch.randint(1, 9, (ROWS, 10)), torch.randint(3, 10, (ROWS, 1))
            optimizer.zero_grad()
            scores = net(tokens.masked_fill(torch.arange(10) >= length, 0))
            F.cross_entropy(scores, torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "hidden tokens") == ("yes" if inverted else "no")


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("inverted", [False, True])
def test_a_mask_with_a_place_for_a_class_token_is_one_of_tokens(inverted: bool, behind: bool) -> None:
    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.first = nn.Embedding(9, 8), nn.Parameter(torch.randn(1, 1, 8))
            self.layer, self.out = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            first, hidden = self.first.expand(len(tokens), -1, -1), (tokens != 0) == inverted
            parts, masks = [first, self.table(tokens)], [torch.full((len(tokens), 1), inverted), hidden]
            x, mask = (torch.cat(one[::-1] if behind else one, 1) for one in (parts, masks))
            made: torch.Tensor = self.out(self.layer(x, src_key_padding_mask=mask).mean(1))
            return made

    def train() -> None:
        net = Encoding()
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            tokens, length = torch.randint(1, 9, (ROWS, 10)), torch.randint(3, 9, (ROWS, 1))
            optimizer.zero_grad()
            scores = net(tokens.masked_fill(torch.arange(10) >= length, 0))
            F.cross_entropy(scores, torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "hidden tokens") == ("yes" if inverted else "no")


def test_an_assignment_to_clusters_sums_over_another_axis_as_it_should() -> None:
    net = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 3)])

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(ROWS, 10, 6)
            optimizer.zero_grad()
            clusters = net[0](x).transpose(1, 2).softmax(1) @ x
            F.cross_entropy(net[1](clusters).mean(1), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "softmax axis") == "no"


def of_policy(log_prob: torch.Tensor, reward: torch.Tensor, form: str) -> torch.Tensor:
    """A loss in one of the forms in which it is written."""
    if form == "outside":
        loss = -(log_prob * reward).mean()
    elif form == "inside":
        loss = (-log_prob * reward).mean()
    elif form == "number":
        loss = (-1.0 * reward * log_prob).mean()
    else:
        loss = (log_prob * reward).mean()
    return loss


@pytest.mark.parametrize("form", ["outside", "inside", "number", "wrong"])
def test_a_reward_that_makes_its_action_less_likely_is_told(form: str) -> None:
    def train() -> None:
        net = nn.Linear(6, 3)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(ROWS, 6)
            drawn = torch.distributions.Categorical(logits=net(x))
            action = drawn.sample()
            optimizer.zero_grad()
            of_policy(drawn.log_prob(action), (action == 1).float(), form).backward()
            optimizer.step()

    assert answer(train, "rewarded") == ("yes" if form == "wrong" else "no")


@pytest.mark.parametrize(
    ("of", "sign", "weights", "expected"),
    [("its own", -1, 3.0, "no"), ("its own", 1, 3.0, "no"), ("its own", 1, -3.0, "unknown"),
     ("its own", 1, 0.0, "unknown"), ("the data", 1, 3.0, "unknown"), ("the data", -1, 3.0, "unknown"),
     ("itself with a graph", 1, 3.0, "unknown"), ("another net", -1, 3.0, "unknown")],
)  # fmt: skip
def test_numbers_that_weigh_log_probabilities_of_draws_are_rewards_or_costs(
    of: str, sign: int, weights: float, expected: str
) -> None:
    """Whatever their name is; a mask weighs nothing, and what weighs data, or a sample with a graph, is no reward."""

    def train() -> None:
        net, other = nn.Linear(6, 3), nn.Linear(6, 3)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x, of_each = torch.randn(ROWS, 6), torch.tensor([weights * one for one in range(ROWS)])
            means, teacher = net(x), torch.distributions.Normal(other(x), 1.0)
            density = torch.distributions.Normal(means, 1.0)
            values: dict[str, Any] = {
                "its own": density.sample,
                "the data": lambda: torch.randn(ROWS, 3),
                "itself with a graph": lambda: density.rsample() + 0.1,  # noqa: B023
                "another net": teacher.sample,
            }
            density_error = density.log_prob(values[of]()).sum(1)
            optimizer.zero_grad()
            (sign * (density_error * of_each).mean()).backward()
            optimizer.step()

    assert answer(train, "rewarded") == expected


def test_a_word_that_ends_like_a_ratio_is_no_ratio() -> None:
    """As in a duration that is weighed with what is called as returns are."""

    def train() -> None:
        net = nn.Linear(6, 3)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            duration, G = net(torch.randn(ROWS, 6)).square(), torch.rand(ROWS, 3)  # noqa: N806
            optimizer.zero_grad()
            (duration * G).mean().backward()
            optimizer.step()

    assert answer(train, "rewarded") == "unknown"


SAVED = "{{'opt': opt.state_dict(), 'sched': sched.state_dict()}}\nopt.load_state_dict(ckpt['opt'])\n{}"


@pytest.mark.parametrize(
    ("text", "decay", "expected"),
    [
        ("", 0.5, "yes"), ("sched.load_state_dict(ckpt['sched'])", 0.5, ""), ("sched.last_epoch = 3", 0.5, ""),
        ("", 1.0, ""),
    ],
)  # fmt: skip
def test_a_schedule_whose_state_is_saved_and_not_loaded_is_told(
    monkeypatch: pytest.MonkeyPatch, text: str, decay: float, expected: str
) -> None:
    tree = ast.parse(SAVED.format(text))
    monkeypatch.setattr("anybatch.doctor.ask.calls.scripts", lambda run: [("train.py", tree)])

    def train() -> None:
        net, state = nn.Linear(6, 3), None
        for _ in range(2):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
            if state is not None:
                optimizer.load_state_dict(state)
                optimizer.param_groups[0]["lr"] = 0.1  # as a LambdaLR does at its next step
            for _ in range(4):
                optimizer.zero_grad()
                F.cross_entropy(net(torch.randn(12, 6)), torch.randint(0, 3, (12,))).backward()
                optimizer.step()
                schedule.step()
            state = optimizer.state_dict()

    assert answer(train, "resumed") == expected


@pytest.mark.parametrize(
    ("state", "loads", "expected"),
    [
        ("lib/state.py", "", ["sched"]), ("lib/state.py", "import own", []),
        ("other/state.py", "", []),  # nothing imports it
    ],
)  # fmt: skip
def test_what_a_script_imports_from_its_folder_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, loads: str, expected: list[str]
) -> None:
    for name, text in {
        "main.py": f"import torch\nfrom lib import train\n{loads}",
        "lib/train.py": "from . import state\nloss.backward()",
        state: "def save(): torch.save({'opt': opt.state_dict(), 'sched': sched.state_dict()}, 'a.pt')",
        "own.py": "sched.load_state_dict(torch.load('a.pt')['sched'])",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "main.py")])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    file = tmp_path / "lib" / "train.py"
    assert list(saved_only(*beside(str(file), ast.parse(file.read_text(encoding="utf-8"))))) == expected
