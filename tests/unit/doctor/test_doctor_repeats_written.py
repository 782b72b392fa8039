"""Repetitions that were written and read again are those that were recorded, whatever their numbers are."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from anybatch.records.events import Backward, Cleared, Clipped, Forward, Scaler, Scheduled, Stepped
from anybatch.records.lines import Fact, from_line
from anybatch.records.lossfacts import LossCall
from anybatch.records.repeats import DIFFERING, Repeats, line_of, repeated, step_repeated, with_repeats

NUMBERS = st.floats() | st.none()
RATES = st.lists(st.floats(), max_size=3).map(tuple)
LIKES: dict[type[Fact], Fact] = {
    Forward: Forward(root=0, at=1),
    LossCall: LossCall(function="cross_entropy", at=2),
    Backward: Backward(at=3),
    Cleared: Cleared(at=4),
    Clipped: Clipped(at=5),
    Stepped: Stepped(optimizer=0, at=6),
    Scheduled: Scheduled(scheduler=0, at=7),
    Scaler: Scaler(call="step", at=8),
}
ENTRIES: dict[str, st.SearchStrategy[Any]] = {
    "seconds": st.floats(),
    "value": NUMBERS,
    "loss_calls": st.just(()),
    "norm": NUMBERS,
    "number": st.integers(0, 10**6),
    "lrs": RATES,
    "scale": st.floats(),
    "skipped": st.booleans(),
}


def entries_of(kind: type[Fact]) -> list[st.SearchStrategy[Any]]:
    rates = dict.fromkeys(("before", "after"), RATES) if kind is Scheduled else {"after": st.floats()}
    return [({**ENTRIES, **rates})[name] for name in DIFFERING[kind]]


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[Fact, list[Any]]]:
    kinds = draw(st.lists(st.sampled_from(list(DIFFERING)), min_size=1, max_size=6))
    return [(LIKES[kind], [draw(entry) for entry in entries_of(kind)]) for kind in kinds]


def read_again(written: list[Any]) -> list[Fact]:
    found = from_line(line_of(written))
    assert isinstance(found, Repeats)
    return [one for one in with_repeats([*LIKES.values(), found], []) if one.at > 20]


@given(rows())
def test_single_ones(given: list[tuple[Fact, list[Any]]]) -> None:
    numbered = list(enumerate(given, start=21))
    expected = [repeated(like, at, 3, values) for at, (like, values) in numbered]
    found = read_again([(like.at, at, 3, *values) for at, (like, values) in numbered])
    assert list(map(repr, found)) == list(map(repr, expected))


@given(rows())
def test_whole_steps(given: list[tuple[Fact, list[Any]]]) -> None:
    likes = [like for like, _ in given]
    values = [one for like, own in given if type(like) is not Forward for one in own if one != ()]
    for like, own in given:  # an empty tuple of rates is no entry that is left out
        if any(one == () for one in own) and type(like) in (Stepped, Scheduled):
            return
    expected = list(step_repeated(likes, 21, 3, values))
    found = read_again([([like.at for like in likes], 21, 3, values)])
    assert list(map(repr, found)) == list(map(repr, expected))
    assert [one.at for one in found] == list(range(21, 21 + len(likes)))


def test_every_kind_is_tried() -> None:
    assert set(LIKES) == set(DIFFERING)
