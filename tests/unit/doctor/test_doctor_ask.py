"""What is kept of small trainings, and what questions to it answer: yes where it is so, and no where it is not."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask.asking import run_probes
from anybatch.doctor.ask.steps import Question
from anybatch.doctor.ask.trials import Unknown
from anybatch.doctor.recorder import Doctor
from anybatch.doctor.views.outcomes import outcome
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

ROWS = 12


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests of this process have compiled: no step is written down after that."""
    monkeypatch.setattr("anybatch.doctor.ask.keeping.has_compiled", lambda: False)


def asked(train: Callable[[], None], probe: str) -> list[Probed]:
    """The answers to a question after a training; of those about steps, and of labels, no other is asked."""
    torch.manual_seed(0)
    with Doctor() as doctor:
        train()
    assert doctor.failure == ""
    every, names = Question.answers, (probe, probe.removesuffix(" inputs"))  # "related inputs" is answered by "related"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Question, "answers", lambda self, step: every(self, step) if self.name in names else iter(()))
        if probe != "labels":
            patch.setattr(TRAINING[-1], unasked)
        return [one for one in run_probes(doctor) if one.probe == probe]


TRAINING = [f"anybatch.doctor.ask.{one}" for one in ("fitting.other_rate", "relating.related", "training.unrelated")]


def unasked(*_: Any) -> Probed:
    raise Unknown("a test asks something else")


def answer(train: Callable[[], None], probe: str) -> str:
    """The one answer to a question; empty if it was not asked."""
    found = asked(train, probe)
    return found[-1].answer if found else ""


def steps(
    net: nn.Module, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], count: int = 4, **opt: Any
) -> None:
    """Trains a net on random batches."""
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(count):
        x, y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()


def torn_scores(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.t().contiguous().view(-1, 3), y)


def grouped(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Pairs of rows, which a permutation tears apart as it may."""
    pairs = scores.view(ROWS // 2, 2, 3)
    return (pairs[:, 0] - pairs[:, 1]).pow(2).mean() + F.cross_entropy(scores, y)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(torn_scores, "yes"), (F.cross_entropy, "no"), (grouped, "unknown")],
)
def test_rows_that_are_torn_apart_are_found(loss: Callable[..., torch.Tensor], expected: str) -> None:
    assert answer(lambda: steps(nn.Linear(6, 3), loss), "rows") == expected


def test_a_dropout_and_numbers_that_are_drawn_belong_to_their_rows() -> None:
    def noisy(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        other = torch.randperm(ROWS)
        mixed = 0.7 * scores + 0.3 * scores[other] + 0.1 * torch.randn_like(scores)
        return 0.7 * F.cross_entropy(mixed, y) + 0.3 * F.cross_entropy(mixed, y[other])

    net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    assert answer(lambda: steps(net, noisy), "rows") == "no"


def test_as_many_features_as_rows_are_not_torn_apart() -> None:
    pattern = torch.randn(ROWS)

    def train() -> None:
        net = nn.Linear(ROWS, 3)
        optimizer = torch.optim.Adam(net.parameters())
        for step in range(1, 19):
            x = torch.randn(ROWS, ROWS)
            x = x + torch.rand(ROWS, 1) * pattern
            (F.cross_entropy(net(x), torch.randint(0, 3, (ROWS,))) / 3).backward()
            if step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()

    assert answer(train, "rows") == "unknown"


def penalised(reduce: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda scores, y: F.cross_entropy(scores, y) + 0.1 * reduce(scores.pow(2))


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (torch.sum, "yes"),
        (lambda one: one.sum(1).mean(), "no"),
        (lambda one: one.sum() / ROWS, "no"),
        (lambda one: one.sum() / len(one), "no"),
    ],
)
def test_a_sum_that_is_added_to_a_mean_is_found(reduce: Callable[..., torch.Tensor], expected: str) -> None:
    assert answer(lambda: steps(nn.Linear(6, 3), penalised(reduce)), "sums") == expected


@pytest.mark.parametrize(("scale", "expected"), [("after", "yes"), ("before", "unknown")])
def test_a_loss_that_is_printed_before_the_step_is_no_number_on_the_way_to_it(scale: str, expected: str) -> None:
    def train() -> None:
        net = nn.Linear(6, 3)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            scores = net(torch.randn(ROWS, 6))
            penalty = scores.pow(2).sum()
            factor = penalty.item() if scale == "before" else 1.0
            loss = F.cross_entropy(scores, torch.randint(0, 3, (ROWS,))) + 0.1 * factor * penalty
            optimizer.zero_grad()
            loss.backward()
            assert loss.item() != 0
            optimizer.step()

    assert answer(train, "sums") == expected


def test_a_penalty_of_weights_is_no_sum_over_the_batch() -> None:
    net = nn.Linear(6, 3)
    loss = lambda scores, y: F.cross_entropy(scores, y) + 0.1 * net.weight.pow(2).sum()  # noqa: E731
    assert answer(lambda: steps(net, loss), "sums") == "no"


def test_a_tensor_that_is_compared_with_itself_is_found() -> None:
    def same(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, y) + (scores - scores.detach()).pow(2).mean()

    def magic(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, y) * torch.exp(scores - scores.detach()).mean()

    assert answer(lambda: steps(nn.Linear(6, 3), same), "itself") == "yes"
    assert answer(lambda: steps(nn.Linear(6, 3), magic), "itself") == "no"


class Target:
    """A net that learns from a copy of itself."""

    def __init__(self, *, updates: bool, same_inputs: bool = False) -> None:
        self.updates, self.same_inputs = updates, same_inputs

    def __call__(self) -> None:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        target = copy.deepcopy(net)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for step in range(40):
            x, after = torch.randn(ROWS, 6), torch.randn(ROWS, 6)
            with torch.no_grad():
                y = torch.randn(ROWS, 1) + 0.9 * target(x if self.same_inputs else after)
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
            if self.updates and step % 10 == 9:
                target.load_state_dict(net.state_dict())


def test_a_target_that_is_never_updated_is_found_unless_it_is_a_reference() -> None:
    assert answer(Target(updates=False), "frozen copy") == "yes"
    assert answer(Target(updates=True), "frozen copy") == ""
    assert answer(Target(updates=False, same_inputs=True), "frozen copy") == "no"


class Counts(nn.Module):
    """Counts in its forward, in evaluation only if told so."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always, self.linear = always, nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training or self.always:
            self.mean.lerp_(x.detach().mean(0), 0.1)  # type: ignore[operator]
        return nn.functional.linear(x - self.get_buffer("mean"), self.linear.weight, self.linear.bias)


def evaluated(net: nn.Module, scale: float = 1.0, *, mode: bool = False) -> None:
    """Trains, and evaluates in between."""
    steps(net, F.cross_entropy)
    net.train(mode)
    with torch.no_grad():
        net(scale * torch.randn(ROWS, 6))
    net.train()
    steps(net, F.cross_entropy)


@pytest.mark.parametrize("always", [True, False])
def test_what_an_evaluation_writes_to_is_found(always: bool) -> None:
    assert answer(lambda: evaluated(Counts(always=always)), "written in evaluation") == ("yes" if always else "")


@pytest.mark.parametrize("mode", [False, True])
def test_inputs_of_another_scale_in_evaluation_are_found(mode: bool) -> None:
    assert answer(lambda: evaluated(nn.Linear(6, 3), 255.0, mode=mode), "evaluated inputs") == "yes"
    assert answer(lambda: evaluated(nn.Linear(6, 3), mode=mode), "evaluated inputs") == ""


@pytest.mark.parametrize("keeps_copy", [True, False])
def test_a_best_state_that_is_no_copy_is_found(keeps_copy: bool) -> None:
    def train() -> None:
        net = nn.Linear(6, 3)
        state = net.state_dict()
        best = copy.deepcopy(state) if keeps_copy else state
        steps(net, F.cross_entropy)
        net.load_state_dict(best)

    assert answer(train, "own state") == ("" if keeps_copy else "yes")


@pytest.mark.parametrize(("mode", "expected"), [("min", "yes"), ("max", "no")])
def test_a_plateau_against_its_mode_is_found(mode: Any, expected: str) -> None:
    def train() -> None:
        net = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode=mode, patience=0)
        for accuracy in (0.3, 0.5, 0.6, 0.7, 0.75, 0.8):
            net(torch.randn(ROWS, 6)).sum().backward()
            optimizer.step()
            scheduler.step(accuracy)

    assert answer(train, "plateau") == expected


class Ignores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x  # type: ignore[no-any-return]


class Follows(Ignores):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad.mul(x).mul(2)


@pytest.mark.parametrize(("function", "expected"), [(Ignores, "yes"), (Follows, "no")])
def test_a_backward_that_does_not_follow_is_found(function: Any, expected: str) -> None:
    def loss(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(function.apply(scores), y)

    assert answer(lambda: steps(nn.Linear(6, 3), loss), "function gradient") == expected


class Reverse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class Helper(Reverse):
    def backward(self, loss: torch.Tensor) -> None:  # type: ignore[override]
        loss.backward()


@pytest.mark.parametrize(("cls", "expected"), [(Reverse, "yes"), (Helper, "")])
def test_a_backward_of_a_module_is_found(cls: type[nn.Module], expected: str) -> None:
    net = nn.Sequential(nn.Linear(6, 3), cls())
    assert answer(lambda: steps(net, F.cross_entropy), "method backward") == expected


@pytest.mark.parametrize(("related", "expected"), [(True, "no"), (False, "yes")])
def test_labels_without_relation_are_found(related: bool, expected: str) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.Adam(net.parameters())
        data = torch.randn(500, 6)
        labels = data[:, :3].argmax(1)
        labels = labels if related else labels[torch.randperm(500)]
        for _ in range(12):
            chosen = torch.randint(0, 500, (120,))
            x, y = data[chosen], labels[chosen]
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert answer(train, "labels") == expected


@pytest.mark.parametrize("reads", [True, False])
def test_a_policy_that_draws_its_actions_is_asked_of_no_other_rows(reads: bool) -> None:
    """In the rows of others the actions of a good policy are as likely; and its loss may fall whatever it learns."""
    net, right = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 3)), torch.randint(3, (12,))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(150):
            state = torch.randint(12, (64,))
            likely = net(state).log_softmax(1)
            action = torch.multinomial(likely.exp(), 1)
            reward = (action.squeeze(1) == right[state]).float()
            loss = -((likely.gather(1, action).squeeze(1) if reads else likely.sum(1)) * reward).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    torch.manual_seed(0)
    with Doctor() as doctor:
        train()
    probed = run_probes(doctor)
    assert [one.answer for one in probed if one.probe == "related"] == ["unknown"]
    run = Run([*doctor.run.facts, *probed])
    assert outcome(run).word == "undecided"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def taught(net: nn.Module, target: Callable[[torch.Tensor], torch.Tensor], loss: Callable[..., torch.Tensor]) -> None:
    """Trains a net on what is made of its inputs."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    for _ in range(60):
        x = torch.randn(64, 6)
        optimizer.zero_grad()
        loss(net(x), target(x)).backward()
        optimizer.step()


def own_distance(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (made - wanted).abs().mean()


@pytest.mark.parametrize("loss", [F.mse_loss, own_distance])
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (lambda x: x[:, :1] - x[:, 1:2], "yes"),
        (lambda x: (x[:, :1] - x[:, 1:2]).roll(1, 0), "no"),
        (lambda x: torch.zeros(64, 1), "unknown"),  # no target: nothing of it follows the rows
        (lambda x: torch.zeros_like(x[:, :1]), "no"),
    ],
    ids=["learned", "of another row", "without", "all alike"],
)
def test_a_loss_that_is_the_same_with_the_targets_of_other_rows(
    target: Callable[[torch.Tensor], torch.Tensor], expected: str, loss: Callable[..., torch.Tensor]
) -> None:
    assert answer(lambda: taught(nn.Linear(6, 1), target, loss), "related") == expected


def test_tokens_that_are_ahead_of_their_inputs_are_exchanged_too() -> None:
    net = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)

    def train() -> None:
        for _ in range(60):
            ids = (torch.randint(8, (16, 1)) + torch.arange(10)) % 8
            optimizer.zero_grad()
            F.cross_entropy(net(ids[:, :-1]).reshape(-1, 8), ids[:, 1:].reshape(-1)).backward()
            optimizer.step()

    assert answer(train, "related") == "yes"


class Watching(nn.Module):
    """Says in which of its calls a step is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.written: list[int] = []
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.overrides._get_current_function_mode_stack()
        if any(type(mode).__name__ == "Tape" for mode in modes):
            self.written.append(self.calls)
        self.calls += 1
        made: torch.Tensor = self.layer(x)
        return made


def test_two_steps_of_an_optimizer_are_written_down_and_no_more() -> None:
    net = Watching()
    with Doctor() as doctor:
        steps(net, F.cross_entropy, count=40)
    assert net.written == [0, 1]
    assert list(doctor.kept.tapes) == [0]


def test_a_step_of_each_optimizer_is_written_down() -> None:
    one, two = Watching(), Watching()
    first, second = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (one, two))
    with Doctor() as doctor:
        for step in range(40):
            for optimizer in (first, second) if step >= 5 else (first,):  # the second one begins later
                optimizer.zero_grad()
                (one(torch.randn(ROWS, 6)) + two(torch.randn(ROWS, 6))).pow(2).mean().backward()
                optimizer.step()
    assert sorted(doctor.kept.tapes) == [0, 1]
    assert len(one.written) < 10


def test_a_term_of_another_row_is_told_beside_one_that_is_learned() -> None:
    def both(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(made[:, :1], wanted) + F.l1_loss(made[:, 1:], wanted.roll(1, 0))

    def beside_ones(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(made[:, :1], wanted) + F.l1_loss(made[:, 1:], torch.ones_like(wanted))

    for loss, apart in ((both, ["l1_loss"]), (beside_ones, [])):
        (one,) = asked(lambda: taught(nn.Linear(6, 2), lambda x: x[:, :1] - x[:, 1:2], loss), "related")  # noqa: B023
        assert (one.answer, [term["op"] for term in one.evidence["apart"]]) == ("yes", apart)


@pytest.mark.parametrize(("alike", "expected"), [(False, "yes"), (True, "no")])
def test_without_targets_the_rows_of_one_input_stand_beside_those_of_another(alike: bool, expected: str) -> None:
    table = nn.Embedding(10, 4)
    nn.init.constant_(table.weight, 0.5) if alike else nn.init.normal_(table.weight)

    def train() -> None:
        optimizer = torch.optim.SGD(table.parameters(), lr=0.0 if alike else 0.5)
        for _ in range(60):
            one = torch.randint(10, (64,))
            two = (one + 5) % 10
            optimizer.zero_grad()
            (table(one) - table(two)).pow(2).sum(1).mean().backward()
            optimizer.step()

    assert answer(train, "related inputs") == expected


class Views(nn.Module):
    """Makes something of two views, with a net and what predicts one from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.ahead = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), nn.Linear(4, 4)

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives the prediction, and what it is of."""
        return self.ahead(self.net(one)), self.net(two)


def seen_twice(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    net = Views()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(150):
        x = torch.randn(32, 6)
        optimizer.zero_grad()
        loss(*net(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))).backward()
        optimizer.step()


def cosine(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return -F.cosine_similarity(made, wanted, dim=1).mean()


def spread(made: torch.Tensor) -> torch.Tensor:
    return (1 - made.std(0)).relu().mean()


def crossed(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The loss of Barlow's twins."""
    one, two = ((side - side.mean(0)) / side.std(0) for side in (made, wanted))
    return (one.T @ two / len(one) - torch.eye(one.shape[1])).pow(2).sum()


@pytest.mark.parametrize(("loss", "collapsed"), [
    (cosine, True),
    (lambda made, wanted: cosine(made, wanted.detach()), False),
    (lambda made, wanted: F.mse_loss(made, wanted) + spread(made) + spread(wanted), False),
    (F.mse_loss, True),
    (lambda made, wanted: (F.normalize(made, dim=1) - F.normalize(wanted, dim=1)).pow(2).sum(1).mean(), True),
    (lambda made, wanted: F.cross_entropy(5 * made @ wanted.T, torch.arange(len(made))), False),
    (crossed, False),
    (lambda made, wanted: F.mse_loss(made, wanted) + (2 - torch.cdist(wanted, wanted)).relu().mean(), False),
], ids=["cosine", "a target", "spread", "squares", "units", "negatives", "decorrelated", "a margin"])  # fmt: skip
def test_rows_that_become_alike_are_told(loss: Callable[[Any, Any], torch.Tensor], collapsed: bool) -> None:
    found = asked(lambda: seen_twice(loss), "related inputs")
    assert any(one.answer == "no" and one.evidence.get("collapsed") for one in found) == collapsed


def test_scores_of_what_is_preferred_are_no_rows_that_became_alike() -> None:
    net = nn.Linear(6, 1)
    nn.init.constant_(net.bias, 9.0)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters(), 0.02)
        for _ in range(60):
            better, worse = torch.randn(32, 6) + 0.2, torch.randn(32, 6) - 0.2
            optimizer.zero_grad()
            (-F.logsigmoid(net(better) - net(worse))).mean().backward()
            optimizer.step()

    assert not any(one.evidence.get("collapsed") for one in asked(train, "related inputs"))


def test_rows_that_a_margin_drives_apart_may_point_the_same_way() -> None:
    net = nn.Linear(6, 4)
    nn.init.constant_(net.bias, 30.0)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters(), 0.02)
        for _ in range(60):
            one, other = torch.randn(32, 6), torch.randn(32, 6)
            near, far = ((net(one) - net(x)).pow(2).sum(1) for x in (one + 0.1 * torch.randn(32, 6), other))
            optimizer.zero_grad()
            (near - far + 1).relu().mean().backward()
            optimizer.step()

    assert not any(one.evidence.get("collapsed") for one in asked(train, "related inputs"))


@pytest.mark.parametrize(("factor", "expected"), [(0.0, "yes"), (1.0, "")])
def test_a_net_that_is_given_one_number_only_is_told(factor: float, expected: str) -> None:
    net = nn.Linear(6, 3)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(12):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(ROWS, 6) * factor), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "inputs alike") == expected


@pytest.mark.parametrize(("copied", "expected"), [(False, "yes"), (True, "")])
def test_states_of_one_array_are_told_though_the_net_was_mostly_asked_for_one_action(
    copied: bool, expected: str
) -> None:
    net, array = nn.Linear(6, 3), torch.randn(6)

    def train() -> None:
        optimizer, stored = torch.optim.Adam(net.parameters()), list[torch.Tensor]()
        for _ in range(80):
            array.copy_(torch.randn(6))
            stored.append(array.clone() if copied else array)
            with torch.no_grad():
                net(array)
            if len(stored) > 60:
                optimizer.zero_grad()
                net(torch.stack(stored[-ROWS:])).pow(2).mean().backward()
                optimizer.step()

    assert answer(train, "inputs alike") == expected


def test_no_graph_of_a_step_is_kept_by_what_else_a_loss_was_given() -> None:
    """A variance that a net gives is an argument of its loss, beside the target."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(6, 2), torch.randn(16, 6), torch.randn(16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Doctor() as doctor:
        for _ in range(12):
            mean, spread = net(x).unbind(1)
            optimizer.zero_grad()
            F.gaussian_nll_loss(mean, y, spread.exp()).backward()
            optimizer.step()
        kept = [one for batches in doctor.kept.batches.values() for _, _, given in batches for one in given.values()]
        tensors = [one for one in kept if isinstance(one, torch.Tensor)]
        assert len(tensors) >= 4  # targets and variances
        assert not any(one.requires_grad for one in tensors)
