"""While a doctor is attached every function is the same object, and every call that works without it works with it."""

import copy
import functools
import importlib
import inspect
import io
import pickle
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

from anybatch import Doctor
from default_devices import default_device

ATTRIBUTES = ("__doc__", "__module__", "__qualname__", "__name__", "__defaults__", "__kwdefaults__", "__annotations__")


def scopes() -> dict[str, Any]:
    """What may hold an attribute that a doctor has replaced: modules and classes of torch, ``warnings`` and ``sys``."""
    for name in ("torch.optim.lr_scheduler", "torch.distributions", "torch.utils.data", "torch.amp"):
        importlib.import_module(name)
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("torch", "warnings", "sys", "threading", "traceback") or "._" in name:
            continue
        found[name] = module
        for value in list(vars(module).values()):
            if issubclass(type(value), type) and value.__module__.startswith("torch"):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


def code_of(value: Any) -> Any:
    return getattr(inspect.unwrap(value), "__code__", None) if type(value) is types.FunctionType else None


def marks(owners: dict[str, Any]) -> dict[tuple[str, str], tuple[int, Any]]:
    return {
        (owner, name): (id(value), code_of(value))
        for owner, one in owners.items()
        for name, value in list(vars(one).items())
        if not name.startswith(("_abc", "_anybatch_doctor")) and name != "next_id"  # which any hook counts on
    }


def seen_from_outside(value: Any) -> dict[str, Any]:
    facts = {name: getattr(value, name, None) for name in ATTRIBUTES}
    facts["signature"] = str(inspect.signature(value))
    facts["parameters"] = [(one.name, one.kind, one.default) for one in inspect.signature(value).parameters.values()]
    facts["source"] = inspect.getsource(inspect.unwrap(value))
    facts["flags"] = inspect.unwrap(value).__code__.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    try:
        facts["pickled"] = pickle.loads(pickle.dumps(value)) is value
    except pickle.PicklingError:  # torch gives a class of optimizers without a step that of its base, wrapped
        facts["pickled"] = False
    return facts


class Net(nn.Module):
    """A small model that keeps functions, as configured ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.attend, self.drop, self.loss = F.scaled_dot_product_attention, F.dropout, F.cross_entropy
        self.clear = torch.optim.Optimizer.zero_grad

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)[:, None]
        return self.last(self.drop(self.attend(hidden, hidden, hidden)[:, 0], 0.1, self.training))


def train(model: Any, steps: int = 12, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
        optimizer.step()


def test_nothing_of_torch_is_replaced_and_each_function_looks_as_without() -> None:
    train(nn.Linear(4, 2), 1)  # what torch loads with its first steps
    owners = scopes()
    before = marks(owners)
    changed = {key: vars(owners[key[0]]).get(key[1]) for key in before}
    plain: dict[tuple[str, str], Any] = {}
    with Doctor():
        during = marks(owners)
        exchanged = [key for key in before if key in during and during[key][1] is not before[key][1]]
    assert len(exchanged) > 60  # the recorder sees by these
    for key in exchanged:
        plain[key] = seen_from_outside(changed[key])
    with Doctor() as doctor:
        train(Net())
        during = marks(owners)
        assert not [key for key in before if key in during and during[key][0] != before[key][0]]
        for key in exchanged:
            value = vars(owners[key[0]])[key[1]]
            assert value is changed[key]
            watched = seen_from_outside(value)
            assert watched == plain[key], key
            assert watched["pickled"] or key[1] == "step"
            assert copy.deepcopy(value) is value
    assert doctor.failure == ""
    after = marks(owners)
    assert not [key for key in before if key in after and after[key] != before[key]]
    assert not [name for one in owners.values() for name in vars(one) if name.startswith("_anybatch_doctor")]


def by_keyword() -> dict[str, Callable[[], Any]]:
    """Calls of each kind of function that is seen, with all arguments by keyword."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer=optimizer, step_size=3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    x, y = torch.randn(6, 4), torch.randint(2, (6,))
    normal = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
    query = torch.randn(1, 2, 3, 4)
    load: Any = model.load_state_dict  # its faults are meant
    clear: Any = optimizer.zero_grad

    def loss() -> torch.Tensor:
        return F.cross_entropy(input=model(input=x), target=y)

    return {
        "module": lambda: nn.Module.load_state_dict(self=model, state_dict=model.state_dict(), strict=True),
        "optimizer": lambda: optimizer.load_state_dict(state_dict=optimizer.state_dict()),
        "schedule": lambda: schedule.load_state_dict(state_dict=schedule.state_dict()),
        "clear": lambda: torch.optim.Optimizer.zero_grad(self=optimizer, set_to_none=False),
        "clear module": lambda: nn.Module.zero_grad(self=model, set_to_none=True),
        "scale": lambda: scaler.scale(outputs=loss()).backward(),
        "unscale": lambda: scaler.unscale_(optimizer=optimizer),
        "step": lambda: scaler.step(optimizer=optimizer),
        "update": lambda: scaler.update(new_scale=2.0),
        "plateau": lambda: plateau.step(metrics=1.0),
        "log_prob": lambda: normal.log_prob(value=torch.zeros(2)),
        "sample": lambda: normal.sample(sample_shape=(2,)),
        "clip": lambda: nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0),
        "clip value": lambda: nn.utils.clip_grad_value_(parameters=model.parameters(), clip_value=1.0),
        "attention": lambda: F.scaled_dot_product_attention(query=query, key=query, value=query),
        "dropout": lambda: F.dropout(input=x, p=0.5, training=True),
        "backward": lambda: torch.autograd.backward(tensors=loss()),
        "closure": lambda: optimizer.step(closure=loss),
        "loader": lambda: list(DataLoader(dataset=TensorDataset(torch.ones(1, 2)), batch_size=1)),
        "too many": lambda: load(state_dict=model.state_dict(), other=1),
        "none": load,
        "twice": lambda: clear(True, set_to_none=True),
    }


def outcomes() -> Iterator[tuple[str, str]]:
    torch.manual_seed(0)
    for name, call in by_keyword().items():
        try:
            call()
        except TypeError as error:
            yield name, str(error)
        else:
            yield name, ""


def test_calls_by_keyword_and_their_errors_are_as_without() -> None:
    plain = dict(outcomes())
    with Doctor() as doctor:
        assert dict(outcomes()) == plain
    assert doctor.failure == ""
    assert [name for name, text in plain.items() if text] == ["too many", "none", "twice"]


def test_what_asks_for_the_signature_of_zero_grad_finds_its_argument() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with Doctor():
        assert "set_to_none" in inspect.signature(optimizer.zero_grad).parameters


def test_a_whole_model_goes_through_torch_save_and_deepcopy() -> None:
    model = Net()
    with Doctor() as doctor:
        train(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert loaded.loss is F.cross_entropy
        assert copy.deepcopy(model).attend is F.scaled_dot_product_attention
        bound = pickle.loads(pickle.dumps([model.zero_grad, model.__call__, model.load_state_dict]))
        assert all(isinstance(one.__self__, Net) for one in bound)
        train(loaded)
    assert doctor.failure == ""


def test_names_and_partials_that_were_made_before_and_meanwhile_are_seen_and_stay() -> None:
    before = functools.partial(F.mse_loss, reduction="sum")
    with Doctor() as doctor:
        meanwhile = functools.partial(F.mse_loss, reduction="sum")
        for loss in (before, meanwhile):
            model = nn.Linear(4, 2)
            loss(model(torch.ones(3, 4)), torch.zeros(3, 2)).backward()
        assert pickle.loads(pickle.dumps(meanwhile)).func is F.mse_loss
    assert doctor.failure == ""
    assert sum(type(fact).__name__ == "LossCall" for fact in doctor.run.facts) == 2
    assert float(meanwhile(torch.ones(2), torch.zeros(2))) == 2.0


class Attention(nn.Module):
    """A module that torch.jit can script."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        hidden = F.dropout(F.scaled_dot_product_attention(q, k, v)[:, 0], 0.1, self.training)
        out: torch.Tensor = self.out(hidden)
        return out


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize(
    "made", [torch.jit.script, lambda model: torch.jit.trace(model.eval(), torch.ones(8, 4)), torch.fx.symbolic_trace]
)
def test_what_is_scripted_or_traced_is_as_without(made: Callable[[nn.Module], Any]) -> None:
    texts = []
    for watched in (False, True):
        torch.manual_seed(0)
        with Doctor() if watched else warnings.catch_warnings():
            model = made(Attention())
            train(model, 12)
            texts.append((re.sub(r"___torch_mangle_\d+\.", "", str(model.graph)), model.out.weight.detach().tolist()))
    assert texts[0] == texts[1]


@pytest.mark.skipif(
    torch.__version__ < "2.8",
    reason="dynamo of torch 2.6 and 2.7 can't export a module whose class has another __call__",
)
def test_what_is_exported_is_as_without() -> None:
    graphs = []
    for watched in (False, True):
        with Doctor() if watched else warnings.catch_warnings():
            exported = torch.export.export(Attention().eval(), (torch.ones(8, 4),))
            graphs.append(str(exported.graph))
    assert graphs[0] == graphs[1]


class Strict(TorchFunctionMode):
    """Counts calls of torch's functions, and takes none that comes from elsewhere than the user's run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Logged(torch.Tensor):
    """A tensor that writes down what is called with it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("steps", [1, 30])
def test_a_class_of_tensors_sees_nothing_of_the_doctor(steps: int) -> None:
    lists = []
    for watched in (False, True):
        torch.manual_seed(0)
        Logged.seen.clear()
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Doctor(model, optimizer) if watched else warnings.catch_warnings():
            for _ in range(steps):
                optimizer.zero_grad()
                F.mse_loss(model(torch.randn(6, 4).as_subclass(Logged)), torch.zeros(6, 2)).backward()
                optimizer.step()
        lists.append(list(Logged.seen))
    assert lists[0] == lists[1]


@pytest.mark.parametrize("steps", [1, 12, 60])
@pytest.mark.parametrize("whole", [True, False])
def test_a_mode_that_sees_functions_sees_nothing_of_the_doctor(steps: int, whole: bool) -> None:
    lists = []
    for watched in (False, True):
        torch.manual_seed(0)
        mode = Strict()
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with Doctor(model, optimizer) if watched else warnings.catch_warnings() as doctor:
            if whole:
                with mode:
                    train(model, steps, optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    model.load_state_dict(model.state_dict())
            else:
                for _ in range(steps):
                    optimizer.zero_grad()
                    with mode:
                        output = model(torch.randn(8, 4))
                    loss = F.cross_entropy(output, torch.randint(2, (8,)))
                    with mode:
                        loss.backward()
                    optimizer.step()
        assert not watched or doctor.failure == ""  # type: ignore[union-attr]
        lists.append(mode.seen)
    assert lists[0] == lists[1]


def test_a_default_device_is_left_alone() -> None:
    with Doctor() as doctor:
        with default_device("meta"):
            assert nn.Linear(4, 2)(torch.ones(3, 4)).is_meta
            train(nn.Linear(4, 2), 2)
        with torch.device("meta"):
            model = nn.Linear(4, 2)
        model.to_empty(device="cpu")
        train(model)
    assert doctor.failure == ""
    assert doctor.run.steps == 12


def test_hooks_of_others_come_as_without() -> None:
    """As trackers of gradients, tables of layers and adapters hang them."""
    notes: list[list[Any]] = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, seen = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), list[Any]()
        with Doctor() if watched else warnings.catch_warnings():
            for name, parameter in model.named_parameters():
                parameter.register_hook(lambda g, name=name, seen=seen: seen.append((name, float(g.sum()))))
            handles = [
                one.register_forward_hook(
                    lambda m, i, o, seen=seen: seen.append((type(m).__name__, len(m._forward_hooks), tuple(o.shape)))
                )
                for one in model
            ]
            handles.append(model[0].register_forward_pre_hook(lambda m, a: (a[0] * 2,)))
            train(model)
            base = model[0]
            model[0] = nn.Sequential(base, nn.Linear(8, 8))  # as an adapter takes the place of its layer
            train(model)
            for handle in handles:
                handle.remove()
        notes.append(seen)
    assert [one for one in notes[0] if len(one) == 2] == [one for one in notes[1] if len(one) == 2]
    assert [one[0] for one in notes[0]] == [one[0] for one in notes[1]]


def test_functions_that_others_replace_meanwhile_stay_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    with Doctor() as doctor:
        own = nn.Module.load_state_dict

        def load(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append("theirs")
            return own(self, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "load_state_dict", load)
        model = nn.Linear(4, 2)
        train(model, 2)
        model.load_state_dict(model.state_dict())
    model.load_state_dict(model.state_dict())
    assert calls == ["theirs", "theirs"]
    assert nn.Module.load_state_dict is load
    assert sum(type(fact).__name__ == "Loaded" for fact in doctor.run.facts) == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_doctors_end_in_any_order(order: tuple[int, int]) -> None:
    call = inspect.unwrap(nn.Module.__call__)
    own = call.__code__
    doctors = [Doctor(), Doctor()]
    for one in doctors:
        one.attach()
    train(nn.Linear(4, 2), 2)
    doctors[order[0]].close()
    train(nn.Linear(4, 2), 2)
    doctors[order[1]].close()
    assert call.__code__ is own
    assert [one.failure for one in doctors] == ["", ""]
    assert doctors[order[1]].run.steps == 2
    train(nn.Linear(4, 2), 1)


OUTER = nn.Linear(4, 2)


class Loose(nn.Module):
    """Calls a module that it does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return OUTER(self.inner(x))


def test_a_module_outside_of_the_model_is_found_by_its_call() -> None:
    with Doctor() as doctor:
        train(Loose(), 3)
    assert doctor.failure == ""
    names = {finding.name for finding in doctor.findings}
    assert "OPT_PARAM_UNREGISTERED" in names, names


def test_arguments_of_any_name_and_errors_pass_through() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(2, 3, 1)

        def forward(self, *, module: torch.Tensor, original: torch.Tensor) -> Any:
            return self.layer(input1=module, input2=original)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    model = Named()
    with Doctor(model) as doctor:
        assert model(module=torch.ones(5, 2), original=torch.ones(5, 3)).shape == (5, 1)
        with pytest.raises(TypeError, match="unexpected keyword argument 'third'"):
            model(module=torch.ones(5, 2), original=torch.ones(5, 3), third=0)
    assert doctor.failure == ""


def failing() -> dict[str, Callable[[], Any]]:
    """Calls that end in an error, beneath functions that are seen."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Any:
        raise KeyError("of the user")

    def wrapped() -> Any:
        try:
            return model(torch.ones(3, 9))
        except RuntimeError as error:
            raise ValueError("of the user") from error

    return {
        "a model": lambda: model(torch.ones(3, 9)),
        "an error of another": wrapped,
        "a loss": lambda: F.cross_entropy(torch.ones(3, 4, requires_grad=True), torch.zeros(4).long()),
        "a dropout": lambda: F.dropout(torch.ones(3), 7.0),
        "a step": lambda: optimizer.step(closure),
        "a state": lambda: optimizer.load_state_dict({}),
        "clipping": lambda: nn.utils.clip_grad_value_(model.parameters(), "much"),  # type: ignore[arg-type]
    }


def lines_of_error(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return "".join(traceback.format_exception(error)).splitlines()
    return []


@pytest.mark.parametrize("name", failing())
def test_an_error_has_the_lines_that_it_has_without_a_doctor(name: str) -> None:
    calls = failing()
    train(nn.Linear(4, 2), 1)
    plain = lines_of_error(calls[name])
    assert plain
    with Doctor() as doctor:
        watched = lines_of_error(calls[name])
        train(nn.Linear(4, 2), 2)
    assert doctor.failure == ""
    assert not [line for line in watched if "anybatch" in line]
    assert watched == plain
