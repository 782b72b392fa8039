"""Several devices in one process: what the copies of a model take over, and what each thread is given."""

import copy
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import anybatch
import versions
from anybatch.loss.cutting import _open_cuts
from anybatch.parallel.devices import ModelCopy
from device_models import THREE, TWO, batch_of, copy_of, cross_entropy, devices_of, small, step_of, weights_of
from reference import assert_bitwise, assert_float64, gradients_of, whole_gradients


def assert_exact(model: torch.nn.Module, loss_fn: Any = cross_entropy, steps: int = 2, **options: Any) -> Any:
    """Takes some steps on two devices, each against the whole batch."""
    step = step_of(model, loss_fn, devices=options.pop("devices", TWO), **{"micro_batch_size": 2, **options})
    for i in range(steps):
        batch = batch_of(9, seed=i)
        expected, _ = whole_gradients(model, loss_fn, batch)
        step(batch)
        assert_float64(gradients_of(model), expected)
    return step


class Tied(torch.nn.Module):
    """A weight that is used twice, one that is frozen, and one that only some samples reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 4).double()
        self.second = torch.nn.Linear(4, 4).double()
        self.second.weight = self.first.weight
        self.frozen = torch.nn.Linear(4, 3).double().requires_grad_(False)
        self.rare = torch.nn.Parameter(torch.ones(3).double())
        self.register_buffer("shift", torch.ones(3).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(self.second(self.first(x).tanh())) + self.shift
        if x[0, 0] > 0.5:
            out = out * self.rare
        return out


def test_tied_frozen_and_rarely_used_parameters() -> None:
    model = Tied()

    def loss_fn(model: Any, batch: Any) -> Any:  # one sample at a time, so that the split does not decide what is used
        each = [F.cross_entropy(model(x[None]), y[None]) for x, y in zip(batch["x"], batch["y"], strict=True)]
        return torch.stack(each).mean()

    step = assert_exact(model, loss_fn)
    copy = copy_of(step)
    assert copy.leaf_of(model.first.weight) is copy.leaf_of(model.second.weight)
    assert model.frozen.weight.grad is None


def test_weights_that_are_whole_numbers() -> None:
    """As quantized ones, which require no gradient; torch makes no parameter of them that does."""
    model = small()
    model.scale = torch.nn.Parameter(torch.tensor([2, 3], dtype=torch.int8), requires_grad=False)

    def loss_fn(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]) * model.scale.sum() / 5, batch["y"])

    assert_exact(model, loss_fn)


def test_a_parameter_that_only_another_device_reaches() -> None:
    model, other = Tied(), Tied()
    batch = batch_of(2)
    batch["x"][:, 0] = torch.tensor([-1.0, 1.0])
    step_of(model, devices=TWO, verify="off")(batch)
    step_of(other, micro_batch_size=1, verify="off")(batch)
    assert_float64([model.rare.grad], [other.rare.grad])
    assert model.rare.grad is not None


def test_freezing_modes_attributes_and_new_layers_are_taken_over_at_each_step() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale, self.options = small(), 1.0, {"power": 1}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = (self.scale * self.net(x)) ** self.options["power"]
            return out

    model = Scaled()
    step = assert_exact(model)

    def again() -> None:
        batch = batch_of(9)
        expected, _ = whole_gradients(model, cross_entropy, batch)
        step(batch)
        assert_float64(gradients_of(model), expected)

    model.scale, model.options["power"] = 0.3, 2
    again()
    handle = anybatch.freeze(model, "net.0*")
    again()
    handle.remove()
    again()
    with torch.no_grad():
        model.net[0].weight.data = torch.randn(6, 4).double()
    again()


def test_hooks_and_changed_forwards_work_on_the_copies() -> None:
    model = small()
    model[0].register_forward_hook(lambda module, args, out: out * module.weight.sum())
    next(model.parameters()).register_hook(lambda gradient: 2 * gradient)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = F.linear(x, self.weight, self.bias).relu()
        return out

    model[3].forward = forward.__get__(model[3])
    assert_exact(model)


def test_lists_that_a_forward_fills_belong_to_each_copy() -> None:
    class Collecting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.extra = small(), []  # type: ignore[var-annotated]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(x)
            self.extra.append(out.square().mean())
            return out

    def loss_fn(model: Any, batch: Any) -> Any:
        model.extra.clear()
        return cross_entropy(model, batch) + model.extra[0]

    assert_exact(Collecting(), loss_fn, devices=THREE)


def test_a_loss_that_is_a_module_a_method_or_partly_called() -> None:
    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = torch.nn.Parameter(torch.ones(()).double())

        def forward(self, model: Any, batch: Any) -> Any:
            return F.cross_entropy(model(batch["x"]) * self.temperature, batch["y"])

        def other(self, model: Any, batch: Any) -> Any:
            return self(model, batch)

    batch = batch_of(9)
    for is_method in (False, True):
        model, loss = small(), Weighted()
        loss_fn: Any = loss.other if is_method else loss
        everything = [*model.parameters(), *loss.parameters()]
        expected, _ = whole_gradients(model, loss_fn, batch, everything)
        step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(everything, lr=0.1), devices=TWO, micro_batch_size=2)
        step(batch)
        assert_float64(gradients_of(everything), expected)

    def scaled(scale: float, model: Any, batch: Any) -> Any:
        return scale * cross_entropy(model, batch)

    assert_exact(small(), partial(scaled, 3.0))


def test_a_loss_that_uses_parameters_of_another_place_is_refused() -> None:
    temperature = torch.nn.Parameter(torch.ones(()).double())
    model = small()
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)

    def loss_fn(passed: Any, batch: Any) -> Any:
        return cross_entropy(passed, batch) * temperature

    def other_model(passed: Any, batch: Any) -> Any:
        return cross_entropy(model, batch) + 0 * passed[0].weight.sum()

    # which thread meets it first decides which of the two texts comes
    told = "on another device uses this model instead of its own copy|are parameters neither of the model"
    for loss in (loss_fn, other_model):
        step = anybatch.TrainStep(model, loss, optimizer, devices=TWO)
        with pytest.raises(anybatch.LossError, match=told):
            step(batch_of(4))
        assert temperature.grad is None
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_leaf_of_the_batch_that_requires_a_gradient_belongs_into_the_model() -> None:
    def of_codes(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["code"] + batch["x"]), batch["y"])

    def of_model(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model[1](model[0](batch["index"]) + batch["x"]), batch["y"])

    batch = batch_of(9)
    codes = torch.randn_like(batch["x"]).requires_grad_()
    with pytest.raises(anybatch.LossError, match=r"batch\['code'\] of shape \(9, \d+\) requires a gradient"):
        step_of(small(), of_codes, devices=TWO, micro_batch_size=2)({**batch, "code": codes})
    assert codes.grad is None
    model = torch.nn.Sequential(torch.nn.Embedding.from_pretrained(codes.detach(), freeze=False), small())
    batch["index"] = torch.arange(9)
    expected, _ = whole_gradients(model, of_model, batch)
    step_of(model, of_model, devices=TWO, micro_batch_size=2)(batch)
    assert_float64(gradients_of(model), expected)


def test_only_some_tensors_get_a_gradient() -> None:
    model = small()
    wanted = list(model[3].parameters())
    batch = batch_of(9)
    expected, _ = whole_gradients(model, cross_entropy, batch, wanted)
    step_of(model, devices=TWO, inputs=wanted)(batch)
    assert_float64(gradients_of(wanted), expected)
    assert model[0].weight.grad is None
    outside = torch.ones(3, requires_grad=True)
    step = anybatch.TrainStep(
        model, cross_entropy, torch.optim.SGD([*wanted, outside]), devices=TWO, inputs=[*wanted, outside]
    )
    with pytest.raises(anybatch.BatchError, match="not a parameter of the model"):
        step(batch)


def test_batch_norm_is_refused_or_frozen_or_a_ghost() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
        ).double()

    batch = batch_of(8)
    with pytest.raises(anybatch.NotSplittable, match="The 2 devices share these 8 samples, in 2 micro-batches"):
        step_of(make(), devices=TWO)(batch)
    frozen, whole = make(), make()
    step_of(frozen, devices=TWO, batch_norm="frozen")(batch)
    whole[1].eval()
    expected, _ = whole_gradients(whole, cross_entropy, batch)
    assert_float64(gradients_of(frozen), expected)
    ghost, alone, first = make(), make(), make()
    for _ in range(2):
        step_of(ghost, devices=TWO, batch_norm="ghost")(batch)
        step_of(alone, micro_batch_size=4, batch_norm="ghost")(batch)
    assert_float64(gradients_of(ghost), gradients_of(alone))
    half = {key: value[:4] for key, value in batch.items()}
    step_of(first, batch_norm="ghost")(half)
    fresh = make()
    step_of(fresh, devices=TWO, batch_norm="ghost")(batch)  # those of the micro-batches of the first device
    assert torch.equal(fresh[1].running_mean, first[1].running_mean)
    with pytest.raises(anybatch.NotSplittable, match="one value per channel"):
        step_of(make(), devices=TWO, batch_norm="ghost")(batch_of(2))


def test_buffers_that_a_forward_changes_are_those_of_the_first_device_and_this_is_said() -> None:
    class Counting(torch.nn.Module):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = small()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            out: torch.Tensor = self.net(x)
            return out

    model = Counting()
    step = step_of(model, devices=TWO, micro_batch_size=1)
    with pytest.warns(anybatch.AnyBatchWarning, match="calls of Counting on cpu"):
        step(batch_of(4))
    assert model.calls == 2
    step(batch_of(4))  # said once
    assert model.calls == 4
    assert [one.copy is None or one.copy.changed_buffers() for one in devices_of(step).placements] == [True, []]


_setting: ContextVar[str] = ContextVar("setting", default="")


@contextmanager
def settings() -> Iterator[None]:
    """What torch or Python keep for a thread."""
    token = _setting.set("mine")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield
    _setting.reset(token)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_each_thread_has_what_the_calling_one_has() -> None:
    found: list[tuple[Any, ...]] = []

    def loss_fn(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        found.append(
            (
                out.dtype, _setting.get(), torch.is_grad_enabled(), torch.is_anomaly_enabled(),
                torch.get_default_dtype(), torch.get_num_threads(), _open_cuts.get(),
            )
        )  # fmt: skip
        return F.cross_entropy(out.float(), batch["y"])

    step = step_of(small(dtype=torch.float32), loss_fn, devices=TWO)
    with settings():
        for _ in range(2):
            step(batch_of(4, dtype=torch.float32))
    assert len(found) == 4
    assert len(set(found)) == 1
    assert found[0][:4] == (torch.bfloat16, "mine", True, True)
    assert torch.is_autocast_cache_enabled()


@versions.hooks_on_saved_tensors
def test_each_thread_has_the_hooks_on_saved_tensors_of_the_calling_one() -> None:
    callers: list[str] = []

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor]:
        callers.append(threading.current_thread().name)
        return (tensor,)

    step = step_of(small(), devices=TWO, verify="off")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0]):
        step(batch_of(4))
    assert set(callers) == {threading.current_thread().name, "anybatch cpu"}
    assert callers.count("anybatch cpu") == len(callers) / 2


def test_the_threads_are_apart_and_gone_afterwards() -> None:
    names: set[str] = set()

    def loss_fn(model: Any, batch: Any) -> Any:
        names.add(threading.current_thread().name)
        return cross_entropy(model, batch)

    before = threading.active_count()
    step_of(small(), loss_fn, devices=THREE)(batch_of(6))
    assert len(names) == 2 or names == {threading.current_thread().name, "anybatch cpu"}
    assert threading.active_count() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_scaler(dtype: torch.dtype) -> None:
    """Two micro-batches are added in one order, here and there."""
    batch, found = batch_of(12, dtype=torch.float32), []
    for devices in (None, TWO, TWO):
        model = small(dtype=torch.float32)
        step = step_of(model, devices=devices, autocast=dtype, micro_batch_size=6, clip_norm=1.0)
        norms = [step(batch).grad_norm for _ in range(3)]
        found.append((weights_of(model), norms))
    for weights, norms in found[1:]:
        assert_bitwise(weights, found[0][0])
        assert norms == found[0][1]


def test_an_infinite_gradient_on_one_device_skips_the_update() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return cross_entropy(model, batch) * torch.where(batch["bad"].any(), torch.inf, 1.0)

    model = small(dtype=torch.float32)
    before = copy.deepcopy(model)
    step = step_of(model, loss_fn, devices=TWO, autocast=torch.float16)
    out = step({**batch_of(4, dtype=torch.float32), "bad": torch.tensor([False, False, False, True])})
    assert "not finite" in out.skipped
    assert_bitwise(list(model.state_dict().values()), list(before.state_dict().values()))


@pytest.mark.parametrize("kind", ["lstm", "weight_norm", "old weight_norm", "stored twice", "list"])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_parameters_that_modules_also_keep_elsewhere(kind: str) -> None:
    class Kept(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lstm = torch.nn.LSTM(4, 3, batch_first=True)
            self.linear = torch.nn.Linear(4, 3)
            if kind == "weight_norm":
                torch.nn.utils.parametrizations.weight_norm(self.linear)
            elif kind == "old weight_norm":
                torch.nn.utils.weight_norm(self.linear)
            self.__dict__["again"] = self.linear.bias
            self.hidden = [torch.nn.Linear(4, 3).double()]
            self.others = torch.nn.ModuleList(self.hidden)
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind == "lstm":
                return self.lstm(x[:, None])[0][:, 0]  # type: ignore[no-any-return]
            out: torch.Tensor = self.linear(x)
            other: torch.Tensor = self.__dict__["again"] * out if kind == "stored twice" else out + self.hidden[0](x)
            return other

    assert_exact(Kept())


def test_sparse_gradients_are_added() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=True)).double()
    batch = {"x": torch.arange(7) % 4, "y": torch.arange(7) % 3}
    expected, _ = whole_gradients(model, cross_entropy, batch)
    step_of(model, devices=TWO, micro_batch_size=2)(batch)
    assert_float64(gradients_of(model), expected)


def test_a_doctor_looks_at_the_first_device_only() -> None:
    model = small()
    with anybatch.Doctor() as doctor:
        step = step_of(model, devices=TWO, recorder=doctor, micro_batch_size=2)
        for i in range(4):
            step(batch_of(9, seed=i))
    assert step.updates == 4


class Named(dict[str, Any]):
    """A dictionary of a class of its own, with something beside its items."""

    def __init__(self, *items: Any, title: str) -> None:
        super().__init__(*items)
        self.title = title

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("its items are given at once")


class Several(list[Any]):
    """A list of a class of its own."""


class Layers(NamedTuple):
    """Layers by name."""

    first: torch.nn.Module
    scale: torch.nn.Parameter


class Kept(torch.nn.Module):
    """Uses parts of itself by containers of many classes, and writes to one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4).double() for _ in range(5))
        self.scale = torch.nn.Parameter(torch.ones(4).double())
        self.named = Named({"a": self.layers[0]}, title="layers")
        self.made = defaultdict(list, {"b": [self.layers[1]]})
        self.several = Several([self.layers[2]])
        self.queue = deque([self.layers[3]], maxlen=3)
        self.tuple = Layers(self.layers[4], self.scale)
        self.seen: dict[str, int] = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["rows"] += len(x)
        assert self.named.title == "layers"
        assert self.queue.maxlen == 3
        for layer in (self.named["a"], *self.made["b"], *self.several, *self.queue, self.tuple.first):
            x = layer(x).tanh() * self.tuple.scale
        return x


def test_containers_of_classes_of_their_own_have_what_is_of_the_device() -> None:
    model = Kept()
    assert_exact(model)
    assert type(model.named) is Named
    assert model.named["a"] is model.layers[0]


class Node(dict[str, Any]):
    """A node of a tree, which knows its parent."""


class Only(deque[Any]):
    """A queue that is there once."""

    def __copy__(self) -> "Only":
        return self


class InOrder(OrderedDict[str, Any]):
    """A dictionary that is not copied."""

    def __init__(self, title: str, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.title = title

    def __copy__(self) -> "InOrder":
        raise TypeError("it is not copied")


class Linked(torch.nn.Module):
    """Has containers that refer to each other, or can't be copied by ``copy``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4).double() for _ in range(4))
        self.tree = Node(layer=self.layers[0])
        self.tree["kids"] = [Node(layer=self.layers[1], parent=self.tree), Node(parent=self.tree)]
        self.tree["kids"][1]["sibling"] = self.tree["kids"][0]
        self.queue = Only([self.layers[2]], maxlen=3)
        self.in_order = InOrder("layers", {"z": self.layers[3], "a": torch.nn.Tanh()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.tree["kids"]
        assert first["parent"] is last["parent"] is self.tree
        assert last["sibling"] is first
        assert self.queue.maxlen == 3
        assert (self.in_order.title, list(self.in_order)) == ("layers", ["z", "a"])
        for layer in (self.tree["layer"], first["layer"], *self.queue, *self.in_order.values()):
            x = layer(x).tanh()
        return x


def test_containers_that_refer_to_each_other_or_are_not_copied_are_copied_and_left_as_they_are() -> None:
    model = Linked()
    assert_exact(model)
    assert list(model.queue) == [model.layers[2]]
    assert model.in_order["z"] is model.layers[3]
    assert model.tree["kids"][0]["layer"] is model.layers[1]


class Registry(dict[str, Any]):
    """A container of the user's own class."""


def test_containers_that_refer_to_each_other_through_a_function_are_copied() -> None:
    def head(registry: Registry, layer: torch.nn.Linear, x: torch.Tensor) -> Any:
        assert registry["layer"] is layer
        return layer(x)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.registry = torch.nn.Linear(4, 3), Registry()
            self.registry["layer"] = self.linear
            self.registry["head"] = partial(head, self.registry, self.linear)

        def forward(self, x: torch.Tensor) -> Any:
            return self.registry["head"](x)

    model, other = Net(), ModelCopy(torch.device("cpu"))
    other.refresh([model])
    copied = other.translated(model)
    assert copied.registry is not model.registry
    assert copied.registry["head"].args[0] is copied.registry
    assert copied.registry["layer"] is copied.linear is not model.linear
