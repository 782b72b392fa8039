"""Evaluations of other labels, of rows with a scale of their own, and of averages: told where it is so, quiet else."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from anybatch.doctor.recorder import Doctor
from anybatch.records.lossfacts import Evaluated
from test_doctor_ask import answer, asked, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Change = Callable[[torch.Tensor], torch.Tensor]


def same(one: torch.Tensor) -> torch.Tensor:
    return one


def scaled(table: torch.Tensor) -> torch.Tensor:
    return (table - table.mean(0)) / table.std(0, correction=0)


def tables(rows: Callable[[torch.Tensor], torch.Tensor], batch: Change = same, size: int = 10) -> Callable[[], None]:
    """A training on a scaled table, and an evaluation on what ``rows`` makes of it."""

    def train() -> None:
        x = scaled(torch.randn(60, 4))
        net = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(3):
            for part in x.split(size):
                optimizer.zero_grad()
                F.mse_loss(net(batch(part)), part[:, :1]).backward()
                optimizer.step()
        net.eval()
        with torch.no_grad():
            net(rows(x))

    return train


def apart(x: torch.Tensor) -> torch.Tensor:
    return scaled(torch.rand(40, 4) * 3)


@pytest.mark.parametrize("correction", [0, 1])
def test_test_rows_with_a_scale_of_their_own_are_told(correction: int) -> None:
    def rows(_: torch.Tensor) -> torch.Tensor:
        table = torch.rand(40, 4) * 3 + 1
        return (table - table.mean(0)) / table.std(0, correction=correction)

    assert answer(tables(rows), "scaled apart") == "yes"
    assert answer(tables(apart, size=60), "scaled apart") == "yes"  # all training rows in one batch


@pytest.mark.parametrize(
    ("rows", "batch", "size"),
    [
        (same, same, 10),  # the training rows
        (same, lambda one: one + 0.05 * torch.randn_like(one), 10),  # which were given with noise
        (lambda x: torch.randn(40, 4), same, 10),  # the scale of the training
        (lambda x: scaled(torch.cat([torch.randn(20, 4), x])), same, 10),  # all rows, as in a transductive task
        (apart, scaled, 20),  # each batch is scaled
        (lambda x: apart(x)[:10], same, 10),  # few
    ],
)
def test_other_rows_of_an_evaluation_are_not(rows: Change, batch: Change, size: int) -> None:
    assert answer(tables(rows, batch, size), "scaled apart") != "yes"


def classes(names: Change, rows: int = 120, *, learns: bool = True) -> Evaluated:
    """The evaluation of a net that tells three classes apart."""
    torch.manual_seed(0)
    net, centres = nn.Linear(3, 3), torch.eye(3) * 4
    with Doctor() as doctor:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(30):
            y = torch.randint(0, 3, (24,))
            optimizer.zero_grad()
            F.cross_entropy(net(centres[y if learns else y[torch.randperm(24)]]), y).backward()
            optimizer.step()
        net.eval()
        y = torch.arange(rows) % 3
        with torch.no_grad():
            for part in y.split(rows // 2):
                F.cross_entropy(net(centres[part]), names(part))
        net.train()
        F.cross_entropy(net(centres), torch.arange(3)).backward()
    assert doctor.failure == ""
    return next(doctor.run.of(Evaluated))


def test_an_evaluation_knows_how_many_rows_are_right_and_under_other_names() -> None:
    right, moved = classes(same), classes(lambda y: (y + 1) % 3)
    assert (right.rows, right.right, right.renamed, right.names) == (120, 1.0, 1.0, ())
    assert (moved.right, moved.renamed, moved.names) == (0.0, 1.0, ((0, 2), (1, 0), (2, 1)))
    assert classes(lambda y: torch.where(y == 0, -100, y)).rows == 80
    assert classes(lambda y: y % 2).renamed < 0.9  # two classes have one label
    assert classes(same, learns=False).renamed < 0.8


class Late:
    """A net and its average, which is first called when both have moved."""

    def __init__(self, *, buffers: bool) -> None:
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.average = copy.deepcopy(self.net)
        self.buffers = buffers

    def train(self) -> None:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for step in range(60):
            x = torch.randn(16, 4) + 2
            optimizer.zero_grad()
            F.cross_entropy(self.net(x), (x[:, 0] > 2).long()).backward()
            optimizer.step()
            values = (
                one.state_dict().values() if self.buffers else one.parameters() for one in (self.average, self.net)
            )
            with torch.no_grad():
                for mine, its in zip(*values, strict=True):
                    mine.lerp_(its, 0.1) if mine.is_floating_point() else mine.copy_(its)
                if step % 20 == 17:  # no step that is measured
                    self.average.eval()(torch.randn(16, 4) + 2)


def test_an_average_that_is_first_called_late_needs_buffers_too() -> None:
    assert answer(Late(buffers=False).train, "copied buffers") == "yes"
    assert answer(Late(buffers=True).train, "copied buffers") == ""


@pytest.mark.parametrize("derived", [False, True])
def test_targets_are_alike_where_what_is_compared_is_no_derivative(derived: bool) -> None:
    """An equation asks that a residual be zero everywhere; of outputs themselves nobody does."""

    def train() -> None:
        net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.rand(16, 1, requires_grad=True)
            made = net(x)
            if derived:
                (made,) = torch.autograd.grad(made.sum(), x, create_graph=True)
            optimizer.zero_grad()
            F.mse_loss(made, torch.zeros_like(made)).backward()
            optimizer.step()

    assert asked(train, "related")[-1].evidence["alike"] is not derived


@pytest.mark.parametrize(("related", "expected"), [(True, "no"), (False, "yes")])
def test_labels_of_pictures_whose_edge_is_nearly_empty_are_asked_for(related: bool, expected: str) -> None:
    """Entries that hardly a sample has go with one class or another by chance."""
    pictures, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pictures / 16).float(), torch.tensor(digits)

    def train() -> None:
        net = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
        optimizer = torch.optim.Adam(net.parameters())
        given = y if related else y[torch.randperm(len(y))]
        for pick in torch.randperm(len(y)).split(100):
            optimizer.zero_grad()
            F.cross_entropy(net(x[pick]), given[pick]).backward()
            optimizer.step()

    assert answer(train, "labels") == expected


@pytest.mark.parametrize(("mode", "loaded", "expected"), [(False, False, "yes"), (False, True, ""), (True, False, "")])
def test_a_net_that_trains_by_the_statistics_of_a_new_one_is_told(mode: bool, loaded: bool, expected: str) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).train(mode)
        if loaded:
            norm = net[1]
            assert isinstance(norm, nn.BatchNorm1d)
            norm.running_mean = torch.randn(8)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(16, 6)), torch.randint(0, 3, (16,))).backward()
            optimizer.step()

    assert answer(train, "statistics never made") == expected


@pytest.mark.parametrize("mode", [False, True])
def test_one_picture_of_another_scale_in_evaluation_is_found(mode: bool) -> None:
    """A picture may be far darker than the others are on average."""

    def predicts(scale: float) -> str:
        def train() -> None:
            net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
            optimizer = torch.optim.Adam(net.parameters())
            with torch.no_grad():
                net(torch.zeros(1, 1, 8, 8))  # by which a shape is found
            for _ in range(2):
                for _ in range(4):
                    optimizer.zero_grad()
                    F.cross_entropy(net(torch.rand(16, 1, 8, 8)), torch.randint(0, 3, (16,))).backward()
                    optimizer.step()
                net.train(mode)
                with torch.no_grad():
                    net(scale * torch.rand(1, 1, 8, 8))
                net.train()

        return answer(train, "evaluated inputs")

    assert [predicts(scale) for scale in (255.0, 1 / 255, 1.0, 0.1)] == ["yes", "yes", "", ""]


@pytest.mark.parametrize(("scale", "expected"), [(0.02, "yes"), (0.2, ""), (1.5, "")])
def test_several_single_pictures_are_compared_with_single_ones(scale: float, expected: str) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(8):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.rand(16, 1, 8, 8)), torch.randint(0, 3, (16,))).backward()
            optimizer.step()
        with torch.no_grad():
            for _ in range(6):
                net(scale * torch.rand(1, 1, 8, 8))

    assert answer(train, "evaluated inputs") == expected


@pytest.mark.parametrize(("scale", "expected"), [(5.0, "yes"), (1.0, "")])
def test_what_is_fine_tuned_in_evaluation_mode_is_no_evaluation(scale: float, expected: str) -> None:
    """Its batches are those of a training, and hide what the evaluation is given."""

    def train() -> None:
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        for parameters in (net.parameters(), net[3].parameters()):
            optimizer = torch.optim.Adam(parameters)
            for _ in range(8):
                optimizer.zero_grad()
                F.cross_entropy(net(torch.randn(24, 6)), torch.randint(0, 3, (24,))).backward()
                optimizer.step()
            net.eval()
        with torch.no_grad():
            net(scale * torch.randn(24, 6))

    assert answer(train, "evaluated inputs") == expected
