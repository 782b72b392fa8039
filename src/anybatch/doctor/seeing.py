"""Operations as a mode of torch sees them: the call before it runs, and its result."""

from typing import Any

from torch.overrides import TorchFunctionMode


class Seeing(TorchFunctionMode):
    """Is shown each operation that Python calls while it is entered; nothing of them is changed."""

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Is given a call that is about to run; what it returns goes to ``after``, unless it is ``None``."""
        raise NotImplementedError

    def after(self, begun: Any, result: Any) -> None:
        """Is given what ``before`` returned, and the result of the call."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        begun = self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        if begun is not None:
            self.after(begun, result)
        return result


def name_of(func: Any) -> tuple[str, str]:
    """What an operation is called, and for a property whether it is read or set: ``"__get__"`` or ``"__set__"``."""
    name = getattr(func, "__name__", "")
    return (getattr(func.__self__, "__name__", ""), name) if name in ("__get__", "__set__") else (name, "")


def writes(name: str, kwargs: Any) -> bool:
    """Whether an operation writes to a tensor that it is given."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or "out" in kwargs
