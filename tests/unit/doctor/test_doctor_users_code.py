"""Code of the user's that the doctor comes across does what it does without: classes, handlers, containers, modes."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch import Doctor
from anybatch.doctor.ask.asking import run_probes
from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.frames import is_interruption
from anybatch.doctor.recording.journal import Journal
from anybatch.records.events import Stepped

Batch = dict[str, torch.Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(1)


def train(
    model: nn.Module,
    steps: int = 20,
    *,
    optimizer: Any = None,
    clip: Callable[[], Any] = lambda: None,
    step: Callable[[], Any] | None = None,
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    x, y = data()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        clip()
        (step or optimizer.step)()
        losses.append(loss.item())
    return losses


def same_with_and_without(program: Callable[[], Any], **options: Any) -> Doctor:
    """Runs a program with and without a doctor; what it gives, and the random state, are to be the same."""
    torch.manual_seed(0)
    expected = program(), torch.get_rng_state().tolist()
    torch.manual_seed(0)
    with Doctor(**options) as doctor:
        found = program(), torch.get_rng_state().tolist()
    assert found == expected
    assert doctor.failure == ""
    return doctor


def test_a_class_is_pickled_with_its_code_as_it_is_without_the_doctor() -> None:
    pickle = pytest.importorskip("cloudpickle")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x)
            return result

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Slower(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch: Any = None) -> None:
            super().step()

    with Doctor() as doctor:
        model = Net()
        optimizer = Own(model.parameters(), lr=0.1)
        scheduler = Slower(optimizer, 5)
        train(model, optimizer=optimizer)
        scheduler.step()
        states = [pickle.dumps(one) for one in (model, optimizer, scheduler)]
    assert doctor.failure == ""
    copy, _, _ = [pickle.loads(state) for state in states]
    assert torch.equal(copy(data()[0]), model(data()[0]))


class Augmenting(dict[str, torch.Tensor]):
    """Draws whenever it is read."""

    def __getitem__(self, key: str) -> torch.Tensor:
        value = super().__getitem__(key)
        return value + 0.1 * torch.randn_like(value) if key == "x" else value

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


class Drawing(list[torch.Tensor]):
    """Draws whenever it is gone through."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for value in super().__iter__():
            yield value + 0.1 * torch.randn_like(value)


@pytest.mark.parametrize("kind", [Augmenting, Drawing])
def test_containers_of_the_user_s_are_not_read(kind: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.kept = kind(x=torch.ones(2)) if kind is Augmenting else kind([torch.ones(2)])

        def forward(self, batch: Any) -> torch.Tensor:
            x, y = (batch["x"], data()[1]) if kind is Augmenting else (next(iter(batch)), data()[1])
            return F.cross_entropy(self.inner(x), y)

    def program() -> list[float]:
        model, losses = Model(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            optimizer.zero_grad()
            batch = kind(x=data()[0]) if kind is Augmenting else kind([data()[0]])
            loss = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    same_with_and_without(program, every=1)


class TimeIsUp(Exception):
    """Of a signal handler."""


def on_alarm(*_: Any) -> None:
    raise TimeIsUp


class Handler:
    """Handles signals as an object, and with a method."""

    def __call__(self, *_: Any) -> None:
        raise TimeIsUp

    def handle(self, *_: Any) -> None:
        raise TimeIsUp


@pytest.mark.parametrize("handler", [on_alarm, Handler(), Handler().handle], ids=["function", "object", "method"])
def test_what_a_signal_handler_raises_in_the_doctor_reaches_the_user(
    handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        emit, calls = Journal.emit, [0]

        def interrupted(self: Any, fact: Any) -> int:
            calls[0] += 1
            if calls[0] == 5:
                signal.raise_signal(signal.SIGUSR1)
            return emit(self, fact)

        monkeypatch.setattr(Journal, "emit", interrupted)
        with Doctor() as doctor:
            with pytest.raises(TimeIsUp):
                train(net())
            assert len(train(net())) == 20
        assert doctor.failure.startswith("TimeIsUp")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_errors_in_the_doctor_are_its_own() -> None:
    with pytest.raises(ValueError, match="on purpose") as raised:
        raise ValueError("on purpose")
    assert not is_interruption(raised.value)
    assert is_interruption(KeyboardInterrupt())


def test_graphs_of_fx_are_the_same_once_a_layer_of_torch_was_a_model() -> None:
    def program() -> list[str]:
        nn.Linear(8, 3)(torch.ones(1, 8)).sum().backward()
        train(net())
        return [f"{node.op} {node.target}" for node in torch.fx.symbolic_trace(net()).graph.nodes]

    same_with_and_without(program)


def test_a_call_of_all_modules_that_is_replaced_later_sees_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> int:
        model, calls = net(), [0]
        train(model)
        plain: Any = nn.Module.__call__

        def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return plain(module, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "__call__", counted)
            train(model)
        return calls[0]

    same_with_and_without(program)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_the_step_of_an_optimizer_may_be_compiled(optimizer: Any) -> None:
    def program() -> list[float]:
        torch._dynamo.reset()
        model = net()
        own = optimizer(model.parameters(), lr=0.01)
        step = torch.compile(own.step, backend="eager")
        return train(model, optimizer=own, step=step)

    doctor = same_with_and_without(program)
    assert doctor.run is not None
    assert doctor.run.steps == 20


def test_clipping_may_be_compiled_as_a_whole() -> None:
    def program() -> list[float]:
        torch._dynamo.reset()
        model = net()
        clip = torch.compile(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), backend="eager", fullgraph=True)
        return train(model, clip=clip)

    try:
        program()
    except torch._dynamo.exc.Unsupported:
        pytest.skip("this version of torch can't compile clipping as a whole")
    same_with_and_without(program)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_a_model_on_meta_meets_no_error_of_the_doctor_s(clip: Any) -> None:
    with Doctor(every=1) as doctor, torch.device("meta"):
        model = nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            optimizer.zero_grad()
            F.mse_loss(model(torch.empty(4, 8)), torch.empty(4, 3)).backward()
            clip(model.parameters(), 1.0)
            optimizer.step()
    assert doctor.failure == ""
    assert [finding.name for finding in doctor.findings if finding.severity != "info"] == []


def test_nor_does_one_of_fake_tensors() -> None:
    with Doctor(every=1) as doctor, FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            optimizer.zero_grad()
            F.mse_loss(model(torch.empty(4, 8)), torch.empty(4, 3)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert doctor.failure == ""


class Strict(torch.Tensor):
    """Refuses functions that a user's class may not know."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in (
            "reshape",
            "norm",
            "clone",
            "aminmax",
            "equal",
            "isfinite",
            "sum",
            "any",
            "item",
        ):
            raise NotImplementedError(f"strict {func.__name__}")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Mixed(nn.Module):
    """Has a parameter that is strict, and gives a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 3).as_subclass(Strict))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (self.inner(x) @ self.weight).as_subclass(torch.Tensor)
        return result


@pytest.mark.parametrize("options", [{}, {"every": 1}])
def test_a_parameter_of_a_class_that_refuses_functions_is_read_without_them(options: dict[str, int]) -> None:
    same_with_and_without(lambda: train(Mixed(), 40), **options)


class Frozen(type):
    """Has its classes keep what they have."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError("class is frozen")

    def __delattr__(cls, name: str) -> None:
        raise TypeError("class is frozen")


def test_a_class_that_takes_no_attributes() -> None:
    class Model(nn.Sequential, metaclass=Frozen):
        pass

    def program() -> list[float]:
        torch.manual_seed(0)
        return train(Model(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))

    doctor = same_with_and_without(program)
    assert doctor.run is not None
    assert doctor.run.steps == 20
    assert "__call__" not in vars(Model)


class OwnParameters(nn.Module):
    """Has methods of its own by the names of torch's, as nets of meta-learners do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.all = nn.ParameterList(self.inner.parameters())
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) * self.scale
        return result

    def parameters(self) -> nn.ParameterList:  # type: ignore[override]
        return self.all

    def buffers(self) -> list[torch.Tensor]:  # type: ignore[override]
        return []


def test_a_net_may_have_a_method_parameters_of_its_own() -> None:
    doctor = same_with_and_without(lambda: train(OwnParameters()))
    assert {"inner.0.weight", "inner.3.bias"} <= {one.name for one in doctor.run.parameters.values()}
    assert not [one for one in run_probes(doctor, active=True) if "Error" in one.detail]
    assert doctor.failure == ""


class WithoutRate(torch.optim.Optimizer):
    """Keeps its learning rate elsewhere than in its groups, as those do that end with the step of another one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()


def test_an_optimizer_may_have_no_rate_in_its_groups() -> None:
    def program() -> list[float]:
        model = net()
        return train(model, optimizer=WithoutRate(model.parameters()))

    doctor = same_with_and_without(program)
    assert {one.lrs for one in doctor.run.of(Stepped)} == {()}
    assert not [one for one in diagnosis(doctor.run).findings if one.code.startswith("AB50")]
