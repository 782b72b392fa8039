"""Rules of the family accumulation: each fires on a run that has the fault, and is quiet where it is done right."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.doctor.diagnosing import diagnose
from anybatch.doctor.recorder import Doctor
from rule_runs import LINES, RunBuilder, findings, simple

NAMES = (
    "ZERO_GRAD_PER_MICROBATCH", "ACCUM_FIRST_WINDOW", "ACCUM_TAIL_DROPPED", "ACCUM_TAIL_LEAKS", "ACCUM_NOT_DIVIDED",
    "ACCUM_UNEQUAL_WEIGHT",
)  # fmt: skip


def windows(
    counts: Sequence[int], *, factor: float = 0.25, clear_each: bool = False, top: str = "NllLossBackward0",
    ends: Sequence[int] = (), clear_at_end: bool = False, lines: Sequence[int] = (), cls: str = "SGD",
    edited: int = 0, spread: float = 0.3,
    touched: Sequence[Sequence[int]] = (), items: Sequence[int] = (), rows: int = 8,
    reduction: str = "mean", loader: bool = True,
) -> RunBuilder:  # fmt: skip
    """Steps of so many backwards; ``ends`` are numbers of micro-batches after which an epoch ends."""
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers, cls=cls, variable="opt")
    micro = 0
    if loader:
        built.epoch()
    for count in counts:
        if not clear_each:
            built.clear()
        for index in range(abs(count)):
            if clear_each:
                built.clear()
            built.forward(rows=rows)
            many = items[index % len(items)] if items else 8
            value = 2.0 + spread * index
            call = built.loss(value=value, items=many, reduction=reduction)
            built.backward(
                touched[index % len(touched)] if touched else numbers, factor=factor, value=value * factor, top=top,
                loss_calls=(call,), line=lines[index % len(lines)] if lines else LINES["backward"],
            )  # fmt: skip
            micro += 1
            if micro in ends:
                built.epoch(ended=True)
                if clear_at_end:
                    built.clear()
                built.epoch()
        if count > 0:
            built.step(edited=edited)
    return built


def found(built: RunBuilder) -> set[str]:
    return {name for name in NAMES for one in findings(built, name) if one.severity != "info"}


def test_zero_grad_per_microbatch_fires_on_zbzbzb_s() -> None:
    built = windows([4] * 4, clear_each=True)
    (one,) = findings(built, "ZERO_GRAD_PER_MICROBATCH")
    assert (one.severity, one.place.line) == ("error", LINES["clear"])
    assert "1 of 4 micro-batches" in one.message
    assert found(built) == {"ZERO_GRAD_PER_MICROBATCH"}


def test_zero_grad_per_microbatch_is_quiet_on_two_lines_and_on_gradients_set_by_hand() -> None:
    perturbed = windows([2] * 6, clear_each=True, lines=(41, 42))
    by_hand = windows([2] * 6, clear_each=True, edited=4)
    uneven = windows([1, 3, 1, 2, 1, 4], clear_each=True)
    one_batch = windows([2] * 6, clear_each=True, spread=0.005)
    for built in (perturbed, by_hand, uneven, one_batch, windows([1] * 6, clear_each=True), simple()):
        assert "ZERO_GRAD_PER_MICROBATCH" not in found(built)


def test_zero_grad_per_microbatch_is_quiet_on_several_backwards_of_one_forward() -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for _ in range(5):
        built.forward()
        for _ in range(3):
            built.clear()
            built.backward(numbers, retain=True)
        built.step()
    assert found(built) == set()


def test_accum_first_window_fires_on_a_shifted_count() -> None:
    built = windows([1, 4, 4, 4, 4])
    (one,) = findings(built, "ACCUM_FIRST_WINDOW")
    assert one.place.line == LINES["step"]
    assert one.fix.startswith("if (i + 1) % 4 == 0")
    assert found(built) == {"ACCUM_FIRST_WINDOW"}


def test_accum_first_window_is_quiet_on_equal_and_on_changing_windows() -> None:
    for counts in ([4] * 5, [1, 2, 3, 4, 3], [1, 4, 4, 2, 4], [2, 1, 1, 1]):
        assert "ACCUM_FIRST_WINDOW" not in found(windows(counts))


def test_accum_tail_dropped_fires_at_the_border_of_an_epoch() -> None:
    built = windows([4, 4, -2, 4, 4, -2, 4, 4], ends=(10, 20))
    (one,) = findings(built, "ACCUM_TAIL_DROPPED")
    assert one.evidence == {"lost": 2, "of": 4, "times": 2}
    assert found(built) == {"ACCUM_TAIL_DROPPED"}


def test_accum_tail_dropped_fires_without_a_loader_at_equal_distances() -> None:
    built = windows([4, 4, -2, 4, 4, -2, 4, 4, -2, 4, 4], loader=False)
    (one,) = findings(built, "ACCUM_TAIL_DROPPED")
    assert one.evidence == {"lost": 2, "of": 4, "times": 3}
    assert one.severity == "info"
    assert findings(windows([4, 4, -2, 4, 4, -2, 4, 4, -2, 4, 4, -1], loader=False), "ACCUM_TAIL_DROPPED")
    for counts in ([4, 4, -2, 4, 4, -2, 4, 4], [4, 4, -2, 4, -2, 4, 4, -2, 4], [4, 4, -2, 4, 4, -3, 4, 4, -2, 4, 4]):
        assert not findings(windows(counts, loader=False), "ACCUM_TAIL_DROPPED")


def test_accum_tail_dropped_is_quiet_on_a_flushed_tail_and_at_the_end_of_the_run() -> None:
    flushed = windows([4, 4, 2, 4, 4, 2], ends=(10, 20))
    at_the_end = windows([4, 4, 4, -2], ends=(14,))
    whole = windows([4] * 6, ends=(8, 16))
    for built in (flushed, at_the_end, whole):
        assert found(built) == set()


def test_accum_tail_leaks_fires_where_the_rest_goes_into_the_next_epoch() -> None:
    built = windows([4, 4, 6, 4, 6, 4], ends=(10, 20))
    (one,) = findings(built, "ACCUM_TAIL_LEAKS")
    assert one.evidence["used"] == 6
    assert found(built) == {"ACCUM_TAIL_LEAKS"}


def test_accum_tail_leaks_is_quiet_on_a_counter_over_epochs_and_on_changing_sizes() -> None:
    over_epochs = windows([4] * 6, ends=(10, 20))
    changing = windows([4, 4, 4, 6, 3, 5, 2], ends=(10, 20))
    within = windows([4, 4, 4, 6, 4, 4])
    for built in (over_epochs, changing, within):
        assert "ACCUM_TAIL_LEAKS" not in found(built)


def test_accum_not_divided_fires_on_a_sum_of_means() -> None:
    built = windows([4] * 4, factor=1.0)
    (one,) = findings(built, "ACCUM_NOT_DIVIDED")
    assert one.fix == "(loss / 4).backward()"
    assert one.severity == "warning"
    assert found(built) == {"ACCUM_NOT_DIVIDED"}


def test_accum_not_divided_is_quiet_where_it_is_divided_in_any_way() -> None:
    heads = windows([2] * 5, factor=1.0, touched=((0, 1, 2), (0, 1, 3)))
    quiet = (
        windows([4] * 4),
        windows([4] * 4, factor=1.0, edited=4),
        heads,
        windows([2] * 5, factor=1.0, lines=(1, 2)),
    )
    for built in (*quiet, windows([4] * 4, factor=1.0, reduction="sum")):
        assert found(built) == set()
    by_tensor = windows([4] * 4, factor=1.0)
    for index, one in enumerate(by_tensor.facts):
        if type(one).__name__ == "Backward":
            by_tensor.facts[index] = type(one)(**{**_fields(one), "value": 0.5, "top": "DivBackward0"})
    assert found(by_tensor) == set()


def test_accum_not_divided_is_quiet_where_the_same_line_weights_other_losses() -> None:
    built = windows([4] * 4, factor=1.0)
    built.backward((0, 1), factor=0.25)
    assert "ACCUM_NOT_DIVIDED" not in found(built)


def test_accum_not_divided_is_a_remark_for_single_samples() -> None:
    assert [one.severity for one in findings(windows([4] * 4, factor=1.0, rows=1), "ACCUM_NOT_DIVIDED")] == ["info"]


def _fields(one: object) -> dict[str, Any]:
    return {name: getattr(one, name) for name in type(one).__dataclass_fields__}  # type: ignore[attr-defined]


def test_accum_unequal_weight_fires_on_means_over_very_different_counts() -> None:
    built = windows([2] * 5, factor=0.5, items=(8, 40))
    (one,) = findings(built, "ACCUM_UNEQUAL_WEIGHT")
    assert one.evidence["ratio"] == 5.0
    assert found(built) == {"ACCUM_UNEQUAL_WEIGHT"}


def test_accum_unequal_weight_is_quiet_on_similar_counts_and_on_one_small_batch() -> None:
    assert found(windows([2] * 5, factor=0.5, items=(30, 40))) == set()
    assert found(windows([4] * 5, factor=0.25, items=(40,))) == set()
    assert found(windows([1] * 5, factor=1.0, items=(8, 40))) == set()


def test_accum_unequal_weight_is_quiet_where_the_weights_follow_the_counts() -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for _ in range(5):
        built.clear()
        for items in (8, 40):
            built.forward()
            call = built.loss(value=2.0, items=items)
            built.backward(numbers, factor=items / 48, value=2.0 * items / 48, loss_calls=(call,))
        built.step()
    assert found(built) == set()


def test_zero_grad_per_microbatch_is_quiet_where_every_other_step_overflows() -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for step in range(12):
        built.clear()
        built.forward()
        built.backward(numbers, value=1.0 + 0.1 * step, scaled=True)
        if step % 2:
            built.step(by="scaler")
        built.scaler("step", 0, skipped=not step % 2)
        built.scaler("update")
    assert found(built) == set()


def test_all_windows_are_quiet_under_a_scaler_that_skips() -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for step in range(6):
        built.clear()
        for _ in range(2):
            built.forward()
            built.backward(numbers, factor=0.5, scaled=True)
        skipped = step in (0, 3)
        if not skipped:
            built.step(by="scaler")
        built.scaler("step", 0, skipped=skipped)
        built.scaler("update")
    assert found(built) == set()


def test_accum_divided_twice_fires_on_the_square_of_the_number() -> None:
    (one,) = findings(windows([4] * 4, factor=1 / 16), "ACCUM_DIVIDED_TWICE")
    assert "1/4 of that of the whole batch" in one.message


def test_accum_divided_twice_fires_on_a_division_that_is_left_in_the_loss_of_a_step() -> None:
    net = nn.Linear(4, 2)

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) / 4

    for kind, severity in ((torch.optim.SGD, "warning"), (torch.optim.Adam, "info")):
        step = anybatch.TrainStep(net, loss_fn, kind(net.parameters(), lr=0.01), micro_batch_size=4)
        with Doctor() as doctor:
            for _ in range(5):
                step((torch.randn(16, 4), torch.randint(2, (16,))))
        (one,) = (each for each in diagnose(doctor.run) if each.name == "ACCUM_DIVIDED_TWICE")
        assert one.severity == severity


def test_accum_divided_twice_is_quiet_on_one_division_and_on_halves() -> None:
    for built in (windows([4] * 4), windows([2] * 6, factor=0.25), windows([4] * 4, factor=1 / 8), simple()):
        assert "ACCUM_DIVIDED_TWICE" not in {each.name for each in findings(built, "ACCUM_DIVIDED_TWICE")}
