"""Looking into a container does not keep what is in it alive."""

import gc
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybatch.batch.trees import leaves, map_leaves

Pair = namedtuple("Pair", ["first", "second"])


class Registered:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


torch.utils._pytree.register_pytree_node(
    Registered, lambda one: ([one.tensor], None), lambda values, _: Registered(next(iter(values)))
)


@dataclass
class Fields:
    tensor: torch.Tensor


CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "registered": Registered,
    "dataclass": Fields,
    "namespace": lambda tensor: SimpleNamespace(x=tensor, name="a"),
    "list": lambda tensor: [tensor],
    "dict": lambda tensor: {"x": tensor},
    "ordered": lambda tensor: OrderedDict(x=tensor),
    "default": lambda tensor: defaultdict(list, x=tensor),
    "named": lambda tensor: Pair(tensor, 1),
    "nested": lambda tensor: [{"x": Registered(tensor)}, Pair(Fields(tensor), (tensor,))],
}


@pytest.fixture(autouse=True)
def _references_alone() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("look", [lambda tree: list(leaves(tree)), lambda tree: map_leaves(lambda leaf: leaf, tree)])
@pytest.mark.parametrize("name", CONTAINERS)
def test_what_was_looked_into_goes_with_its_last_reference(name: str, look: Callable[[Any], Any]) -> None:
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    tree = CONTAINERS[name](tensor)
    del tensor
    look(tree)
    assert gone() is not None
    del tree
    assert gone() is None


class Space(SimpleNamespace):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x=x, y=y)


class OfOne(Pair):
    def __new__(cls, given: Any) -> "OfOne":
        return super().__new__(cls, given, given + 1)


class Items(list[Any]):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__([first, second])
        self.name = "items"


class Slots:
    """Has no fields that it declares."""

    __slots__ = ("x",)


class Read(Mapping[str, Any]):
    def __init__(self, **items: Any) -> None:
        self.held = items

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Written(Read, MutableMapping[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]


@pytest.mark.parametrize(
    "tree", [Space(1, 2), OfOne(1), Items(1, 2), Read(x=1, y=2), Written(x=1, y=2)],
    ids=lambda tree: type(tree).__name__,
)  # fmt: skip
def test_a_class_of_the_user_stays_what_it_is_and_is_not_written_to(tree: Any) -> None:
    twin = map_leaves(lambda leaf: leaf * 10, tree)
    assert type(twin) is type(tree)
    assert [leaf for _, _, leaf in leaves(twin)] == [10, 20]
    assert [leaf for _, _, leaf in leaves(tree)] == [1, 2]
    assert getattr(twin, "name", "") == getattr(tree, "name", "")


@pytest.mark.parametrize("library", ["attrs", "pydantic"])
def test_fields_that_a_library_declares_are_children(library: str) -> None:
    module = pytest.importorskip(library)
    made = module.make_class("Declared", ["_x", "y"]) if library == "attrs" else module.create_model("D", x=int, y=int)
    tree = made(x=1, y=2)
    twin = map_leaves(lambda leaf: leaf * 10, tree)
    assert type(twin) is made
    assert [leaf for _, _, leaf in leaves(twin)] == [10, 20]
    assert [leaf for _, _, leaf in leaves(tree)] == [1, 2]


def test_a_class_without_declared_fields_is_a_leaf() -> None:
    one = Slots()
    assert map_leaves(lambda leaf: [leaf], one) == [one]


def test_namespaces_that_refer_to_each_other_are_leaves() -> None:
    config, part = SimpleNamespace(x=1), SimpleNamespace()
    config.part, part.config = part, config
    assert [leaf for _, _, leaf in leaves({"a": config, "b": 2}, "batch")][-1] == 2
    apart = SimpleNamespace(x=SimpleNamespace(y=1), z=SimpleNamespace(y=2))
    assert [leaf for _, _, leaf in leaves(apart, "batch")] == [1, 2]


def test_what_is_registered_names_its_children_by_key() -> None:
    found = [leaves(kind, "batch") for kind in (OrderedDict(x=[1]), defaultdict(int, {"y": 2}))]
    assert [(label, path) for one in found for label, path, _ in one] == [
        ("batch['x'][0]", ("x", "0")), ("batch['y']", ("y",)),
    ]  # fmt: skip
