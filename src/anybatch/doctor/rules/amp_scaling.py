"""Rules of the family amp: losses that are scaled, and gradients that are not unscaled."""

from collections.abc import Iterator

from anybatch.doctor.rules.naming import at_line, counted, listed, names_of, optimizer_variable, place_of
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import stepping, windows_of
from anybatch.records.events import Backward, Scaler
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, Norms


@rule("AB404", "GRAD_UNDERFLOW", "warning", explains=("LR_TOO_LOW", "VANISHING"))
def _grad_underflow(run: Run) -> Iterator[Finding]:
    if any(one.scaled for one in run.of(Backward)) or any(True for _ in run.of(Scaler)):
        return
    half = {number for number, one in run.parameters.items() if one.dtype == "float16"}
    autocast = any(sample.dtype == "float16" for one in run.of(Activations) for sample in one.modules)
    if not half and not autocast:
        return
    seen: list[tuple[Norms, list[int], int]] = []
    for sample in run.of(Norms):
        known = [
            (number, zeros)
            for number, zeros, grad in zip(sample.parameters, sample.grad_zeros, sample.grad, strict=False)
            if zeros is not None
            and grad is not None
            and (one := run.parameters.get(number)) is not None
            and len(one.shape) >= 2
            and one.role != "embedding"
            and (autocast or number in half)
        ]
        lost = [number for number, zeros in known if zeros > 0.5]
        if known and len(lost) * 2 > len(known):
            seen.append((sample, lost, len(known)))
    if len(seen) < 3:
        return
    sample, lost, total = seen[0]
    names = names_of(run, lost)
    yield Finding(
        message=f"In {len(lost)} of {total} weight matrices ({listed(names)}) more than half of the gradient is "
        "exactly zero: float16 without a scaled loss.",
        place=place_of(run, lost, optimizer=sample.optimizer),
        fix=f"scaler.scale(loss).backward(); scaler.step({optimizer_variable(run, sample.optimizer)}); "
        "scaler.update()  # or torch.bfloat16",
        cause="float16 has no numbers below 6e-8, so that small gradients become zero.",
        evidence={"matrices": len(lost), "of": total, "samples": len(seen)},
        step=seen[2][0].number,
        at=sample.at,
    )


@rule(
    "AB405",
    "STEP_NOT_UNSCALED",
    "error",
    explains=("LR_TOO_HIGH", "EXPLODING", "NAN_IN_FORWARD", "CLIP_ALWAYS_ON", "CLIP_BEFORE_UNSCALE"),
)
def _step_not_unscaled(run: Run) -> Iterator[Finding]:
    unscaled = {one.optimizer for one in run.of(Scaler) if one.call in ("unscale_", "step")}
    for optimizer in stepping(run):
        found = [one for one in windows_of(run, optimizer) if one.step is not None and one.used]
        bad = [
            one
            for one in found
            if one.step is not None
            and one.step.by == "step"
            and not one.step.edited
            and all(back.fact.scaled for back in one.used)
        ]
        if optimizer in unscaled or len(bad) < 2 or len(bad) * 2 < len(found):
            continue
        step, variable = bad[0].step, optimizer_variable(run, optimizer)
        if step is None:
            continue
        yield Finding(
            message=f"{variable}.step(){at_line(step.file, step.line)} uses gradients of a scaled loss that nothing "
            f"has unscaled, at {counted(len(bad), 'step')}.",
            place=Place(optimizer=variable, file=step.file, line=step.line),
            fix=f"scaler.step({variable}); scaler.update()  # instead of {variable}.step()",
            cause="scaler.scale(loss) multiplies all gradients; only scaler.step or scaler.unscale_ divides them.",
            evidence={"steps": len(bad), "of": len(found)},
            step=step.number,
            at=step.at,
        )


@rule("AB406", "SCALER_NOT_UPDATED", "warning", explains=("STEP_TWICE_SCALER",))
def _scaler_not_updated(run: Run) -> Iterator[Finding]:
    calls = [one for one in run.of(Scaler) if one.call == "step"]
    if any(one.call == "update" for one in run.of(Scaler)):
        return
    for optimizer in sorted({one.optimizer for one in calls}):
        own = [one for one in calls if one.optimizer == optimizer]
        if len(own) < 2:
            continue
        variable = optimizer_variable(run, optimizer)
        yield Finding(
            message=f"scaler.step({variable}){at_line(own[0].file, own[0].line)} was called {len(own)} times and "
            "scaler.update() never: the scale stays as it is.",
            place=Place(optimizer=variable, file=own[0].file, line=own[0].line),
            fix=f"scaler.update()  # after scaler.step({variable}){at_line(own[0].file, own[0].line)}",
            cause="Only update() makes the scale smaller after an overflow and larger after many steps without one.",
            evidence={"steps": len(own), "scale": own[-1].scale},
            step=own[1].step,
            at=own[0].at,
        )
