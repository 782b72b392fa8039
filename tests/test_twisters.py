"""The state of Python's and numpy's generators is copied as it lies in memory: it is what their own functions give."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.tensors import twisters
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.twisters import saved_numpy_state, saved_python_state

DRAWS: dict[str, Callable[[int], object]] = {
    "seed": lambda n: (random.seed(n), np.random.seed(n)),
    "uniform": lambda n: ([random.random() for _ in range(n)], np.random.rand(n)),
    "normal": lambda n: ([random.gauss(0, 1) for _ in range(n)], np.random.randn(n)),
    "bits": lambda n: (random.getrandbits(32 * n + 1), np.random.bytes(n)),
    "a whole turn": lambda n: ([random.getrandbits(32) for _ in range(624)], np.random.bytes(4 * 624)),
    "other": lambda n: (random.gammavariate(n + 1.0, 1.0), np.random.gamma(n + 1.0, size=3)),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    state, python = np.random.get_state(), random.getstate()
    yield
    np.random.set_state(state)
    random.setstate(python)


def plain(state: Any) -> Any:
    """With what tells 0.0 from -0.0, and the kind and the bits of the key."""
    key = state["state"]["key"]
    return {
        **state,
        "state": (key.dtype, key.tobytes(), state["state"]["pos"]),
        "gauss": (type(state["gauss"]), float(state["gauss"]).hex()),
    }


def assert_saved() -> None:
    assert saved_python_state()() == random.getstate()
    assert plain(saved_numpy_state(np)()) == plain(np.random.get_state(legacy=False))


def test_the_states_are_found_in_this_python_and_this_numpy() -> None:
    assert twisters._place_in_python() is not None
    assert twisters._place_in_numpy(np) is not None


@given(st.lists(st.tuples(st.sampled_from(sorted(DRAWS)), st.integers(0, 7)), max_size=6))
def test_what_is_saved_is_what_the_getters_give(draws: list[tuple[str, int]]) -> None:
    for name, n in draws:
        DRAWS[name](n)
        assert_saved()


@given(st.lists(st.tuples(st.sampled_from(sorted(DRAWS)), st.integers(0, 7)), max_size=4))
def test_draws_afterwards_do_not_change_what_was_saved(draws: list[tuple[str, int]]) -> None:
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    saved = saved_python_state(), saved_numpy_state(np)
    for name, n in draws:
        DRAWS[name](n)
    assert saved[0]() == python
    assert plain(saved[1]()) == plain(numpy)


def test_states_that_differ_in_the_left_over_number_only() -> None:
    """The words and the position are the same, so that looking at them alone would not tell these states apart."""
    np.random.seed(3)
    np.random.randn()
    random.seed(3)
    random.gauss(0, 1)
    left_over = RandomState()
    expected = np.random.randn(), random.gauss(0, 1)
    used_up = RandomState()
    after = np.random.randn(), random.gauss(0, 1)
    for _ in range(2):
        left_over.restore()
        assert_saved()
        assert (np.random.randn(), random.gauss(0, 1)) == expected
        used_up.restore()
        assert_saved()
        assert (np.random.randn(), random.gauss(0, 1)) == after


@pytest.mark.parametrize("gauss", [0.0, -0.0, 5e-324, -1.5, float("inf")])
@pytest.mark.parametrize("has_gauss", [0, 1])
def test_any_left_over_number(gauss: float, has_gauss: int) -> None:
    np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": has_gauss, "gauss": gauss})
    assert_saved()


def test_where_nothing_is_found_the_getters_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twisters, "_place_in_python", lambda: None)
    monkeypatch.setattr(twisters, "_place_in_numpy", lambda _: None)
    np.random.randn()
    random.gauss(0, 1)
    assert_saved()
    state = RandomState()
    first = np.random.randn(), random.gauss(0, 1), np.random.rand(), random.random()
    state.restore()
    assert (np.random.randn(), random.gauss(0, 1), np.random.rand(), random.random()) == first


class Shifted(random.Random):
    """Has more state than what lies in memory where it does in the usual one."""

    shift = 0.0

    def getstate(self) -> tuple[Any, ...]:
        return (super().getstate(), self.shift)


def test_another_generator_behind_the_functions_of_random(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Shifted(5)
    monkeypatch.setattr(random, "getstate", other.getstate)
    assert saved_python_state()() == other.getstate()


def test_another_bit_generator_behind_the_functions_of_numpy() -> None:
    module: Any = np.random  # its stub does not know these two
    before = module.get_bit_generator()
    try:
        module.set_bit_generator(np.random.PCG64(4))
        np.random.randn()
        saved = saved_numpy_state(np)
        assert saved()["bit_generator"] == "PCG64"
        first = np.random.rand(3).tolist()
        np.random.set_state(saved())
        assert np.random.rand(3).tolist() == first
    finally:
        module.set_bit_generator(before)
    assert_saved()
