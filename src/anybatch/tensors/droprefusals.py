"""What drops elements out by itself, where no mask can be given to it; each is refused with the way out."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from anybatch.errors import NotSplittable

_NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def place_of_call() -> tuple[str, str]:
    """Where the user's code is: the qualified name of the module, if one is running, and the line."""
    modules: list[torch.nn.Module] = []
    line, frame = "", sys._getframe(1)
    while frame is not None:
        name, this = frame.f_code.co_filename, frame.f_locals.get("self")
        if isinstance(this, torch.nn.Module) and not (modules and modules[-1] is this):
            modules.append(this)
        if not line and not name.startswith(_NOT_THE_USERS):
            line = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    if not modules:
        return "", line
    name = next((name for name, module in modules[-1].named_modules() if module is modules[0]), "")
    return name, f"{name or type(modules[0]).__name__} at {line}"


def refuse_unseen(model: torch.nn.Module) -> None:
    """Refuses a model, before anything runs, of which a module would drop elements where nothing else sees it.

    What a model calls by hand, such as fused attention, is refused when it runs.

    Args:
        model: the model, in the mode in which it will run.

    Raises:
        NotSplittable: names the modules and what to do.

    Example:
        >>> refuse_unseen(torch.nn.LSTM(3, 4, num_layers=2, dropout=0.1).eval())
        >>> refuse_unseen(torch.nn.LSTM(3, 4, num_layers=2, dropout=0.1))
        Traceback (most recent call last):
        anybatch.errors.NotSplittable: 'model' is nn.LSTM, whose dropout between layers is drawn within the function...
    """
    found = [(name or "model", *reason) for name, module in model.named_modules() if (reason := _reason(module))]
    if found:
        text = "; ".join(f"{name!r} is {what}, whose {does}. {way}" for name, what, does, way in found)
        raise NotSplittable(text, modules=[name for name, *_ in found])


def _reason(module: torch.nn.Module) -> tuple[str, str, str] | None:
    if isinstance(module, torch.jit.ScriptModule):
        dropping = [
            part for part in module.modules() if "Dropout" in getattr(part, "original_name", "") and part.training
        ]
        return ("a script", "dropout is not seen", "Use the module that it was made from") if dropping else None
    if not module.training:
        return None
    kind = f"nn.{type(module).__name__}"
    if isinstance(module, torch.nn.MultiheadAttention) and module.dropout > 0:
        return kind, *_ATTENTION
    if isinstance(module, torch.nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
        return kind, *_LAYERS
    if isinstance(module, torch.nn.RReLU):
        return kind, *_SLOPES
    return None


_ATTENTION = (
    "dropout of attention weights is drawn within the function, so that it depends on the split",
    "Set its dropout to 0 and keep nn.Dropout around it; or write attention as softmax, F.dropout and a product",
)
_LAYERS = (
    "dropout between layers is drawn within the function, so that it depends on the split",
    "Use modules of one layer with nn.Dropout between them",
)
_SLOPES = ("slopes are drawn within the function, so that they depend on the split", "Use nn.LeakyReLU or nn.PReLU")


def _refuse(what: str, does: str, way: str) -> None:
    module, where = place_of_call()
    raise NotSplittable(f"{what}: its {does} (in {where}). {way}", modules=[module] if module else [])


def _fused_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any
) -> None:
    if dropout_p > 0:
        _refuse(f"got scaled_dot_product_attention with dropout_p={dropout_p}", *_ATTENTION)


def _multi_head_attention(*args: Any, training: bool = True, dropout_p: float | None = None, **_: Any) -> None:
    rate = args[10] if dropout_p is None else dropout_p  # the places that the function itself gives them
    training = args[13] if len(args) > 13 else training
    if training and rate > 0:
        _refuse(f"got multi_head_attention_forward with dropout_p={rate}", *_ATTENTION)


def _recurrent(*args: Any, **_: Any) -> None:
    first = next((place for place, value in enumerate(args) if isinstance(value, bool)), len(args))
    layers, rate, training = (*args[first + 1 : first + 4], 1, 0.0, False)[:3]
    if training and rate > 0 and layers > 1:
        _refuse(f"got a recurrent network of {layers} layers with dropout={rate}", *_LAYERS)


def _random_slopes(
    input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any, **__: Any
) -> None:
    if training and lower != upper:
        _refuse("got rrelu with training=True", *_SLOPES)


REFUSED: dict[Any, Callable[..., None]] = {
    F.scaled_dot_product_attention: _fused_attention,
    F.multi_head_attention_forward: _multi_head_attention,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    **dict.fromkeys((F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_), _random_slopes),
}
