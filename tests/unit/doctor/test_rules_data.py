"""Rules of the family data fire on their fault and are quiet on what only looks like it."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anybatch.doctor.diagnosing import diagnose
from anybatch.doctor.recorder import Doctor
from anybatch.doctor.samples.inputs import look
from anybatch.records.events import Epoch, Forward
from anybatch.records.lines import Fact
from number_runs import Training, call, fires, found, quiet, sample, silent

PIXELS = sample(shape=(32, 3, 8, 8), mean=121.0, std=70.0, low=0.0, high=255.0, first="Conv2d")


def flat(step: int) -> float:
    """A loss that does not fall."""
    return 2.3 + 0.01 * (step % 3)


def test_input_scale_fires_on_pixels_that_are_not_scaled() -> None:
    one = fires(Training(loss=flat, input=PIXELS).run(), "INPUT_SCALE", "warning")
    assert one.fix == "x = x / 255"
    table = sample(mean=3.0, std=140.0)
    assert "(x - 3) / 140" in fires(Training(loss=flat, input=table).run(), "INPUT_SCALE", "warning").fix


def test_input_scale_fires_with_a_scale_for_each_column_where_columns_differ_in_size() -> None:
    table = sample(mean=15000.0, std=29000.0, small_columns=0.6)
    one = fires(Training(loss=flat, input=table).run(), "INPUT_SCALE", "warning")
    assert one.fix.startswith("x = (x - x.mean(0)) / x.std(0)")
    assert "60% of its columns" in one.message
    alike = fires(Training(loss=flat, input=replace(table, small_columns=0.1)).run(), "INPUT_SCALE", "warning")
    assert "x.mean(0)" not in alike.fix


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (torch.randn(64, 5) * torch.tensor([18.0, 26000, 8000, 12, 0]), 0.5),
        (40 + 300 * torch.randn(64, 5), 0.0),
        (torch.randn(64, 5) * torch.tensor([1.0, 1, 1, 1, 3]), 0.0),  # small numbers, which are not told
    ],
)
def test_columns_that_are_small_beside_the_others_are_counted(table: torch.Tensor, expected: float) -> None:
    (one,) = look(0, (table,), {})
    assert one.small_columns == expected


def test_input_scale_fires_on_targets_that_are_not_scaled() -> None:
    targets = call("mse_loss", target_mean=20000.0, target_std=3000.0, low=-0.3, high=0.4)
    one = fires(Training(loss=lambda step: 4e8 - step, call=targets).run(), "INPUT_SCALE", "warning")
    assert "(y - 2e+04) / 3e+03" in one.fix


NEARLY_ONE = {"shape": (32, 1, 8, 8), "mean": -0.81, "std": 0.004}


def test_input_scale_fires_on_pictures_that_are_nearly_one_number() -> None:
    one = fires(Training(loss=flat, input=sample(low=-0.811, high=-0.8, **NEARLY_ONE)).run(), "INPUT_SCALE", "warning")
    assert "everywhere near -0.81" in one.message
    assert "(x - -0.81) / 0.004" in one.fix


def scaled_by(epochs: dict[int, float]) -> None:
    """Trains for some epochs on the same data, of this size in each."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for size in epochs.values():
        for _ in range(8):
            loss = (net(size * torch.randn(16, 6)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize(("factor", "fires_"), [(0.1, True), (0.8, False)])
def test_input_scale_fires_on_inputs_that_are_scaled_again_in_each_epoch(factor: float, fires_: bool) -> None:
    torch.manual_seed(0)
    with Doctor(every=2) as doctor:
        scaled_by({epoch: factor**epoch for epoch in range(6)})
    said = [one for one in diagnose(doctor.run) if one.name == "INPUT_SCALE"]
    assert bool(said) == fires_
    if said:
        assert "in place" in said[0].cause


@pytest.mark.parametrize(
    "healthy",
    {
        "learns": Training(input=PIXELS),
        "a norm layer first": Training(loss=flat, input=replace(PIXELS, first="BatchNorm2d")),
        "token ids": Training(loss=flat, input=sample(dtype="int64", mean=None, std=None, high=30000.0)),
        "nearly one number, and learns": Training(input=sample(low=-0.811, high=-0.8, **NEARLY_ONE)),
        "few pixels that are not": Training(loss=flat, input=sample(low=-0.81, high=2.0, **NEARLY_ONE)),
        "ones": Training(loss=flat, input=sample(shape=(32, 4, 6), mean=1.0, std=0.0, low=1.0, high=1.0)),
        "one-hot": Training(loss=flat, input=sample(mean=0.1, std=0.3)),
        "times of diffusion": Training(loss=flat, input=sample(shape=(32,), mean=500.0, std=290.0)),
        "predictions of that size": Training(
            loss=flat, call=call("mse_loss", target_mean=50.0, target_std=9.0, low=20.0, high=80.0)
        ),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_input_scale_is_quiet(healthy: tuple[str, Training]) -> None:
    quiet(healthy[1].run(), "INPUT_SCALE")


class Scaling(nn.Module):
    """A first layer without weights."""

    def __init__(self, squashes: bool) -> None:
        super().__init__()
        self.squashes = squashes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() if self.squashes else (x - x.mean(0)) / x.std(0)


@pytest.mark.parametrize("squashes", [True, False])
def test_input_scale_is_quiet_where_a_first_layer_of_its_own_standardises(squashes: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Scaling(squashes), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with Doctor(every=1) as doctor:
        for _ in range(16):
            optimizer.zero_grad()
            (net(40 * torch.randn(32, 6)) - torch.randn(32, 1)).square().mean().backward()
            optimizer.step()
    assert squashes == any(one.name == "INPUT_SCALE" for one in diagnose(doctor.run))


def sorted_by_class(step: int) -> list[Fact]:
    """Batches of class 0, then of class 1, and so on."""
    return [call(target_classes=1, target_mean=float(step // 8))]


def test_data_order_fires_on_sorted_classes() -> None:
    one = fires(Training(call=None, every=sorted_by_class).run(), "DATA_ORDER", "warning")
    assert "randperm" in one.fix
    loader = Epoch(loader=0, batches=80, line=5)
    run = Training(call=None, every=sorted_by_class, before=(loader,)).run()
    assert fires(run, "DATA_ORDER", "warning").fix == "DataLoader(..., shuffle=True)"


def marks(low: Callable[[int], int], high: Callable[[int], int], *, times: int = 1) -> Training:
    """Batches of marks of 0 and 1 from a lowest to a highest."""
    return Training(
        call=None,
        every=lambda step: [
            call(
                function="binary_cross_entropy_with_logits", classes=0, items=32, input_shape=(32,), target_shape=(32,),
                target_low=low(step), target_high=high(step), target_mean=(low(step) + high(step)) / 2,
            )
        ] * times,
    )  # fmt: skip


def test_data_order_fires_on_marks_that_are_all_0_and_then_all_1() -> None:
    late = lambda step: int(step >= 12)  # noqa: E731
    one = fires(marks(late, late).run(), "DATA_ORDER", "warning")
    assert "of 2" in one.message


def test_data_order_fires_on_marks_in_the_order_in_which_a_loader_gives_them() -> None:
    """Of which only some steps are looked at, in several epochs."""
    late, start = (lambda step: int(step % 20 >= 10)), Epoch(loader=0, batches=20)
    looked = (0, 1, 5, 9, 25, 31, 38, 47)
    sorted_marks = marks(late, late)
    every = sorted_marks.every
    sorted_marks.every = lambda step: [
        *([start] if step % 20 == 0 else []), *(every(step) if step in looked else [])
    ]  # fmt: skip
    assert "does not shuffle" in fires(sorted_marks.run(), "DATA_ORDER", "warning").message


def test_data_order_looks_at_classes_where_a_loss_beside_has_marks() -> None:
    beside = call(
        function="binary_cross_entropy_with_logits", classes=0, items=32, input_shape=(32,), target_shape=(32,),
        target_low=0, target_high=1, target_mean=0.5, line=31,
    )  # fmt: skip
    fires(Training(call=None, every=lambda step: [*sorted_by_class(step), beside]).run(), "DATA_ORDER", "warning")


def by_chance(step: int) -> int:
    return Random(step).getrandbits(1)


SHUFFLED = Epoch(loader=0, batches=60, shuffled=True)


@pytest.mark.parametrize(
    "healthy",
    [marks(lambda step: 0, lambda step: 1), marks(lambda step: 0, lambda step: 0),
     marks(lambda step: step % 2, lambda step: step % 2, times=2), marks(lambda step: step % 2, lambda step: step % 2),
     marks(by_chance, by_chance),
     replace(marks(lambda step: int(step >= 12), lambda step: int(step >= 12)), before=(SHUFFLED,))],
    ids=["mixed", "one only", "pairs that belong together and others", "one and the other", "recordings", "shuffled"],
)  # fmt: skip
def test_data_order_is_quiet_about_marks_that_are_mixed_or_meant(healthy: Training) -> None:
    silent(healthy.run(), "DATA_ORDER")


def borders(apart: float = 0.49, classes: int = 3) -> Training:
    """Every third batch has a part of one class and a part of another."""
    return Training(
        call=None,
        every=lambda step: [
            call(target_classes=2, target_mean=step // 8 + 0.4, target_std=apart)
            if step % 3 == 2
            else call(target_classes=1, target_mean=float(step // 8 % classes), target_std=0.0)
        ],
    )


def test_data_order_fires_where_a_third_of_the_batches_are_between_two_classes() -> None:
    one = fires(borders().run(), "DATA_ORDER", "warning")
    assert one.evidence["of_one_class"] < 0.8 * one.evidence["batches"]


def test_a_learning_rate_that_looks_too_high_on_sorted_data_follows_from_their_order() -> None:
    """Each new class throws the loss up, and a constant answer is the best one for a batch."""
    training = replace(
        borders(),
        loss=lambda step: 2.3 if step == 0 else 6.0 if step % 3 == 2 else 3.5,
        ratio=lambda step, layer: 0.15 if step < 5 else 0.01,
        spread=lambda step: 1.0 if step < 5 else 1e-9,
    )
    order = {one.name: one.consequence_of for one in diagnose(training.run())}
    assert order["DATA_ORDER"] == ""
    assert order["LR_TOO_HIGH"] == "DATA_ORDER"


@pytest.mark.parametrize(
    "healthy",
    {
        "two classes far apart in some": borders(apart=1.5),
        "one class nearly always": borders(classes=2),
        "contrast": Training(call=call(target_classes=1, target_mean=0.0)),
        "an adversary": Training(call=call(target_classes=1, target_mean=0.0),
                                 every=lambda step: [call(target_classes=1, target_mean=1.0, line=31)]),
        "mixed": Training(call=call(target_classes=7)),
        "batches of one": Training(call=call(target_classes=1, items=1)),
        "short": Training(steps=3, call=None, every=sorted_by_class),
    }.items(),
    ids=lambda entry: entry[0],
)  # fmt: skip
def test_data_order_is_quiet(healthy: tuple[str, Training]) -> None:
    silent(healthy[1].run(), "DATA_ORDER")


def test_data_repeated_fires_where_the_loader_starts_anew() -> None:
    start = Epoch(loader=0, batches=20, file="train.py", line=14)
    one = fires(Training(every=lambda step: [start]).run(), "DATA_REPEATED", "warning")
    assert one.place.line == 14


def test_data_repeated_fires_on_copies_within_an_epoch() -> None:
    start = Epoch(loader=0, batches=60, workers=2)
    run = Training(input=None, before=(start,), every=lambda step: [sample(hash=str(step // 2))]).run()
    assert "worker_init_fn" in fires(run, "DATA_REPEATED", "warning").fix


def test_data_repeated_fires_on_weights_of_classes() -> None:
    one = fires(Training(before=(Epoch(loader=0, rows=3000, weights=3),)).run(), "DATA_REPEATED", "warning")
    assert "3 weights for 3000 samples" in one.message


@pytest.mark.parametrize(
    "healthy",
    {
        "all data at once": Training(),
        "a weight for each sample": Training(before=(Epoch(loader=0, rows=3000, weights=3000),)),
        "weights for most of them": Training(before=(Epoch(loader=0, rows=3000, weights=2400),)),
        "no weights": Training(before=(Epoch(loader=0, rows=3000),)),
        "rows that are not counted": Training(before=(Epoch(loader=0, weights=3),)),
        "one batch on purpose": Training(before=(Epoch(loader=0, batches=20),)),
        "a loader of one batch": Training(every=lambda step: [Epoch(loader=0, batches=1)]),
        "epochs": Training(input=None, every=lambda step: [
            *([Epoch(loader=0, batches=5)] if step % 5 == 0 else []), sample(hash=str(step % 5))]),
    }.items(),
    ids=lambda entry: entry[0],
)  # fmt: skip
def test_data_repeated_is_quiet(healthy: tuple[str, Training]) -> None:
    assert found(healthy[1].run(), "DATA_REPEATED") == []


TRAIN, HELD_OUT = Epoch(loader=0, batches=20, file="train.py", line=14), Epoch(loader=1, batches=4, line=30)
OTHER = sample(hash="b")


def evaluating(step: int) -> list[Fact]:
    """What comes before the forward of a step that is trained on: an evaluation of other data."""
    return [HELD_OUT, Forward(root=0, rows=32), OTHER, replace(HELD_OUT, ended=True)]


def test_data_repeated_fires_though_other_data_are_evaluated_in_between() -> None:
    run = Training(input=None, every=lambda step: [*evaluating(step), TRAIN, Forward(root=0), sample()]).run()
    assert fires(run, "DATA_REPEATED", "warning").place.line == 14


def test_data_repeated_fires_on_a_batch_that_was_drawn_before_the_loop_and_others_are_evaluated() -> None:
    often = lambda step: [*([*evaluating(step), Forward(root=0)] if step % 5 == 4 else []), sample()]  # noqa: E731
    run = Training(input=None, before=(TRAIN,), every=often).run()
    assert "before the loop" in fires(run, "DATA_REPEATED", "warning").message
    silent(Training(input=None, steps=12, before=(TRAIN,), every=often).run(), "DATA_REPEATED")


@pytest.mark.parametrize(
    "healthy",
    {
        "all data at once, and a batch of others is evaluated": Training(
            input=None, every=lambda step: [HELD_OUT, Forward(root=0), OTHER, Forward(root=0), sample()]
        ),
        "all data at once, and all others are": Training(
            input=None, every=lambda step: [*evaluating(step), Forward(root=0), sample()]
        ),
        "each batch twice": Training(input=None, every=lambda step: [
            *([replace(TRAIN, batches=5)] if step % 10 == 0 else []), sample(hash=str(step // 2))]),
    }.items(),
    ids=lambda entry: entry[0],
)  # fmt: skip
def test_data_repeated_counts_what_is_trained_on_alone(healthy: tuple[str, Training]) -> None:
    assert found(healthy[1].run(), "DATA_REPEATED") == []


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_batch_that_is_trained_on_is_looked_at_behind_an_evaluation(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16)
    with Doctor() as doctor:
        for _ in range(20):
            model.train(mode == "train")
            for _ in range(1 if mode == "train" else 5):
                model(torch.randn(16, 8))
            model.train()
            inputs, targets = next(iter(loader))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert [one.name for one in doctor.findings if one.severity == "warning"] == ["DATA_REPEATED"]


class Detector(nn.Module):
    """Is given pictures, and for each its boxes in pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3, stride=2), nn.Linear(8, 4)

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        out = self.head(self.body(torch.stack(images)).amax((2, 3)))
        return torch.stack([(out[i] - one["boxes"]).abs().mean() for i, one in enumerate(targets)]).mean()


@pytest.mark.parametrize("size", [1.0, 200.0])
def test_input_scale_is_quiet_on_targets_that_a_detector_is_given(size: float) -> None:
    torch.manual_seed(0)
    net = Detector()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    with Doctor(every=1) as doctor:
        for _ in range(16):
            optimizer.zero_grad()
            boxes = [{"boxes": 40 * torch.rand(2 + i, 4)} for i in range(4)]
            net([size * torch.rand(3, 16, 16) for _ in boxes], boxes).backward()
            optimizer.step()
    found = [one.message for one in diagnose(doctor.run) if one.name == "INPUT_SCALE"]
    assert not any("boxes" in one for one in found)
    assert bool(found) == (size > 1)
