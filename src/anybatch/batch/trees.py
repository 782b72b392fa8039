"""Nested containers of any type: their children, and how to rebuild a container with other children.

This is the only file that uses ``torch.utils._pytree``, where libraries register their container types.
"""

import copy
import dataclasses
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree


class Child(NamedTuple):
    """A child of a container."""

    label: str  # the text after its parent, such as ``['x']``, ``[0]`` or ``.mask``
    key: str  # the bare key, such as ``x``, ``0`` or ``mask``
    value: Any


class Container(NamedTuple):
    """The children of a container, and a function that rebuilds it with other values."""

    children: list[Child]
    rebuild: Callable[[Sequence[Any]], Any]


def opened(node: Any) -> Container | None:
    """Opens a container by one level.

    Args:
        node: a mapping, list, tuple, named tuple, SimpleNamespace, a class of declared fields (dataclass, attrs,
            pydantic), or a type registered in torch.

    Returns:
        The container, or ``None`` for anything else, tensors and PackedSequences included.

    Example:
        >>> [child.label for child in opened({"x": 1, "y": [2]}).children]
        ["['x']", "['y']"]
    """
    kind = type(node)
    if kind is dict:
        keys, children = tuple(node), list[Child]()
        for key, value in node.items():
            children.append(Child(f"[{key!r}]", str(key), value))
        return Container(children, lambda values: dict(zip(keys, values, strict=True)))
    if isinstance(node, (torch.Tensor, PackedSequence, str, bytes, torch.Size, torch.device, torch.dtype)):
        return None
    if kind is list or kind is tuple:
        return Container(_item_children(node), kind)
    registered = None if isinstance(node, tuple) and hasattr(node, "_fields") else _opened_by_registration(node)
    if registered is not None:
        return registered
    return _opened_by_protocol(node)


def _item_children(node: Sequence[Any]) -> list[Child]:
    return [Child(f"[{i}]", str(i), value) for i, value in enumerate(node)]


def _opened_by_registration(node: Any) -> Container | None:
    node_def = pytree.SUPPORTED_NODES.get(pytree._get_node_type(node))
    if node_def is None:
        return None
    if node_def.flatten_with_keys_fn is None:  # registered without keys
        values, context = node_def.flatten_fn(node)
        children = _item_children(list(values))
    else:
        keyed, context = node_def.flatten_with_keys_fn(node)
        children = [Child(str(entry), _bare(entry), value) for entry, value in keyed]
    return Container(children, lambda values: node_def.unflatten_fn(list(values), context))


def _bare(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry).strip("[]'.")


def _leads_to(node: types.SimpleNamespace, above: tuple[Any, ...]) -> bool:
    """Whether a namespace refers to one around it, as a configuration may: it has no leaves to come to then."""
    if any(node is one for one in above):
        return True
    return any(_leads_to(one, (*above, node)) for one in vars(node).values() if isinstance(one, types.SimpleNamespace))


def _opened_by_protocol(node: Any) -> Container | None:
    names = None if isinstance(node, type) else _fields_of(node)
    if names is not None:
        return Container([Child(f".{n}", n, getattr(node, n)) for n in names], lambda v: _with_fields(node, names, v))
    if isinstance(node, tuple):
        children = _item_children(node)
        if hasattr(node, "_fields"):
            children = [Child(f".{name}", name, value) for name, value in zip(node._fields, node, strict=True)]
        return Container(children, lambda values: _with_values(node, values))
    if isinstance(node, list):
        return Container(_item_children(node), lambda values: _with_values(node, values))
    if isinstance(node, Mapping):
        keys, children = list(node), [Child(f"[{key!r}]", str(key), value) for key, value in node.items()]
        return Container(children, lambda values: _with_items(node, keys, values))
    return None


def _fields_of(node: Any) -> list[str] | None:
    """The fields that a class declares, or those of a namespace; ``None`` where there are none to go by."""
    if dataclasses.is_dataclass(node):
        return [field.name for field in dataclasses.fields(node)]
    if isinstance(node, types.SimpleNamespace):
        return None if _leads_to(node, ()) else [*vars(node)]
    of_attrs, of_pydantic = (getattr(type(node), f"__{name}__", None) for name in ("attrs_attrs", "pydantic_fields"))
    if isinstance(of_attrs, tuple):
        return [field.name for field in of_attrs if hasattr(node, field.name)]
    return [*of_pydantic] if isinstance(of_pydantic, dict) else None


def _with_values(node: Any, values: Sequence[Any]) -> Any:
    """A list or tuple with other items, without its own constructor, which may take something else."""
    try:
        twin: Any = tuple.__new__(type(node), values) if isinstance(node, tuple) else list.__new__(type(node))
    except TypeError:  # a struct sequence, which only its own constructor makes
        return type(node)(values)
    if isinstance(twin, list):
        list.extend(twin, values)
    if hasattr(node, "__dict__"):
        vars(twin).update(vars(node))
    return twin


def _with_fields(node: Any, names: Sequence[str], values: Sequence[Any]) -> Any:
    if isinstance(node, types.SimpleNamespace):  # whose copy calls the constructor without arguments
        twin = types.SimpleNamespace.__new__(type(node))
        vars(twin).update(vars(node))
    else:
        twin = copy.copy(node)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(twin, name, value)  # works for frozen dataclasses too
    return twin


def _with_items(node: Mapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]) -> Any:
    fresh, before = dict(zip(keys, values, strict=True)), {key: node[key] for key in keys}
    try:
        twin: Any = copy.copy(node)
    except TypeError:  # one that can't be copied, such as a mappingproxy
        return fresh
    inside = getattr(twin, "__dict__", {})
    for name, store in [*inside.items()]:
        if type(store) is dict:  # which the copy shares with the original, and may keep its items in
            inside[name] = {key: fresh[key] if before.get(key, store) is one else one for key, one in store.items()}
    is_mutable = isinstance(twin, MutableMapping)
    for key, value in fresh.items() if is_mutable else ():
        twin[key] = value
    if all(node[key] is original for key, original in before.items()):
        return twin if is_mutable or all(twin[key] is value for key, value in fresh.items()) else fresh
    for key, original in before.items():  # a mutable one, whose copy shares its items with it
        node[key] = original  # type: ignore[index]
    return fresh


_MOST_OPENED = 10_000  # objects within one


def tensors_within(value: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors within an object of any class, and whether everything in it could be searched.

    Example:
        >>> class Graph:
        ...     def __init__(self):
        ...         self.store = {"x": torch.ones(3)}
        >>> tensors_within(Graph())
        ([tensor([1., 1., 1.])], True)
    """
    found: list[torch.Tensor] = []
    waiting, seen, is_whole = [value], {id(value)}, True
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
            continue
        inside = _inside(one)
        if inside is None:
            is_whole = is_whole and _is_plain(one)
            continue
        fresh = [inner for inner in inside if id(inner) not in seen]
        if len(seen) + len(fresh) > _MOST_OPENED:
            return found, False
        seen.update(map(id, fresh))
        waiting += fresh
    return found, is_whole


def _inside(value: Any) -> list[Any] | None:
    """The items of a container, or the attributes of an object; ``None`` if it has neither."""
    if _is_plain(value):
        return None
    if isinstance(value, PackedSequence):
        return [value.data, value.batch_sizes]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    inside = list(value.values()) if isinstance(value, dict) else []
    declared = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    slots = [name for one in declared for name in ([one] if isinstance(one, str) else one)]
    if not hasattr(value, "__dict__") and not slots and not isinstance(value, dict):
        return None
    inside += [
        getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    ]
    return inside + list(getattr(value, "__dict__", {}).values())


def _is_plain(value: Any) -> bool:
    """Whether a value can't hold tensors: a number, a text, a class, a function, a type of Python or NumPy."""
    kind = type(value)
    if isinstance(value, (type, types.FunctionType, types.ModuleType, types.MethodType, weakref.ReferenceType)):
        return True
    home = kind.__module__.partition(".")[0]
    containers = (list, tuple, set, frozenset, dict)
    return home == "numpy" or (
        home in sys.stdlib_module_names and not isinstance(value, containers) and (not hasattr(value, "__dict__"))
    )


def map_leaves(function: Callable[[Any], Any], node: Any) -> Any:
    """Applies a function to each leaf, and returns the results in the same containers.

    Example:
        >>> map_leaves(lambda leaf: leaf * 2, {"x": (1, [2, 3])})
        {'x': (2, [4, 6])}
    """
    kind = type(node)
    if kind is dict:  # fast path for common types
        return {key: map_leaves(function, value) for key, value in node.items()}
    if kind is list or kind is tuple:
        return kind([map_leaves(function, item) for item in node])
    container = None if kind is torch.Tensor else opened(node)
    if container is None:
        return function(node)
    return container.rebuild([map_leaves(function, child.value) for child in container.children])


def like(node: Any, values: Iterable[Any]) -> Any:
    """The same containers around other leaves."""
    iterator = iter(values)
    return map_leaves(lambda _: next(iterator), node)


def flat(node: Any) -> list[Any]:
    """All leaves, in order."""
    kind = type(node)
    if kind is torch.Tensor or node is None:
        return [node]
    if kind is dict:
        return [leaf for value in node.values() for leaf in flat(value)]
    if kind is list or kind is tuple:
        return [leaf for item in node for leaf in flat(item)]
    container = opened(node)
    return [node] if container is None else [leaf for child in container.children for leaf in flat(child.value)]


def leaves(node: Any, label: str = "", path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Iterates over all leaves.

    Example:
        >>> [label for label, _, _ in leaves({"x": (1, 2)}, "batch")]
        ["batch['x'][0]", "batch['x'][1]"]
    """
    container = opened(node)
    if container is None:
        yield label, path, node
        return
    for child in container.children:
        yield from leaves(child.value, label + child.label, (*path, child.key))


def lookup(node: Any, dotted: str) -> Any:
    """Returns the value at a dotted path, such as ``"labels"`` or ``"targets.0.mask"``.

    Args:
        dotted: keys, field names and positions, joined by dots, which a key may have, too; the empty string is the
            node itself.

    Raises:
        KeyError: a key is missing; the message lists those that there are.

    Example:
        >>> lookup({"cls.pth": [1, 2]}, "cls.pth.1")
        2
    """
    found, walked, rest = node, "", dotted.split(".") if dotted else []
    while rest:
        container = opened(found)
        children = {child.key: child for child in container.children} if container else {}
        heads = [".".join(rest[:size]) for size in range(len(rest), 0, -1)]
        key = next((one for one in heads if one in children), None)
        if key is None:
            raise KeyError(f"{walked or 'batch'} has no {rest[0]!r}; it has {sorted(children) or 'no children'}")
        walked, found = (walked or "batch") + children[key].label, children[key].value
        rest = rest[key.count(".") + 1 :]
    return found
