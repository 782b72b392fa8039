"""Any nested container can be cut into micro-batches, and the pieces joined again are the batch."""

import dataclasses
import enum
import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils import _pytree as pytree

import anybatch
from anybatch import BatchError
from anybatch.batch.batches import Splittable
from anybatch.batch.moving import moved


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    a: Any
    b: Any


@dataclasses.dataclass
class Derived:
    """Its own fields are made of others, so building it anew from its fields is not possible."""

    a: Any
    b: Any
    size: int = dataclasses.field(init=False, default=7)


class Named(NamedTuple):
    a: Any
    b: Any


Untyped = namedtuple("Untyped", ["a", "b"])  # people have these too


class Encoding(UserDict[str, Any]):
    """As a tokenizer of Hugging Face gives it: a UserDict with attributes beside its items."""

    def __init__(self, data: dict[str, Any] | None = None, encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings


class Table(dict[str, Any]):
    """A subclass of dict."""


class Store(MutableMapping[str, Any]):
    """A mapping of one's own, whose shallow copy shares what is in it."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_of_store = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_of_store[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of_store[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of_store[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of_store)

    def __len__(self) -> int:
        return len(self.items_of_store)


class Registered:
    """A type that is known through torch.utils._pytree."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


pytree.register_pytree_node(
    Registered, lambda node: ([node.a, node.b], None), lambda values, _: Registered(*values),
    serialized_type_name="tests.test_batches.Registered",
)  # fmt: skip


class Kind(enum.Enum):
    TRAIN = 1


def fields_of(node: Any) -> dict[Any, Any] | None:
    """The children of a container of this file, found without the library."""
    if isinstance(node, MutableMapping):
        return dict(node)
    if isinstance(node, Plain | Frozen | Slots | Derived | Registered):
        return {"a": node.a, "b": node.b}
    if isinstance(node, tuple) and not isinstance(node, PackedSequence | torch.Size):
        return dict(enumerate(node))
    return None


def assert_joins(whole: Any, parts: list[Any], sizes: list[int]) -> None:
    """Asserts that the pieces, joined by the plainest means, are the whole; what has no rows is there itself."""
    if not has_rows(whole) and fields_of(whole) is None:
        assert all(part is whole for part in parts)
        return
    # Slices of a subclass of list are lists, and how to copy a Store nobody knows.
    kinds = (type(whole), list if isinstance(whole, Samples) else dict if isinstance(whole, Store) else None)
    assert all(type(part) in kinds for part in parts)
    if isinstance(whole, torch.Tensor):
        assert [len(part) for part in parts] == sizes
        assert torch.equal(torch.cat(parts), whole)
        assert all(part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in parts)
    elif isinstance(whole, np.ndarray):
        assert [len(part) for part in parts] == sizes
        assert np.array_equal(np.concatenate(parts), whole)
    elif isinstance(whole, PackedSequence):
        rejoined = [sequence for part in parts for sequence in unpack_sequence(part)]
        assert [len(unpack_sequence(part)) for part in parts] == sizes
        assert all(torch.equal(x, y) for x, y in zip(rejoined, unpack_sequence(whole), strict=True))
    elif isinstance(whole, Samples | deque):
        assert [len(part) for part in parts] == sizes
        assert [item for part in parts for item in part] == list(whole)
    elif isinstance(whole, tuple) and whole and all(isinstance(item, int) for item in whole):
        assert [item for part in parts for item in part] == list(whole)
    else:
        fields = fields_of(whole)
        found = [fields_of(part) for part in parts]
        assert fields is not None
        assert all(one is not None and list(one) == list(fields) for one in found)
        for key, child in fields.items():
            assert_joins(child, [one[key] for one in found if one is not None], sizes)


class Samples(list[Any]):
    """Marks, in this file, a list with one item a sample."""


def has_rows(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return leaf.ndim > 0
    return isinstance(leaf, PackedSequence | Samples | deque)


def micro_batches(batch: Any, size: int | None, **options: Any) -> list[Any]:
    """What a loss function is given."""
    seen: list[Any] = []

    def loss_fn(model: Any, micro_batch: Any) -> torch.Tensor:
        seen.append(micro_batch)
        return model(torch.ones(1, 1)).mean()  # type: ignore[no-any-return]

    out = anybatch.backward(nn.Linear(1, 1), loss_fn, batch, micro_batch_size=size, **options)
    assert out.micro_batches == len(seen)
    return seen


def packed(rows: int) -> PackedSequence:
    return pack_sequence([torch.randn(1 + 5 * i % 4, 2) for i in range(rows)], enforce_sorted=False)


def leaves(rows: int) -> st.SearchStrategy[Any]:
    """Leaves with a row a sample, and leaves without rows."""
    made: list[Any] = [
        lambda: torch.randn(rows, 2), lambda: torch.arange(rows), lambda: torch.ones(rows, 0), lambda: packed(rows),
        lambda: torch.randn(2, rows).t(), lambda: np.arange(2.0 * rows).reshape(rows, 2),
        lambda: np.array(["x"] * rows), lambda: Samples(f"text {i}" for i in range(rows)),
        lambda: Samples({"box": i, "at": (i, 0)} for i in range(rows)),
        lambda: Samples([[i] * i for i in range(rows)]), lambda: tuple(range(rows)), lambda: deque("x" * rows),
        lambda: torch.tensor(3.0), lambda: 2.5, lambda: "train", lambda: None, lambda: True, lambda: Kind.TRAIN,
        lambda: np.float32(1.5), lambda: np.array(4), lambda: torch.float64, lambda: torch.Size([3, 4]), dict,
    ]  # fmt: skip
    return st.sampled_from(made).map(lambda make: make())


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.tuples(children, children)
    kinds = [Plain, Frozen, Slots, Derived, Named, Untyped, Registered]
    mappings = [dict, OrderedDict, Table, Store, Encoding, lambda items: defaultdict(list, items)]
    return st.one_of(
        *[pairs.map(lambda pair, kind=kind: kind(*pair)) for kind in kinds],  # type: ignore[misc]
        *[pairs.map(lambda pair, kind=kind: kind({"first": pair[0], "b.c": pair[1]})) for kind in mappings],  # type: ignore[misc]
        pairs.map(lambda pair: (*pair, torch.tensor(1.0))),  # a tuple of plain values would be one a sample
    )


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, Any]:
    """The number of rows and a nested container with at least one tensor that says so."""
    rows = draw(st.integers(1, 6))
    inner = draw(st.recursive(leaves(rows), containers, max_leaves=6))
    anchor = {"x": torch.randn(rows, 1), 5: inner}
    kinds: list[Any] = [dict, OrderedDict, lambda d: (d["x"], d[5]), lambda d: Named(d["x"], d[5])]
    return rows, draw(st.sampled_from(kinds))(anchor)


@given(tree=trees(), size=st.one_of(st.none(), st.integers(1, 7)))
def test_pieces_join_to_the_batch(tree: tuple[int, Any], size: int | None) -> None:
    rows, batch = tree
    parts = micro_batches(batch, size)
    full, rest = divmod(rows, min(size or rows, rows))
    sizes = [min(size or rows, rows)] * full + ([rest] if rest else [])
    assert_joins(batch, parts, sizes)
    assert len(set(sizes)) <= 2
    assert anybatch.count_samples(batch) == rows
    assert_joins(batch, micro_batches(batch, None), [rows])  # and the batch itself was not changed by it


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_at_most_two_shapes_and_only_the_last_is_smaller(rows: int) -> None:
    for size in range(1, rows + 2):
        sizes = [len(part) for part in micro_batches(torch.zeros(rows, 3), size)]
        assert sum(sizes) == rows
        assert set(sizes[:-1]) <= {size}
        assert 0 < sizes[-1] <= size


@pytest.mark.parametrize("make", [Table, OrderedDict, Store, Encoding, dict, UserDict, lambda d: defaultdict(int, d)])
def test_a_mapping_is_left_as_it_was(make: Any) -> None:
    x, names = torch.randn(4, 2), ["a", "b", "c", "d"]
    batch = make({"x": x, "names": names})
    held = micro_batches(batch, 3)
    assert batch["x"] is x
    assert batch["names"] is names
    assert [part["names"] for part in held] == [["a", "b", "c"], ["d"]]


def test_attributes_of_a_container_stay() -> None:
    first, _ = micro_batches(Encoding({"x": torch.zeros(2, 1)}, encodings="kept"), 1)
    assert (first.encodings, first.data["x"].shape) == ("kept", (1, 1))
    derived = Derived(torch.zeros(2, 1), 0)
    derived.size = 9
    assert [part.size for part in micro_batches(derived, 1)] == [9, 9]


def test_a_defaultdict_still_has_its_default() -> None:
    first, _ = micro_batches(defaultdict(list, x=torch.zeros(2, 1)), 1)
    assert first["missing"] == []


@given(rows=st.integers(1, 5), size=st.integers(1, 5))
def test_broadcast_leaves_go_whole_into_every_micro_batch(rows: int, size: int) -> None:
    weights, table, mask = torch.randn(99), {"deep": [torch.zeros(99, 2)]}, torch.zeros(rows, 2)
    batch = {"x": torch.zeros(rows, 1), "in": Plain(weights, torch.arange(rows)), "table": table, "a.b": mask}
    parts = micro_batches(batch, size, broadcast=("in.a", "table", "a.b"))
    assert all(part["in"].a is weights and part["table"] is table and part["a.b"] is mask for part in parts)
    assert torch.equal(torch.cat([part["in"].b for part in parts]), torch.arange(rows))


# What a loader gives.


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (["a", "b", "c"], [["a", "b"], ["c"]]),
        ({"text": ["a", "b", "c"], "label": [0, 1, 2]},
         [{"text": ["a", "b"], "label": [0, 1]}, {"text": ["c"], "label": [2]}]),
        ([["a", "b", "c"], [0, 1, 2]], [[["a", "b"], [0, 1]], [["c"], [2]]]),
        ([("a", 0), ("b", 1), ("c", 2)], [[("a", 0), ("b", 1)], [("c", 2)]]),
        ({"t": ("a", "b", "c"), "n": None}, [{"t": ("a", "b"), "n": None}, {"t": ("c",), "n": None}]),
    ],
    ids=["list of texts", "lists in a dict", "list of lists", "raw samples", "tuple of texts"],
)  # fmt: skip
def test_batches_of_lists(batch: Any, expected: Any) -> None:
    assert micro_batches(batch, 2) == expected


def test_the_default_collate_of_pytorch() -> None:
    samples = [(torch.full((2,), float(i)), i, f"name {i}", {"boxes": [i, -i]}) for i in range(5)]
    batch = torch.utils.data.default_collate(samples)
    parts = micro_batches(batch, 2)
    assert [part[1].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [list(part[2]) for part in parts] == [["name 0", "name 1"], ["name 2", "name 3"], ["name 4"]]
    assert [part[3]["boxes"][1].tolist() for part in parts] == [[0, -1], [-2, -3], [-4]]


@pytest.mark.parametrize("kind", [list, tuple, deque, np.array, Samples])
def test_texts_are_never_given_whole_to_every_micro_batch(kind: Any) -> None:
    first, second = micro_batches({"x": torch.zeros(2, 1), "texts": kind(["a", "b"])}, 1)
    assert (list(first["texts"]), list(second["texts"])) == (["a"], ["b"])
    with pytest.raises(BatchError, match=r"batch\['texts'\]"):
        micro_batches({"x": torch.zeros(3, 1), "texts": kind(["a", "b"])}, 1)


def test_a_list_of_mappings_is_not_taken_for_two_samples() -> None:
    # A DataLoader over pairs of mappings gives a list of two mappings with all rows in each.
    for more in ({}, {"temperature": 2.0}, {"names": list("abcdefgh")}):
        with pytest.raises(BatchError, match=r"2 samples.*8 rows.*tuple.*collate"):
            anybatch.count_samples([{"x": torch.zeros(8, 1), **more}, {"x": torch.ones(8, 1), **more}])
    assert anybatch.count_samples(({"x": torch.zeros(8, 1)}, {"x": torch.ones(8, 1)})) == 8


def test_tensors_in_a_list_that_is_a_container_must_agree_too() -> None:
    with pytest.raises(BatchError, match=r"batch\['pair'\]\[1\] has 5 rows.*6.*broadcast=\('pair.1',\)") as caught:
        anybatch.count_samples({"x": torch.zeros(6), "pair": [torch.zeros(6), torch.zeros(5)]})
    assert caught.value.path == "batch['pair'][1]"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    rows = [torch.arange(float(n))[:, None] for n in (3, 1, 2)]
    batch = {"x": torch.nested.nested_tensor(rows, layout=layout), "y": torch.arange(3)}
    first, second = micro_batches(batch, 2)
    found = [*first["x"].unbind(), *second["x"].unbind()]
    assert all(torch.equal(x, y) for x, y in zip(found, rows, strict=True))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_tensors() -> None:
    dense = torch.eye(5)
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        parts = micro_batches({"x": dense.to_sparse(layout=layout), "y": torch.arange(5)}, 2)
        assert torch.equal(torch.cat([part["x"].to_dense() for part in parts]), dense)
        assert all(part["x"].layout is layout for part in parts)
    with pytest.raises(BatchError, match="sparse_bsr"):
        micro_batches({"x": dense.to_sparse_bsr((1, 1)), "y": torch.arange(5)}, 2)


def test_sorted_and_unsorted_packed_sequences_stay_what_they_are() -> None:
    sequences = [torch.randn(n, 2) for n in (4, 3, 1)]
    for enforce_sorted in (True, False):
        batch = pack_sequence(sequences, enforce_sorted=enforce_sorted)
        parts = micro_batches(batch, 2)
        assert [part.sorted_indices is None for part in parts] == [enforce_sorted] * 2
        assert_joins(batch, parts, [2, 1])


# Where a batch lies, with the meta device in the place of an accelerator.

CPU, META = torch.device("cpu"), torch.device("meta")
MOVABLE: dict[str, Any] = {
    "tensor": torch.zeros(3, 1),
    "packed": packed(3),
    "packed beside what is there": {"x": packed(3), "there": torch.zeros(3, device=META)},
    "list of samples": {"x": torch.zeros(3, device=META), "boxes": [torch.zeros(n, 4) for n in (1, 2, 4)]},
    "deep": {"x": torch.zeros(3, device=META), "in": Plain(Frozen(torch.zeros(3), 1), {"y": (torch.zeros(()),)})},
    "registered": {"x": torch.zeros(3, device=META), "in": Registered(torch.zeros(3, 2), None)},
}


def devices_in(node: Any) -> set[str]:
    if isinstance(node, PackedSequence):
        return {node.data.device.type}
    if isinstance(node, torch.Tensor):
        return {node.device.type}
    children = node if isinstance(node, list) else (fields_of(node) or {}).values()
    return {device for child in children for device in devices_in(child)}


@pytest.mark.parametrize("batch", MOVABLE.values(), ids=MOVABLE)
def test_all_of_a_batch_is_moved(batch: Any) -> None:
    splittable = Splittable([batch])
    assert not splittable.lies_on(META)
    (there,) = moved(splittable.materialise(splittable.plan(None)), META)
    assert devices_in(there) == {"meta"}
    assert devices_in(batch) >= {"cpu"}  # the batch itself stays where it was


@pytest.mark.parametrize("batch", [torch.zeros(3, 1), {"x": packed(3), "n": np.zeros(3), "t": list("abc"), "k": 2}])
def test_what_is_there_is_not_moved(batch: Any) -> None:
    assert Splittable([batch]).lies_on(CPU)
    (there,) = moved([batch], CPU)
    assert there is batch


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_batched_csr_is_refused_by_name() -> None:
    batch = {"x": torch.ones(4, 3, 2).to_sparse_csr()}
    with pytest.raises(BatchError, match=r"has the layout torch\.sparse_csr, which can't be split along its rows"):
        micro_batches(batch, 2)


def test_a_mapping_that_can_not_be_copied_becomes_a_dict() -> None:
    model, batch = nn.Linear(2, 1), types.MappingProxyType({"x": torch.randn(8, 2)})
    out = anybatch.backward(model, lambda model, batch: model(batch["x"]).square().mean(), batch, micro_batch_size=2)
    assert out.micro_batches == 4


def test_small_types_that_torch_does_not_order_are_taken() -> None:
    model, scaler = nn.Linear(2, 1), torch.amp.GradScaler("cpu")
    batch = {"x": torch.randn(8, 2), "ids": torch.arange(8).to(torch.float8_e4m3fn)}
    out = anybatch.backward(
        model, lambda model, batch: model(batch["x"]).square().mean(), batch, micro_batch_size=2, scaler=scaler
    )
    assert out.micro_batches == 4


def test_a_collate_function_that_is_exhausted_does_not_end_the_batch() -> None:
    model, calls = nn.Linear(3, 1), list[int]()

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        calls.append(len(samples))
        if len(calls) == 3:
            next(iter(()))
        return torch.stack(samples)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch).mean()
        return found

    with pytest.raises(RuntimeError, match="StopIteration"):
        anybatch.backward(
            model, loss_fn, [torch.ones(3) for _ in range(8)], micro_batch_size=2, collate=collate, verify="off"
        )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_array_is_cut_without_reading_its_rows() -> None:
    class Rows(np.ndarray):
        __module__ = "numpy"  # as of np.memmap

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("one object for each row")

    rows = np.arange(24.0).reshape(12, 2).view(Rows)
    splittable = Splittable([{"x": rows}])
    parts = list(splittable.materialise(splittable.plan(5)))
    assert [len(part["x"]) for part in parts] == [5, 5, 2]
    assert np.array_equal(np.concatenate([np.asarray(part["x"]) for part in parts]), np.asarray(rows))
