"""Does each faulty program show its fault, and its repaired twin not? Asked without the doctor.

python benchmarks/doctor/symptoms.py
python benchmarks/doctor/symptoms.py f07 r
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable

import click
import torch
from judging import Program, programs
from observing import Observation, observe

Symptom = Callable[[Observation], bool]


def differ(one: Observation, other: Observation, at: int = 0, share: float = 0.01) -> bool:
    """Whether a gradient of two programs that began alike is not the same at a step."""
    first, second = one.steps[at].norms, other.steps[at].norms
    return any(abs(a - b) > share * max(a, b) for a, b in zip(first, second, strict=True))


def last(seen: Observation, after: str = "loss") -> float:
    """The last number behind a word."""
    return seen.numbers(after)[-1]


def end(seen: Observation) -> float:
    """The last number that was printed."""
    return next(line[-1] for line in reversed(seen.lines()) if line)


def still(seen: Observation) -> bool:
    """Whether no parameter of the first model has changed."""
    return not any(seen.moved(p) for p in seen.roots[0].parameters())


# Each is true of the faulty program and false of its twin.
SYMPTOMS: dict[str, Symptom] = {
    "f01": lambda s: not s.moved(s.roots[0].blocks[0].weight),
    "f02": lambda s: not s.moved(s.roots[0].crf.score),
    "f03": still,
    "f04": lambda s: not s.moved(s.roots[0].fc1.weight) and s.moved(s.roots[0].bn1.weight),
    "f05": lambda s: s.moved(s.roots[0].encoder[0].weight),
    "f06": lambda s: s.roots[0].vectors.weight.norm().item() < 0.5 * s.first[id(s.roots[0].vectors.weight)].norm(),
    "f07": lambda s: sum(one.norm for one in s.steps[-10:]) > 30 * s.steps[0].norm,
    "f08": still,
    "f09": lambda s: s.steps[0].calls == 1 and all(one.calls == 4 for one in s.steps[1:]),
    "f12": lambda s: s.steps[34].lr < 1e-6,
    "f13": lambda s: len({one.lr for one in s.steps[45:]}) == 1,
    "f14": lambda s: s.steps[-1].lr == 1e-2,
    "f15": lambda s: len({id(one.optimizer) for one in s.steps}) == 8,
    "f16": lambda s: max(one.norm for one in s.steps) < 1e-3,
    "f17": lambda s: max(one.norm for one in s.steps) > 0.51,
    "f18": still,
    "f21": lambda s: not s.moved(s.roots[0].layers[0].fc_in.lora_b),
    "f24": lambda s: "second time" in str(s.error),
    "f25": lambda s: s.lines()[5][-1] > 1.5 * s.lines()[1][-1],
    "f26": lambda s: any("requires_grad=True to a scalar" in text for text in s.warned),
    "f27": lambda s: "inplace operation" in str(s.error),
    "f28": lambda s: not s.steps[-1].training,
    "f29": lambda s: (False, True) in s.modes,
    "f30": lambda s: end(s) > 0,
    "f31": lambda s: s.moved(s.roots[0].backbone[0][1].running_var),
    "f32": lambda s: sum(line[-1] for line in s.lines()[-4:-1]) / 3 > 0.6,
    "f33": lambda s: max((p - s.first[id(p)]).abs().max().item() for p in s.roots[0].parameters()) < 1e-5,
    "f34": lambda s: "nan" in s.text,
    "f35": lambda s: s.steps[-1].norms[0] < 1e-9,
    "f36": lambda s: not s.moved(s.roots[0][0].weight),
    "f37": lambda s: max(one.norm for one in s.steps) > 1e6,
    "f38": lambda s: not s.moved(s.roots[0].norm.scale),
    "f39": lambda s: min(s.numbers()) > math.log(1 + 5 / math.e),
    "f40": lambda s: min(s.numbers()) > 0.6,
    "f41": lambda s: end(s) < 0.5,
    "f42": lambda s: "nan" in s.text,
    "f43": lambda s: end(s) > 1e-3,
    "f44": lambda s: end(s) > 1,
    "f45": lambda s: s.numbers()[-1] > 1.04,
    "f46": lambda s: not s.moved(s.roots[0].decode.weight),
    "f47": lambda s: not s.moved(s.roots[0].encoder[0].weight),
    "r01": still,
    "r02": lambda s: s.lines()[4][-1] > 2,
    "r03": lambda s: end(s) > 0,
    "r04": lambda s: s.lines()[4][1] < 0.6,
    "r05": lambda s: end(s) < 0.3,
    "r06": lambda s: len(set(s.inputs)) < len(s.inputs),
    "r07": lambda s: end(s) == 1,
    "r08": lambda s: end(s) < 0,
    "r09": lambda s: type(s.roots[-1]).__name__ != "DistributedDataParallel",
    "r10": lambda s: not s.moved(s.roots[0].reconstruct[0].weight),
    "r11": lambda s: "device" in str(s.error),
    "r12": lambda s: "Inference tensors" in str(s.error),
    "r13": lambda s: end(s) > 0,
    "r15": lambda s: any(one.calls > 3 for one in s.steps),
}

# These are seen only in the difference: both begin alike, and the gradient of a step is not the same.
DIFFERENCES: dict[str, Callable[[Observation, Observation], bool]] = {
    "f10": lambda wrong, right: 7.9 < wrong.steps[0].norm / right.steps[0].norm < 8.1,
    "f11": differ,
    "f19": lambda wrong, right: differ(wrong, right, at=1, share=1e-4),
    "f20": differ,
    "f22": lambda wrong, right: differ(wrong, right, at=1),
    "f23": differ,
    "r14": differ,
}


def shown(program: Program, seed: int) -> str:
    """Says what is wrong with a program or its twin; an empty text if nothing is."""
    wrong, right = observe(program.path, seed), observe(program.path, seed, fixed=True)
    if right.error is not None:
        return f"the twin ended with {type(right.error).__name__}: {right.error}"
    if (wrong.error is not None) != program.truth.crash:
        return f"ended with {wrong.error!r}"
    if program.key in DIFFERENCES:
        return "" if DIFFERENCES[program.key](wrong, right) else "the twin's gradient is the same"
    symptom = SYMPTOMS[program.key]
    if not symptom(wrong):
        return "the fault does not show"
    return "the twin shows the fault" if symptom(right) else ""


def quiet(program: Program, seed: int) -> str:
    """Says what is wrong with a healthy program."""
    seen = observe(program.path, seed)
    if seen.error is not None:
        return f"ended with {type(seen.error).__name__}: {seen.error}"
    return "it printed a nan" if "nan" in seen.text else ""


@click.command(help="Checks the programs themselves, without the doctor.")
@click.argument("keys", nargs=-1)
@click.option("--seed", type=int, default=0, show_default=True)
def main(keys: tuple[str, ...], seed: int) -> None:
    """Runs each program and its twin and says which do not do what they are meant to."""
    torch.set_num_threads(1)
    bad = 0
    for program in programs(keys):
        try:
            text = quiet(program, seed) if program.healthy else shown(program, seed)
        except (LookupError, AttributeError, ValueError, StopIteration) as error:
            traceback.print_exc()
            text = f"the check itself failed: {error!r}"
        bad += bool(text)
        click.echo(f"{program.key}: {text or 'ok'}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
