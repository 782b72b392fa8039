"""Rules of the family ranks: models that are spread over processes."""

from collections.abc import Iterator

from anybatch.doctor.rules.naming import counted, listed, verb
from anybatch.doctor.rules.registry import rule
from anybatch.records.events import Forward
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import Replicas
from anybatch.records.runs import Run


@rule(
    "AB751",
    "DDP_BYPASSED",
    "error",
    "the model inside of DistributedDataParallel is called, and not the wrapper",
    """
## What is seen

The inner module was called in training although a wrapper around it exists. With a single process it
is a warning: the same script goes wrong as soon as it is started with two.

## Why it matters

Only the wrapper's forward prepares the exchange of gradients. Each process trains on its own, and
the replicas drift apart.

## What to change

```python
output = ddp_model(x)            # not ddp_model.module(x)
```

## When it is fine

Calls of the inner module without gradients (evaluation, saving) are not reported.

## Source

A case of TrainCheck (X-jxmnop): the raw module was called.
""",
    explains=("REPLICAS_DIFFER",),
)
def _ddp_bypassed(run: Run) -> Iterator[Finding]:
    one = next((found for found in run.of(Replicas) if found.bypassed), None)
    if one is None:
        return
    name = one.bypassed[0]
    called = next(
        (f for f in run.of(Forward) if f.grad and f.root in run.roots and run.roots[f.root].variable == name), None
    )
    wrapper = next((root.variable for root in run.roots.values() if root.wrapper and root.variable), "ddp_model")
    yield Finding(
        message=f"{listed(one.bypassed)} {verb(len(one.bypassed), 'is', 'are')} called in training instead of the "
        f"{one.wrapper or 'wrapper'} around {verb(len(one.bypassed), 'it', 'them')}: the gradients of "
        f"{counted(one.world, 'process', 'processes')} are not exchanged.",
        place=Place(module=name, file=called.file if called else "", line=called.line if called else 0),
        fix=f"output = {wrapper}(...)  # instead of {name}(...)",
        cause="Only the forward of the wrapper prepares the exchange of gradients.",
        evidence={"world": one.world, "bypassed": list(one.bypassed)},
        step=one.step,
        at=called.at if called is not None else one.at,
        severity="" if one.world > 1 else "warning",
    )


@rule(
    "AB752",
    "REPLICAS_DIFFER",
    "error",
    "the processes have different weights",
    """
## What is seen

Parameters of a replicated model differ between processes.

## Why it matters

Averaged gradients of different models are the gradient of none of them.

## What to change

Start all from the same values, and step all of them by the same, exchanged gradients:

```python
model = torch.nn.parallel.DistributedDataParallel(model)   # copies the values of rank 0 to all
```

## When it is fine

Shards of one model (FSDP, tensor parallelism) differ by nature and are not compared.

## Source

A case of TrainCheck (BLOOM): replicas of norm layers drifted apart.
""",
)
def _replicas_differ(run: Run) -> Iterator[Finding]:
    one = next(
        (found for found in run.of(Replicas) if found.world > 1 and found.differ and found.wrapper != "FSDP"), None
    )
    if one is None:
        return
    yield Finding(
        message=f"{listed(one.differ)} {verb(len(one.differ), 'differs', 'differ')} between {one.world} processes.",
        place=Place(parameters=one.differ),
        fix="broadcast the weights from rank 0 before the first step, and let each step use the exchanged gradients",
        cause="The processes started from different values, or stepped with different gradients.",
        evidence={"world": one.world, "parameters": len(one.differ)},
        step=one.step,
        at=one.at,
    )
