"""What is found out about a head: its counts, what ``check`` says, and what it makes of ``num_items_in_batch``."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from architecture_models import ROWS, SAMPLES, Case
from torch import Tensor, nn

import anybatch

MICRO = 3  # samples in a micro-batch: seven samples are three, three and one
EXACT = 1e-10
_LOW = (torch.float32, torch.bfloat16, torch.float16)


class InFloat64(torch.overrides.TorchFunctionMode):
    """Keeps float64 where a model asks for float32 by name, as most losses do for their logits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*(_raised(a) for a in args), **{name: _raised(value) for name, value in (kwargs or {}).items()})


def _raised(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value


Gradient = dict[str, Tensor]


def gradient_after(model: nn.Module, work: Callable[[], Any]) -> Gradient:
    """The gradient that some work leaves in the parameters, which begin without one."""
    model.zero_grad(set_to_none=True)
    work()
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def relative_error(one: Gradient, truth: Gradient) -> float:
    """The distance over all parameters together, relative to the truth."""
    size = math.sqrt(sum(float(value.square().sum()) for value in truth.values()))
    names = {*one, *truth}
    zero = torch.zeros(())
    apart = sum(float((one.get(name, zero) - truth.get(name, zero)).square().sum()) for name in names)
    return math.sqrt(apart) / size if size else math.inf


def errors_by_count(case: Case, truth: Gradient) -> tuple[dict[str, float], str]:
    """The error of the gradient in micro-batches with each count, and why a split is refused if it is."""
    found: dict[str, float] = {}
    refused = ""
    for code, count in case.counts.items():

        def work(count: Any = count, verify: Any = "off") -> None:
            anybatch.backward(case.model, case.loss, case.batch, micro_batch_size=MICRO, count=count, verify=verify)

        try:
            found[code] = relative_error(gradient_after(case.model, work), truth)
            if found[code] <= EXACT:  # then a proof must not stop it
                gradient_after(case.model, lambda work=work: work(verify="first"))  # type: ignore[misc]
        except anybatch.AnyBatchError as error:
            case.model.zero_grad(set_to_none=True)
            refused = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found, refused


def parts_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The micro-batches of the hand-written loop."""
    return [
        {name: value[at : at + MICRO] if isinstance(value, Tensor) else value for name, value in batch.items()}
        for at in range(0, ROWS, MICRO)
    ]


def items_of(case: Case) -> Tensor | None:
    """What the Trainer of Transformers 5.23 counts: labels that are not -100, shifted for causal losses."""
    labels = case.batch.get("labels")
    if not isinstance(labels, Tensor):
        return None
    losses = importlib.import_module("transformers.loss.loss_utils")
    loss = losses.LOSS_MAPPING.get(getattr(case.model, "loss_type", None))
    is_shifted = loss is losses.ForCausalLMLoss and not getattr(case.model.config, "is_encoder_decoder", False)
    return (labels[..., 1:] if is_shifted else labels).ne(-100).sum()


def takes_items(model: nn.Module) -> bool:
    """Whether the Trainer gives ``num_items_in_batch`` to this model, and then does not divide itself."""
    own = getattr(model, "accepts_loss_kwargs", None)
    if own is not None:
        return bool(own)
    return any(p.kind == p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def use_of_items(case: Case) -> str:
    """What the head does with ``num_items_in_batch``: ``used``, ``in part``, ``ignored`` or ``not taken``."""
    if not takes_items(case.model):
        return "not taken"
    with torch.no_grad():
        try:
            plain, one, two = (
                float(case.loss(case.model, case.batch, **given)) for given in ({}, _items(7), _items(14))
            )
        except TypeError as error:
            return f"fails: {str(error).splitlines()[0][:80]}"
    if abs(one - two) <= 1e-9 * abs(one):
        return "ignored" if abs(one - plain) <= 1e-9 * abs(plain) else "other"
    return "used" if abs(one - 2 * two) <= 1e-9 * abs(one) else "in part"


def _items(number: int) -> dict[str, Tensor]:
    return {"num_items_in_batch": torch.tensor(number)}


def trainers_error(case: Case, truth: Gradient) -> float | None:
    """The error of what the Trainer does by itself: its count to heads that seem to take it, else equal shares."""
    number = items_of(case)
    parts = parts_of(case.batch)

    def work() -> None:
        for part in parts:
            if takes_items(case.model) and number is not None:
                case.loss(case.model, part, num_items_in_batch=number).backward()
            else:
                (case.loss(case.model, part) / len(parts)).backward()

    try:
        return relative_error(gradient_after(case.model, work), truth)
    except TypeError:
        case.model.zero_grad(set_to_none=True)
        return None


def checked(case: Case, code: str) -> dict[str, Any]:
    """What ``anybatch.check`` says with a count."""
    certificate = anybatch.check(case.model, case.loss, case.batch, micro_batch_size=MICRO, count=case.counts[code])
    return {
        "exact": certificate.exact,
        "error": _number(certificate.error),
        "dtype": certificate.dtype,
        "reasons": [
            {"code": r.code, "where": r.where, "class": r.evidence.get("class", ""), "remedy": (*r.remedies, "")[0]}
            for r in certificate.reasons
        ],
        "notes": [note.code for note in certificate.notes],
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def row_of(case: Case) -> dict[str, Any]:
    """All that is found out about one head."""
    with InFloat64():
        truth = gradient_after(case.model, lambda: case.loss(case.model, case.batch).backward())
        again = gradient_after(case.model, lambda: case.loss(case.model, case.batch).backward())
        errors, refused = errors_by_count(case, truth)
        has_items = hasattr(case.model, "config")
        use = use_of_items(case) if has_items else ""
        trainer = trainers_error(case, truth) if has_items else None
    exact = [code for code, error in errors.items() if error <= EXACT]
    asked = list(dict.fromkeys([SAMPLES, *exact[:1]]))
    said = {code: checked(case, code) for code in asked}
    return {
        "class": case.name,
        "parameters": sum(p.numel() for p in case.model.parameters()),
        "errors": {code: _number(error) for code, error in errors.items()},
        "refused": refused,
        "repeats": relative_error(again, truth) <= EXACT,
        "exact": exact,
        "items": use,
        "trainer": None if trainer is None else _number(trainer),
        "check": said,
        "agrees": all(said[code]["exact"] == (code in exact) for code in asked),
    }
