"""Looking into a container does not keep what is in it alive."""

import gc
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
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


def test_namespaces_that_refer_to_each_other_are_leaves() -> None:
    config, part = SimpleNamespace(x=1), SimpleNamespace()
    config.part, part.config = part, config
    assert [leaf for _, _, leaf in leaves({"a": config, "b": 2}, "batch")][-1] == 2
    apart = SimpleNamespace(x=SimpleNamespace(y=1), z=SimpleNamespace(y=2))
    assert [leaf for _, _, leaf in leaves(apart, "batch")] == [1, 2]
