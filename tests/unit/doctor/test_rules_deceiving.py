"""Runs whose loss looks well: a class left out, a set scaled by itself, one batch, samples learned by heart."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anybatch.doctor.ask.asking import run_probes
from anybatch.doctor.recorder import Doctor
from anybatch.doctor.recording.printing import numbers_in
from anybatch.doctor.views.outcomes import Outcome, outcome
from anybatch.records.lossfacts import Evaluated, Printed, Probed
from anybatch.records.runs import Run
from number_runs import fires, silent
from test_doctor_ask import TRAINING, nothing_was_compiled, unasked

__all__ = ["nothing_was_compiled"]

Pair = tuple[torch.Tensor, torch.Tensor]


def kinds(count: int, seed: int = 0, *, spread: float = 1.0) -> Pair:
    """Rows of five classes around centres."""
    centres = spread * torch.randn(5, 8, generator=torch.Generator().manual_seed(9))
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (count,), generator=draw)
    return centres[y] + torch.randn(count, 8, generator=draw), y


def small(out: int = 5, inside: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, inside), nn.ReLU(), nn.Linear(inside, out))


Batches = Callable[[int], Pair]


def train(
    net: nn.Module, batches: Batches, steps: int, loss: Callable[..., torch.Tensor] = F.cross_entropy, lr: float = 1e-2
) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr)
    for step in range(steps):
        x, y = batches(step)
        net.train()
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()


def of(script: Callable[[], None], *, ask: bool = False) -> Run:
    """The record of a script, with the answers to what is asked of copies."""
    with Doctor() as doctor:
        script()
    assert doctor.failure == ""
    with pytest.MonkeyPatch.context() as patch:
        for place in TRAINING:
            patch.setattr(place, unasked)
        for answer in run_probes(doctor) if ask else ():
            doctor.emit(answer)
    return doctor.run


def slices(x: torch.Tensor, y: torch.Tensor, size: int = 32) -> Batches:
    return lambda step: (x[step * size % len(x) :][:size], y[step * size % len(x) :][:size])


def ignoring(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda made, y: F.cross_entropy(made, y, **options)


def masked(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (F.cross_entropy(made, y, reduction="none") * (y > 0)).mean()


def filtered(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(made[y > 0], y[y > 0])


@pytest.mark.parametrize(
    "loss",
    [ignoring(ignore_index=0), ignoring(weight=torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])), masked, filtered],
    ids=["ignore_index", "weight", "mask", "filter"],
)
def test_class_uncounted_fires(loss: Callable[..., torch.Tensor]) -> None:
    run = of(lambda: train(small(), slices(*kinds(512)), 30, loss), ask=True)
    one = fires(run, "CLASS_UNCOUNTED", "warning")
    assert one.evidence["classes"] == 5
    assert one.place.file.endswith("test_rules_deceiving.py")


def unknown(x: torch.Tensor, y: torch.Tensor) -> Batches:
    """Most rows have no label, which is class 0."""
    return slices(x, torch.where(torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < 0.2, y % 4 + 1, 0))


def pixels(step: int) -> Pair:
    x = torch.randn(8, 8, 4, 4, generator=torch.Generator().manual_seed(step))
    return x, x[:, 0].gt(0).long()


def tokens(step: int) -> Pair:
    x = torch.randint(0, 5, (16, 6), generator=torch.Generator().manual_seed(step))
    return x, x.sum(1) % 5


@pytest.mark.parametrize(
    ("net", "batches", "loss"),
    [
        (small, slices(*kinds(512)), ignoring()),
        (small, slices(*kinds(512)), ignoring(weight=torch.linspace(0.2, 1, 5))),
        (small, unknown(*kinds(512)), ignoring(ignore_index=0)),
        (lambda: nn.Conv2d(8, 2, 1), pixels, ignoring(ignore_index=0)),
        (lambda: nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(24, 5)), tokens, ignoring(ignore_index=0)),
        (small, slices(*kinds(512)), lambda made, y: F.cross_entropy(made, y, reduction="none").topk(20)[0].mean()),
        (small, slices(*kinds(512)), lambda made, y: F.cross_entropy(made, torch.where(y == 0, -100, y))),
    ],
    ids=["all", "weights", "unknown", "background", "padding", "hardest", "marked"],
)
def test_class_uncounted_is_quiet(net: Callable[[], nn.Module], batches: Batches, loss: Any) -> None:
    silent(of(lambda: train(net(), batches, 30, loss), ask=True), "CLASS_UNCOUNTED")


def scaled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (x - by.mean(0)) / by.std(0)


def evaluated(mine: Pair, others: Pair, *, noise: float = 0.0, by_batch: bool = False) -> None:
    """Two epochs, each with an evaluation."""
    net, loader = small(), DataLoader(TensorDataset(*mine), 32, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(2):
        net.train()
        for x, y in loader:
            optimizer.zero_grad()
            given = scaled(x, x) if by_batch else x + noise * torch.randn_like(x)
            F.cross_entropy(net(given), y).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            for x, y in DataLoader(TensorDataset(*others), 32):
                F.cross_entropy(net(scaled(x, x) if by_batch else x), y)


(X, Y), (OTHER, OTHERS) = kinds(512), kinds(128, 1)


def test_evaluation_scaled_fires_on_statistics_of_its_own() -> None:
    one = fires(
        of(lambda: evaluated((scaled(X, X), Y), (scaled(OTHER, OTHER), OTHERS))), "EVALUATION_SCALED", "warning"
    )
    assert one.evidence["rows"] == 128
    assert one.place.file.endswith("test_rules_deceiving.py")


ALL = scaled(torch.cat([X, OTHER]), torch.cat([X, OTHER]))


@pytest.mark.parametrize(
    ("mine", "others", "options"),
    [
        ((scaled(X, X), Y), (scaled(OTHER, X), OTHERS), {}),
        ((ALL[:512], Y), (ALL[512:], OTHERS), {}),
        ((scaled(X, X), Y), (scaled(X, X), Y), {"noise": 0.1}),
        ((scaled(X, X), Y), (scaled(X, X)[:128], Y[:128]), {}),
        ((X, Y), (OTHER, OTHERS), {"by_batch": True}),
        ((X, Y), (scaled(OTHER, OTHER), OTHERS), {}),
    ],
    ids=["of the training", "before the split", "noised", "a part", "by batch", "training as it is"],
)
def test_evaluation_scaled_is_quiet(mine: Pair, others: Pair, options: dict[str, Any]) -> None:
    silent(of(lambda: evaluated(mine, others, **options)), "EVALUATION_SCALED")


def drawn_once() -> None:
    batch = next(iter(DataLoader(TensorDataset(X, Y), 32)))
    train(small(), lambda step: (batch[0], batch[1]), 60)


def unused() -> None:
    """The loop draws batches and goes on with what was drawn before it."""
    loader, net = DataLoader(TensorDataset(X, Y), 32), small()
    batch, optimizer = next(iter(loader)), torch.optim.Adam(net.parameters())
    for _ in range(4):
        for _, _ in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(batch[0]), batch[1]).backward()
            optimizer.step()


def test_data_repeated_fires_where_the_batches_of_the_loop_are_not_used() -> None:
    assert "uses none" in fires(of(unused), "DATA_REPEATED", "warning").message


@pytest.mark.parametrize("script", [drawn_once, lambda: train(small(), lambda step: (X[:32], Y[:32]), 60)])
def test_one_batch_of_more_data_is_not_said_to_be_learned(script: Callable[[], None]) -> None:
    found = outcome(of(script))
    assert (found.word, "the same 32 samples" in found.said) == ("undecided", True)


def with_test(net: nn.Module, mine: Pair, others: Pair, steps: int, every: int, *, grad: bool = False) -> None:
    for _ in range(steps // every):
        train(net, lambda step: mine, every)
        net.eval()
        with torch.set_grad_enabled(grad):
            F.cross_entropy(net(others[0]), others[1])


@pytest.mark.parametrize(
    "script",
    [
        lambda: train(small(), lambda step: (X, Y), 60),
        lambda: train(small(), lambda step: (X[:384], Y[:384]), 60),
        lambda: with_test(small(), (X[:64], Y[:64]), (X[64:], Y[64:]), 60, 60),
        lambda: train(small(), slices(X, Y), 100),
    ],
    ids=["all", "a split", "few labels, evaluated on the others", "batches"],
)
def test_what_is_all_there_is_may_be_learned(script: Callable[[], None]) -> None:
    assert outcome(of(script)).word == "learning"


@pytest.mark.parametrize(("inside", "grad"), [(6, False), (256, False), (256, True)])  # some of it, and nearly all
def test_what_no_evaluation_shows_is_learned_by_heart(inside: int, grad: bool) -> None:
    torch.manual_seed(3)
    mine, others = ((torch.randn(128, 8), torch.randint(0, 5, (128,))) for _ in range(2))
    run = of(lambda: with_test(small(inside=inside), mine, others, 200, 50, grad=grad))
    found = outcome(run)
    assert (found.word, "its training data only" in found.said) == ("undecided", True)
    assert not any(one.better for one in run.of(Evaluated))


def test_a_net_that_is_too_sure_of_itself_knows_something_all_the_same() -> None:
    run = of(lambda: with_test(small(inside=256), kinds(64, spread=0.5), kinds(600, 1, spread=0.5), 400, 400))
    one = next(iter(run.of(Evaluated)))
    assert one.guess is not None
    assert one.better
    assert one.value > one.guess
    assert outcome(run).word == "learning"


def rare(count: int, share: float, seed: int) -> Pair:
    """Two classes that are next to each other, of which one has a share of the rows."""
    draw = torch.Generator().manual_seed(seed)
    y = (torch.rand(count, generator=draw) < share).long()
    return torch.randn(count, 8, generator=draw) + 0.4 * y[:, None], y


def test_rare_classes_that_are_drawn_as_often_as_others_are_told_apart_all_the_same() -> None:
    run = of(lambda: with_test(small(2), rare(800, 0.5, 1), rare(2000, 0.03, 2), 60, 60))
    assert all(one.guess is None or one.value > one.guess for one in run.of(Evaluated))
    assert outcome(run).word == "learning"


def test_an_evaluation_before_the_training_shows_nothing_of_it() -> None:
    def script() -> None:
        net = small()
        train(net, lambda step: (X, Y), 1)
        net.eval()
        with torch.no_grad():
            F.cross_entropy(net(X), Y)
        train(net, lambda step: (X, Y), 60)

    assert outcome(of(script)).word == "learning"


@pytest.fixture(scope="module")
def fitted() -> dict[str, Run]:
    """Records of nets that fit their training data, by the loss; one prints a line at the end."""
    x, y = kinds(256, spread=3.0)
    torch.manual_seed(0)

    def classes() -> None:
        train(small(inside=64), lambda step: (x, y), 60)
        sys.stdout.write("epoch 3 | train acc 99%, val_acc = 31.2%\n")

    pairs = x, x[:, :2] - x[:, 2:4]
    regression = lambda: train(small(2, 64), lambda step: pairs, 60, loss=F.mse_loss)  # noqa: E731
    return {"classes": of(classes), "regression": of(regression)}


def when_printed(run: Run, text: str, *, step: int = 60) -> Outcome:
    """What became of a run whose script prints this once, by default at its end."""
    others = [one for one in run.facts if not isinstance(one, Printed)]
    said = [Printed(label=label, steps=(step,), values=(value,)) for label, value in numbers_in(text)]
    return outcome(Run([*others, *said]))


@pytest.mark.parametrize(
    ("label", "values", "word"),
    [
        ("val loss", (1.7, 8.2), "undecided"),
        ("val loss", (1.7, 1.2), "learning"),  # better than a guess
        ("val loss", (170.0, 820.0), "learning"),  # no mean over samples
        ("step", (1.7, 8.2), "learning"),
        ("train loss", (1.7, 8.2), "learning"),
    ],
)
def test_a_loss_of_what_is_held_out_that_rises_above_a_guess_is_weighed(
    fitted: dict[str, Run], label: str, values: tuple[float, float], word: str
) -> None:
    others = [one for one in fitted["classes"].facts if not isinstance(one, Printed)]
    found = outcome(Run([*others, Printed(label=label, steps=(0, 60), values=values, line=9)]))
    assert (found.word, "a constant guess has" in found.said) == (word, word == "undecided"), found.said


def test_what_it_prints_at_its_start_says_nothing_of_its_end(fitted: dict[str, Run]) -> None:
    assert when_printed(fitted["classes"], "test accuracy: 0.31", step=1).word == "learning"


def test_what_the_script_prints_of_its_evaluation_is_weighed(fitted: dict[str, Run]) -> None:
    found = outcome(fitted["classes"])
    assert (found.word, "on its training data" in found.said) == ("undecided", True)
    assert 'prints "val_acc" 0.312' in found.said


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("test accuracy: 0.31", "undecided"),
        ("{'acc': tensor(0.31), 'n': 9}", "undecided"),
        ("acc 0.31 at first, best accuracy 0.97", "learning"),
        ("train accuracy: 0.31", "learning"),
        ("31 correct: 12", "learning"),
        ("loss 0.31", "learning"),
    ],
)
def test_a_share_of_right_answers_is_known_by_its_words(fitted: dict[str, Run], text: str, word: str) -> None:
    assert when_printed(fitted["classes"], text).word == word


@pytest.mark.parametrize(("text", "word"), [("train mse 0.1, test mse 90", "undecided"), ("test mse 0.2", "learning")])
def test_so_is_the_error_of_a_regression(fitted: dict[str, Run], text: str, word: str) -> None:
    assert when_printed(fitted["regression"], text).word == word


def follow(copied: nn.Module, net: nn.Module) -> None:
    with torch.no_grad():
        for one, other in zip(copied.parameters(), net.parameters(), strict=True):
            one.lerp_(other, 0.05)


def with_a_copy(targets: Callable[[nn.Module, torch.Tensor], torch.Tensor], *, follows: bool = True) -> Run:
    """A regression beside a copy of the net, which may follow it, on what it or the data say."""

    def script() -> None:
        net, copied = small(2), small(2)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        for step in range(120):
            x = X[step % 4 :: 4]
            target = targets(copied, x)
            optimizer.zero_grad()
            F.mse_loss(net(x), target).backward()
            optimizer.step()
            if follows:
                follow(copied, net)
        with torch.no_grad():
            copied(X)

    return of(script)


def bootstrapped(copied: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.add(x[:, :2], copied(x.roll(1, 0)), alpha=0.5)


def test_a_small_loss_on_what_a_target_net_says_shows_nothing() -> None:
    found = outcome(with_a_copy(bootstrapped))
    assert (found.word, "a copy of the model makes the targets" in found.said) == ("undecided", True)


def test_nor_does_it_that_an_older_copy_made_targets_that_fit_other_rows_as_well() -> None:
    run = with_a_copy(bootstrapped)
    (own,) = run.optimizers
    seen = {"optimizer": own, "rows": 32, "loss": 0.7, "others": 0.7, "alike": False}
    asked = [one for one in run.facts if not (isinstance(one, Probed) and one.probe == "related")]
    found = outcome(Run([*asked, Probed(probe="related", root=-1, answer="no", evidence=seen)]))
    assert (found.word, "a copy of the model makes the targets" in found.said) == ("undecided", True)


def test_one_on_what_a_fixed_teacher_says_does() -> None:
    assert outcome(with_a_copy(bootstrapped, follows=False)).word == "learning"


def test_so_does_one_on_data_beside_an_average_of_the_weights() -> None:
    assert outcome(with_a_copy(lambda _, x: x[:, :2] - x[:, 2:4])).word == "learning"


@pytest.mark.parametrize(
    ("at", "steps", "state", "expected"),
    [(0, 6, 0.0, "warning"), (-1, 6, 0.0, ""), (0, 1, 0.0, "info"), (0, 1, 1.0, "")],
)
def test_recurrent_weights_that_no_step_follows_are_told(at: int, steps: int, state: float, expected: str) -> None:
    """One that is given a state is trained by it; one of a single step may be meant."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made, _ = self.rnn(x[:, None].expand(-1, steps, -1), torch.full((1, len(x), 16), state))
            result: torch.Tensor = self.out(made[:, at])
            return result

    run = of(lambda: train(Net(), lambda step: (X[:64], Y[:64]), 30))
    if expected:
        assert "rnn.weight_hh_l0" in fires(run, "GRAPH_CUT", expected).message
    else:
        silent(run, "GRAPH_CUT")


@pytest.mark.parametrize(("read", "expected"), [("the last direction", "warning"), ("both", "")])
def test_a_direction_of_a_recurrent_layer_that_nothing_reads_is_told(read: str, expected: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(8, 16, batch_first=True, bidirectional=True), nn.LazyLinear(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _, state = self.rnn(x[:, None].expand(-1, 6, -1))
            result: torch.Tensor = self.out(state[-1] if read != "both" else torch.cat([state[-2], state[-1]], 1))
            return result

    net = Net()
    net(X[:64])
    run = of(lambda: train(net, lambda step: (X[:64], Y[:64]), 30))
    if expected:
        found = fires(run, "GRAPH_CUT", expected)
        assert "is in no loss" in found.message
        assert {run.parameters[one].name for one in range(len(run.parameters))} >= set(found.place.parameters)
        assert len(found.place.parameters) == 4
    else:
        silent(run, "GRAPH_CUT")


@pytest.mark.parametrize(("unread", "layers"), [("no loss", 1), ("no loss", 2), ("the last layer", 2)])
def test_a_recurrent_layer_of_a_loss_that_counts_for_nothing_yet_is_not_told(unread: str, layers: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out, self.next = nn.GRU(8, 16, layers, batch_first=True), nn.Linear(8, 5), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made, states = self.rnn(x[:, None].expand(-1, 6, -1))
            weight = 0.0 if unread == "no loss" else 1.0
            read = made if unread == "no loss" else states[0]
            result: torch.Tensor = self.out(x) + weight * self.next(read).mean()
            return result

    run = of(lambda: train(Net(), lambda step: (X[:64], Y[:64]), 30))
    if unread == "no loss":
        silent(run, "GRAPH_CUT")
    else:
        assert len(fires(run, "GRAPH_CUT", "warning").place.parameters) == 4


class Wasted(nn.Module):
    """A layer is called in each step, and what it gives is left."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of, self.hidden, self.out = of, nn.Linear(8, 8), nn.Linear(8, 5)
        self.spare: Any = nn.TransformerEncoderLayer(8, 2, 8) if of == "a library" else nn.Linear(8, 8)
        if of == "a class with a hook":
            self.hidden.register_forward_hook(lambda module, inputs, output: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x
        if self.of in ("a class of the user's", "a class with a hook"):
            made = self.spare(x)
        made = self.hidden(x)
        result: torch.Tensor = self.out(made + self.spare.linear1(made).detach() if self.of == "a library" else made)
        return result


@pytest.mark.parametrize(
    ("of", "steps", "severity"),
    [("a class of the user's", 110, "warning"), ("a class of the user's", 30, "info"), ("none", 110, "info"),
     ("a library", 110, "info"), ("a class with a hook", 110, "info")],
)  # fmt: skip
def test_param_unused_fires_louder_where_a_layer_is_called_for_nothing(of: str, steps: int, severity: str) -> None:
    run = of_wasted(of, steps)
    assert ("is still called" in fires(run, "PARAM_UNUSED", severity).message) == (severity == "warning")


def of_wasted(kind: str, steps: int) -> Run:
    return of(lambda: train(Wasted(kind), lambda step: (X[:64], Y[:64]), steps))


class Stack(nn.Module):
    """Blocks that each give a share of the result and what is left for the next, as those of N-BEATS do."""

    def __init__(self, *, is_chained: bool) -> None:
        super().__init__()
        self.is_chained = is_chained
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"result": nn.Linear(8, 5), "left": nn.Linear(8, 8)}) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), 5)
        for block in self.blocks:
            parts: Any = block
            total = total + parts["result"](x)
            left = x - parts["left"](x)
            x = left if self.is_chained else x
        return total


@pytest.mark.parametrize(("is_chained", "severity"), [(True, "info"), (False, "warning")])
def test_param_unused_is_quiet_about_what_the_last_of_a_stack_leaves(is_chained: bool, severity: str) -> None:
    run = of(lambda: train(Stack(is_chained=is_chained), lambda step: (X[:64], Y[:64]), 110))
    fires(run, "PARAM_UNUSED", severity)


def left_out() -> None:
    net = small()
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(30):
        made = net(X[:64])
        loss = F.cross_entropy(made, Y[:64])
        penalty = 0.1 * made.pow(2).mean()  # noqa: F841
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def only_watched() -> None:
    net, seen = small(), []
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(30):
        made = net(X[:64])
        loss = F.cross_entropy(made, Y[:64])
        size = made.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 7:
            seen.append(size.item())


def measured_elsewhere() -> None:
    """A function of its own measures what the step does not train with."""
    net = small()
    optimizer = torch.optim.Adam(net.parameters())

    def measure() -> None:
        made = net(X[64:128])
        torch.autograd.grad(F.cross_entropy(made, Y[64:128]), list(net.parameters()), retain_graph=True)
        size = made.pow(2).mean()  # noqa: F841

    for _ in range(30):
        optimizer.zero_grad()
        measure()
        F.cross_entropy(net(X[:64]), Y[:64]).backward()
        optimizer.step()


LATEST: Any = None


def left_for_others() -> None:
    global LATEST
    net = small()
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(30):
        made = net(X[:64])
        loss = F.cross_entropy(made, Y[:64])
        LATEST = made.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_term_that_no_loss_has_is_told_and_one_that_is_watched_is_not() -> None:
    assert "penalty is computed" in fires(of(left_out, ask=True), "FIELD_UNREAD", "warning").message
    silent(of(only_watched, ask=True), "FIELD_UNREAD")
    silent(of(measured_elsewhere, ask=True), "FIELD_UNREAD")
    silent(of(left_for_others, ask=True), "FIELD_UNREAD")
