"""Small trainings, faulty and healthy, each written once and run in every way that a batch can be trained."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import anybatch

STEPS = 14
ROWS = 32
Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, Batch], Any]


@dataclass
class Program:
    """A training that is about to run.

    Args:
        model: it.
        optimizer: its own.
        loss_fn: the mean over ``count(batch)``.
        count: of what the loss is the mean over.
        batches: as many as there are steps.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Loss
    count: Any
    batches: list[Batch]


class Net(torch.nn.Module):
    """A trunk and a head."""

    def __init__(self, classes: int = 10, *, cut: bool = False, softmax: bool = False) -> None:
        super().__init__()
        self.trunk = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
        self.head = torch.nn.Linear(32, classes)
        self.cut, self.softmax = cut, softmax

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(x).relu()
        scores: torch.Tensor = self.head(hidden.detach() if self.cut else hidden)
        return scores.softmax(-1) if self.softmax else scores


class Hidden(torch.nn.Module):
    """Keeps a layer where no optimizer finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = [torch.nn.Linear(16, 32)], torch.nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers[0](x).relu())
        return scores


class Tagger(torch.nn.Module):
    """Scores of tokens."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, again: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(20, 16, dtype=dtype), torch.nn.LayerNorm(16, dtype=dtype)
        self.inner, self.out = torch.nn.Linear(16, 16, dtype=dtype), torch.nn.Linear(16, 20, dtype=dtype)
        self.again = again

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(ids))
        inner = checkpoint(self.inner, hidden, use_reentrant=False) if self.again else self.inner(hidden)
        scores: torch.Tensor = self.out(inner.relu() + hidden)
        return scores


def classes(model: Any, batch: Batch) -> torch.Tensor:
    """The loss of a classifier."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def tokens(model: Any, batch: Batch) -> torch.Tensor:
    """The loss of a tagger, whose labels are masked in part."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def _rows() -> list[Batch]:
    made = torch.randn(STEPS, ROWS, 16)
    return [{"x": x, "y": x[:, :10].argmax(1)} for x in made]


def _texts() -> list[Batch]:
    found = []
    for ids in torch.randint(20, (STEPS, ROWS, 12)):
        lengths = torch.cat([torch.randint(1, 3, (ROWS // 2, 1)), torch.randint(9, 13, (ROWS // 2, 1))])
        found.append({"x": ids, "y": ids.masked_fill(torch.arange(12) >= lengths, -100)})
    return found


def _classifier(model: torch.nn.Module, parameters: Any = None, *, lr: float = 1e-2) -> Program:
    optimizer = torch.optim.Adam(model.parameters() if parameters is None else parameters, lr=lr)
    return Program(model, optimizer, classes, anybatch.count_samples, _rows())


def _tagger(model: torch.nn.Module, *, lr: float = 1e-2) -> Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return Program(model, optimizer, tokens, anybatch.count_tokens("y"), _texts())


def head_forgotten() -> Program:
    """The head is in no optimizer."""
    model = Net()
    return _classifier(model, model.trunk.parameters())


def head_replaced() -> Program:
    """The head is another one since the optimizer was made."""
    program = _classifier(Net())
    program.model.head = torch.nn.Linear(32, 10)
    return program


def head_of_another_shape() -> Program:
    """The same, and the old one had more classes."""
    program = _classifier(Net(classes=100))
    program.model.head = torch.nn.Linear(32, 10)
    return program


def head_made_deeper() -> Program:
    """The same, and the new one has several layers."""
    program = _classifier(Net())
    program.model.head = torch.nn.Sequential(torch.nn.Linear(32, 12), torch.nn.ReLU(), torch.nn.Linear(12, 10))
    return program


def trunk_cut_off() -> Program:
    """No gradient reaches the trunk."""
    return _classifier(Net(cut=True))


def softmax_twice() -> Program:
    """The loss gets probabilities."""
    return _classifier(Net(softmax=True))


def rate_far_too_high() -> Program:
    """The learning rate throws the weights away."""
    return _classifier(Net(), lr=30.0)


def layer_in_a_list() -> Program:
    """A layer is registered nowhere."""
    return _classifier(Hidden())


def updates_rounded_away() -> Program:
    """Weights in bfloat16 do not move."""
    return _tagger(Tagger(torch.bfloat16), lr=1e-3)


def left_in_evaluation_mode() -> Program:
    """Dropout does nothing."""
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 10)
    ).eval()
    return _classifier(model)


def logarithm_of_zero() -> Program:
    """The loss is infinite."""
    program = _classifier(Net())
    program.loss_fn = lambda model, batch: model(batch["x"]).relu().log().mean()
    return program


def healthy() -> Program:
    """Nothing is wrong."""
    return _classifier(Net())


def trunk_frozen() -> Program:
    """Only the head is trained, on purpose."""
    model = Net()
    model.trunk.requires_grad_(False)
    return _classifier(model, model.head.parameters())


def uneven_labels() -> Program:
    """Micro-batches have few labels or many."""
    return _tagger(Tagger())


def recomputed() -> Program:
    """The same, with a part that is computed again in the backward."""
    return _tagger(Tagger(again=True))


FAULTS: dict[Callable[[], Program], tuple[str, str]] = {
    head_forgotten: ("AB101", "head"),
    head_replaced: ("AB103", "head"),
    head_of_another_shape: ("AB103", "head"),
    head_made_deeper: ("AB103", "head"),
    trunk_cut_off: ("AB201", "trunk"),
    softmax_twice: ("AB601", ""),
    rate_far_too_high: ("AB501", ""),
    layer_in_a_list: ("AB102", "layers[0]"),
    updates_rounded_away: ("AB557", "norm"),
    left_in_evaluation_mode: ("AB454", ""),
    logarithm_of_zero: ("AB555", ""),
}
"""What has to be found first, and the module that is named."""
HEALTHY = (healthy, trunk_frozen, uneven_labels, recomputed)


def plain(program: Program) -> Iterator[None]:
    """A loop without anybatch."""
    for batch in program.batches:
        program.optimizer.zero_grad()
        program.loss_fn(program.model, batch).backward()
        program.optimizer.step()
        yield


def by_backward(program: Program, **options: Any) -> Iterator[None]:
    """``anybatch.backward`` in a loop."""
    for batch in program.batches:
        program.optimizer.zero_grad()
        anybatch.backward(program.model, program.loss_fn, batch, micro_batch_size=8, count=program.count)
        program.optimizer.step()
        yield


def by_several_backwards(program: Program, **options: Any) -> Iterator[None]:
    """The same, and a logical batch comes in two parts."""
    for batch in program.batches:
        program.optimizer.zero_grad()
        whole = program.count(batch)
        for part in (slice(0, ROWS // 4), slice(ROWS // 4, ROWS)):
            rows = {name: value[part] for name, value in batch.items()}
            share = float(program.count(rows)) / float(whole)
            loss_fn = partial(_scaled, program.loss_fn, share)
            anybatch.backward(program.model, loss_fn, rows, micro_batch_size=8, count=program.count)
        program.optimizer.step()
        yield


def _scaled(loss_fn: Loss, share: float, model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = loss_fn(model, batch) * share
    return loss


def by_step(program: Program, **options: Any) -> Iterator[None]:
    """``TrainStep``, with what it is given."""
    step = anybatch.TrainStep(program.model, program.loss_fn, program.optimizer, count=program.count, **options)
    for batch in program.batches:
        step(batch)
        yield


def by_plan(program: Program, **options: Any) -> Iterator[None]:
    """``TrainStep`` with a plan that was made before it."""
    model, loss_fn, optimizer = program.model, program.loss_fn, program.optimizer
    found = anybatch.plan(model, loss_fn, program.batches[0], optimizer, memory="1GiB", count=program.count)
    return by_step(program, plan=found, **options)


def by_smallest_budget(program: Program, **options: Any) -> Iterator[None]:
    """``TrainStep`` within hardly more memory than the smallest plan needs."""
    model, loss_fn, optimizer = program.model, program.loss_fn, program.optimizer
    with pytest.raises(anybatch.DoesNotFit) as refused:
        anybatch.plan(model, loss_fn, program.batches[0], optimizer, memory=1, count=program.count)
    assert refused.value.needed is not None
    return by_step(program, memory=int(refused.value.needed * 1.02), **options)


def by_accelerate(program: Program, **options: Any) -> Iterator[None]:
    """``train_step`` of what Accelerate has prepared."""
    from accelerate import Accelerator

    from anybatch.integrations.accelerate import train_step

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(program.model, program.optimizer)
    step = train_step(
        accelerator, model, program.loss_fn, optimizer, micro_batch_size=8, count=program.count, **options
    )  # fmt: skip
    for batch in program.batches:
        step(batch)
        yield


def by_lightning(program: Program, **options: Any) -> Iterator[None]:
    """``ExactGradient``, and two batches of the loader in a logical batch."""
    import lightning.pytorch as pl

    from anybatch.integrations.lightning import ExactGradient

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = program.model

        def training_step(self, batch: Any, index: int) -> Any:
            return program.loss_fn(self.model, batch)

        def configure_optimizers(self) -> Any:
            return program.optimizer

    trainer = pl.Trainer(
        callbacks=[ExactGradient(micro_batch_size=4, count=program.count)], accumulate_grad_batches=2, max_epochs=1,
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), _loader(program))
    yield


def by_transformers(program: Program, **options: Any) -> Iterator[None]:
    """``ExactTrainer``, and two batches of the loader in a logical batch."""
    from transformers import TrainingArguments

    from anybatch.integrations.transformers import ExactTrainer

    class Exact(ExactTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return program.loss_fn(model, inputs)

        def get_train_dataloader(self) -> Any:
            return _loader(program)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, gradient_accumulation_steps=2, max_steps=STEPS, report_to=[], save_strategy="no", use_cpu=True,
            max_grad_norm=0.0, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.ConstantLR(program.optimizer, 1.0)
        Exact(
            program.model, arguments, train_dataset=[0], optimizers=(program.optimizer, schedule),
            micro_batch_size=4, count=program.count,
        ).train()  # fmt: skip
    yield


def _loader(program: Program) -> Any:
    """Half batches."""
    names = list(program.batches[0])
    rows = torch.utils.data.TensorDataset(*(torch.cat([one[name] for one in program.batches]) for name in names))

    def collate(samples: list[Any]) -> Batch:
        return dict(zip(names, map(torch.stack, zip(*samples, strict=True)), strict=True))

    return torch.utils.data.DataLoader(rows, batch_size=ROWS // 2, collate_fn=collate)


def run(steps: Iterator[None]) -> None:
    """Runs to the end."""
    for _ in itertools.islice(steps, STEPS):
        pass
