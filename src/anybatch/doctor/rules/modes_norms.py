"""Rules of the family modes: batch norms that drift, and batch norms with too little to average."""

from collections.abc import Iterator
from math import prod

from anybatch.doctor.rules.courses import updates
from anybatch.doctor.rules.naming import (
    at_line,
    counted,
    listed,
    module_code,
    names_of,
    qualified,
    root_variable,
    verb,
)
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import ever_touched, passes, written
from anybatch.records.events import Forward
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import Replicas
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, Buffers
from anybatch.records.tables import ModuleFacts

FEWEST = 4
"""With fewer values per channel, the variance of a batch has a relative error of more than 80 %: sqrt(2 / (n - 1))."""


@rule("AB455", "FROZEN_BN_DRIFT", "warning")
def _frozen_bn_drift(run: Run) -> Iterator[Finding]:
    moved = written(run)
    for root, facts in run.roots.items():
        own = {one.name: one.parameters for one in facts.modules}
        samples = [one for one in run.of(Buffers) if one.root == root and one.frozen]
        begin = samples[0].at if samples else 0  # it may have been trained before it was frozen, as a teacher is
        late = [one.touched for one in passes(run) if one.touched is not None and one.fact.at > begin]
        touched = frozenset().union(*late)
        if ever_touched(run) & frozenset().union(*own.values()) and _is_trained_no_more(own, touched):
            samples = samples[1:]  # which may show what moved before it was frozen
        names: dict[str, int] = {}
        for sample in samples:
            for name in sample.frozen:
                held = set(own.get(name, ()))
                if held and not held & (touched | moved) and not _copied(run, root, moved):
                    names[name] = names.get(name, 0) + 1
        if not names or max(names.values()) < min(2, len(samples)) or not updates(run):
            continue
        every = list(names)
        if all(_behind_trained(run, root, name, touched) for name in every):
            continue
        parent = _common(every)
        call = next((one for one in run.of(Forward) if one.root == root and one.training), None)
        variable = root_variable(run, root)
        yield Finding(
            message=f"The running statistics of {listed(qualified(run, root, one) for one in every)} change although "
            f"{verb(len(every), 'its', 'their')} parameters are frozen.",
            place=Place(
                module=qualified(run, root, every[0] if len(every) == 1 else parent),
                parameters=names_of(run, [number for name in every for number in own[name]]),
                file=call.file if call else "",
                line=call.line if call else 0,
            ),
            fix=f"{module_code(run, root, parent)}.eval()  # after each {variable}.train()"
            if parent
            else f"for m in {variable}.modules(): m.eval() if isinstance(m, nn.BatchNorm2d) else None",
            cause="requires_grad_(False) does not stop running statistics; only evaluation mode does.",
            evidence={"modules": len(every), "samples": max(names.values())},
            step=samples[0].step,
            at=samples[0].at,
        )


def _is_trained_no_more(own: dict[str, tuple[int, ...]], touched: frozenset[int]) -> bool:
    return not touched & frozenset().union(*own.values())


def _behind_trained(run: Run, root: int, name: str, touched: frozenset[int]) -> bool:
    """Whether a layer that is trained runs before a norm, whose statistics then have to follow it."""
    order = {sample.module: sample.order for one in run.of(Activations) if one.root == root for sample in one.modules}
    if name not in order:
        return False
    return any(
        order.get(one.name, order[name]) < order[name] and set(one.parameters) & touched
        for one in run.roots[root].modules
    )


def _copied(run: Run, root: int, moved: frozenset[int]) -> bool:
    """Whether most parameters of a root are written by the user's code, as those of a target network."""
    own = [number for number, one in run.parameters.items() if one.root == root and not one.requires_grad]
    return bool(own) and sum(number in moved for number in own) * 2 > len(own)


def _common(names: list[str]) -> str:
    """The innermost module above some modules."""
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) if len(names) > 1 else names[0]


@rule("AB456", "BN_TINY_BATCH", "warning")
def _bn_tiny_batch(run: Run) -> Iterator[Finding]:
    spread = any(one.world > 1 for one in run.of(Replicas))
    counts: dict[tuple[int, str], list[tuple[Activations, int, str]]] = {}
    for one in run.of(Activations):
        kinds = {module.name: module.kind for module in run.roots[one.root].modules} if one.root in run.roots else {}
        for sample in one.modules:
            shape = sample.input_shape or sample.shape
            if kinds.get(sample.module) != "batch_norm" or not sample.training or len(shape) < 2:
                continue
            if spread and "Sync" in sample.cls:
                continue
            counts.setdefault((one.root, sample.module), []).append((one, shape[0] * prod(shape[2:]), sample.cls))
    tiny = {
        key: found
        for key, found in counts.items()
        if len(found) >= 3 and sum(count < FEWEST for _, count, _ in found) * 2 > len(found)
    }
    by_root: dict[int, list[str]] = {}
    for root, name in tiny:
        by_root.setdefault(root, []).append(name)
    for root, names in by_root.items():
        found = tiny[root, names[0]]
        first = next(entry for entry in found if entry[1] < FEWEST)
        call = next((one for one in run.of(Forward) if one.at == first[0].forward), None)
        file, line = (call.file, call.line) if call is not None else ("", 0)
        yield Finding(
            message=f"{listed(names)} {verb(len(names), 'averages', 'average')} over {counted(first[1], 'value')} per "
            f"channel{at_line(file, line)}.",
            place=Place(module=qualified(run, root, names[0]), file=file, line=line),
            fix=f"{module_code(run, root, names[0])} = nn.GroupNorm(groups, channels)  # or a larger batch",
            cause="The batch is too small for statistics of it.",
            evidence={"values": [count for _, count, _ in found[:10]], "modules": len(names)},
            step=found[2][0].step,
            at=first[0].at,
        )


MOST_MOMENTUM = 0.9
"""torch's momentum is the share of the last batch; that of other libraries is the share of what was there before."""


@rule("AB457", "BN_MOMENTUM", "warning")
def _bn_momentum(run: Run) -> Iterator[Finding]:
    for root, facts in run.roots.items():
        found = [(one, momentum) for one in facts.modules if (momentum := _overwriting(one)) is not None]
        call = next((one for one in run.of(Forward) if one.root == root and one.trained and one.grad), None)
        if not found or call is None:
            continue
        names, (first, value) = [qualified(run, root, one.name) for one, _ in found], found[0]
        yield Finding(
            message=f"{listed(names)} {verb(len(names), 'has', 'have')} momentum={value:g}: of the running statistics "
            f"only {1 - value:.2g} is kept at each batch.",
            place=Place(module=names[0] if len(names) == 1 else _common(names), file=call.file, line=call.line),
            fix=f"{module_code(run, root, first.name)}.momentum = {round(1 - value, 6):g}",
            cause="torch's momentum is the share of the new batch; elsewhere it is that of what was there before.",
            evidence={"momentum": value, "modules": len(names)},
            step=call.step,
            at=call.at,
        )


def _overwriting(module: ModuleFacts) -> float | None:
    """The momentum of a batch norm with which nearly nothing is kept, ``None`` for others."""
    value = module.options.get("momentum") if module.kind == "batch_norm" else None
    tracks = module.options.get("track_running_stats", True)
    return float(value) if isinstance(value, float) and MOST_MOMENTUM <= value < 1 and tracks else None
