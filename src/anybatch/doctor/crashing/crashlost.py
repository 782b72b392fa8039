"""Crashes of a loss without a graph: which line of the user's cut it."""

import ast
from typing import Any

import torch

from anybatch.doctor.crashing.crashcuts import OFF, Cut, surest_cut
from anybatch.doctor.crashing.crashkinds import Told, kind, origin, quoted
from anybatch.doctor.crashing.crashlive import Live
from anybatch.doctor.crashing.crashsource import called
from anybatch.doctor.crashing.crashtwice import losses_of
from anybatch.records.events import Forward, Stepped

_INSTEAD = {
    "argmax": "a loss on the scores themselves, such as F.cross_entropy({of}, target), or a softmax",
    "argmin": "a loss on the scores themselves, or a softmin",
    "item": "the tensor itself, without .item()",
    "tolist": "the tensor itself, without .tolist()",
    "numpy": "torch's own functions instead of numpy's",
    "tensor": "torch.stack([...]) of the tensors instead of torch.tensor(...)",
    "as_tensor": "torch.stack([...]) of the tensors instead of torch.as_tensor(...)",
    "detach": "it without .detach()",
    "detach_": "it without .detach_()",
    "data": "it without .data",
    "comparison": "a smooth function such as torch.sigmoid instead of the comparison",
    "checkpoint": "checkpoint(..., use_reentrant=False)",
}


@kind(r"^element 0 of (tensors|variables) does not require grad and does not have a grad_fn")
def without_graph(live: Live, _: Any) -> Told | None:
    """Tells why the loss has no graph."""
    frame, losses = live.user, losses_of(live)
    if frame is None:
        return None
    call = live.code(frame)
    name = next((p for p, one, _ in live.named() if any(one is loss for loss in losses)), "")
    loss = name or "The loss"
    if not torch.is_grad_enabled():
        return _switched_off(live, loss)
    parameters = live.parameters()
    if parameters and not any(parameter.requires_grad for parameter in parameters.values()):
        return Told(
            name="LOSS_NO_GRAD",
            message=f"{loss} has no graph, since all {len(parameters)} parameters have requires_grad=False.",
            cause="Everything is frozen, so that there is nothing to compute a gradient for.",
            fix="Leave requires_grad on for what is to be trained: "
            f"{next(iter(live.roots))}.requires_grad_() or that of one of its layers.",
            parameters=tuple(parameters)[:10],
            tensor=name,
            evidence={"frozen": len(parameters)},
        )
    cut = surest_cut(live, frame, name)
    if (cut is None or cut.op not in {*OFF, "checkpoint"}) and _called_without(live):
        return _switched_off(live, loss)
    if cut is not None:
        return _told(live, cut, loss, name)
    if any("None of the inputs have requires_grad" in getattr(fact, "text", "") for fact in live.facts()):
        return _told(live, Cut("checkpoint", "", 0, ""), loss, name)
    return Told(
        name="LOSS_NO_GRAD",
        message=f"{loss} in {quoted(call)} has no graph: no parameter that requires a gradient is in it.",
        cause="Somewhere between the parameters and the loss the values were taken out of the graph.",
        fix="anybatch.why(lambda: <compute the loss>, model) shows where.",
        tensor=name,
    )


def _told(live: Live, cut: Cut, loss: str, name: str) -> Told:
    evidence = {"op": cut.op, **origin(cut.file, cut.line, cut.code)}
    line = f" in line {cut.line}" if cut.line else ""
    if cut.op in OFF:
        return Told(
            name="NO_GRAD_ACTIVE",
            message=f"{loss} has no graph, since {quoted(cut.code)}{line} switches autograd off for its forward.",
            cause="Under no_grad and inference_mode no graph is recorded.",
            fix=f"Take the forward that is trained out of {quoted(cut.code)}.",
            module=cut.module,
            tensor=name,
            evidence=evidence,
        )
    if cut.op == "checkpoint":
        return Told(
            name="CKPT_NO_INPUT_GRAD",
            message=f"{loss} has no graph, since a reentrant checkpoint{line} gets no input that requires a gradient.",
            cause="A reentrant checkpoint looks at its inputs alone; the parameters inside of it get no gradient.",
            fix=f"{cut.code.replace('use_reentrant=True', 'use_reentrant=False')}"
            if "use_reentrant=True" in cut.code
            else "checkpoint(..., use_reentrant=False)",
            module=cut.module,
            tensor=name,
            evidence=evidence,
        )
    instead = _INSTEAD.get(cut.op, f"something that can be differentiated instead of {cut.op}")
    return Told(
        name="LOSS_NO_GRAD",
        message=f"{loss} has no graph: {cut.op} in {quoted(cut.code)}{line} takes "
        f"{quoted(cut.of) or 'its value'} out of it.",
        cause=f"The result of {cut.op} can't be differentiated, and nothing else in {loss} depends on a parameter.",
        fix=f"Use {instead.format(of=cut.of or 'scores')}.",
        module=cut.module,
        tensor=cut.of or name,
        evidence=evidence,
    )


def _called_without(live: Live) -> bool:
    """Whether no forward since the last step was called with gradients on."""
    grads: list[bool] = []
    for fact in live.facts():
        if isinstance(fact, Forward):
            grads.append(fact.grad)
        elif isinstance(fact, Stepped):
            grads.clear()
    return bool(grads) and not any(grads)


def _switched_off(live: Live, loss: str) -> Told:
    found = ("", 0, "")
    for frame in live.users:
        source = live.source(frame)
        for node in () if source is None else ast.walk(source.tree):
            if called(node) not in OFF or not isinstance(node, ast.Call) or found[1]:
                continue
            if torch.is_grad_enabled() or called(node) != "set_grad_enabled" or "False" in ast.unparse(node):
                found = (frame.file, node.lineno, source.text(node.lineno)) if source else found
    mode = "inference mode" if torch.is_inference_mode_enabled() else "gradients off"
    when = "was switched off in the forward" if torch.is_grad_enabled() else f"is switched off ({mode})"
    return Told(
        name="NO_GRAD_ACTIVE",
        message=f"{loss} has no graph, since autograd {when}"
        f"{f' by {quoted(found[2])} in line {found[1]}' if found[1] else ''}.",
        cause="While autograd is off no graph is recorded.",
        fix="torch.set_grad_enabled(True) before the forward that is trained.",
        evidence=origin(*found),
    )


@kind(r"^grad can be implicitly created only for scalar outputs")
def not_a_scalar(live: Live, _: Any) -> Told | None:
    """Tells the shape of a loss that is no scalar."""
    frame, losses = live.user, losses_of(live)
    if frame is None or not losses:
        return None
    loss = losses[0]
    name = next((path for path, one, _ in live.named() if one is loss), "loss")
    code = live.code(frame)
    better = code.replace(f"{name}.backward(", f"{name}.mean().backward(")
    return Told(
        name="LOSS_NOT_SCALAR",
        message=f"{quoted(name)} has the shape {list(loss.shape)}; a backward without a gradient needs one number.",
        cause='A loss with reduction="none", or several losses, were not made into one number.',
        fix=better if better != code else f"{name}.mean().backward()",
        tensor=f"{name} {list(loss.shape)}",
        evidence={"shape": list(loss.shape)},
    )
