"""What the table says of the Trainer is what the Trainer does, and what it says of two means in one sum."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.integrations.transformers import ExactTrainer
from reference import assert_float64, gradients_of, whole_gradients
from source_tree import ROOT


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's modules, in float64."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield importlib.import_module("architecture_rows"), importlib.import_module("architecture_models")
    torch.set_default_dtype(before)
    for name in ("architecture_rows", "architecture_models", "architecture_sizes"):
        sys.modules.pop(name, None)


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[index] for name, value in self.batch.items()}


def trained(trainer: Any, case: Any, size: int, folder: Path) -> dict[str, torch.Tensor]:
    """The gradient before the first update of a Trainer, whose batches are in order."""
    transformers = importlib.import_module("transformers")
    seen: list[dict[str, torch.Tensor]] = []

    class Look(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append({n: p.grad.clone() for n, p in given["model"].named_parameters() if p.grad is not None})

    class InOrder(trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    options = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=size, gradient_accumulation_steps=3, max_grad_norm=0.0,
        max_steps=1, learning_rate=0.0, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    InOrder(case.model, options, train_dataset=Samples(case.batch), callbacks=[Look()]).train()
    return seen[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("architecture", "head", "expected"),
    [
        ("llama", "causal", 0.0),
        ("gpt2", "causal", 0.065),
        ("bart", "causal", 2.56),
        ("bert", "masked", 2.0),
        ("esm", "masked", 0.21),
    ],
)
def test_the_rule_of_the_table_is_that_of_the_trainer_and_ours_is_exact(
    architecture: str, head: str, expected: float, rows: Any, tmp_path: Path
) -> None:
    measured, models = rows
    transformers = importlib.import_module("transformers")
    case = models.transformer(architecture, head)
    with measured.InFloat64():
        truth = measured.gradient_after(case.model, lambda: case.loss(case.model, case.batch).backward())
        said = measured.trainers_error(case, truth)
        theirs = trained(transformers.Trainer, case, measured.MICRO, tmp_path)
        case.model.zero_grad()
        ours = trained(ExactTrainer, case, measured.MICRO, tmp_path)
    assert measured.relative_error(theirs, truth) == pytest.approx(said, rel=1e-6, abs=1e-9)
    assert said == pytest.approx(expected, rel=0.05, abs=1e-9)
    assert measured.relative_error(ours, truth) <= measured.EXACT


class TwoHeads(nn.Module):
    """Masked tokens and a label for the text, as in the pretraining of BERT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.words, self.text = nn.Embedding(9, 4), nn.Linear(4, 9), nn.Linear(4, 2)
        self.double()

    def losses(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = self.body(batch["tokens"])
        words = F.cross_entropy(self.words(hidden).flatten(0, 1), batch["labels"].flatten())
        return {"words": words, "text": F.cross_entropy(self.text(hidden.mean(1)), batch["follows"])}


def test_two_means_in_one_sum_are_exact_as_two_losses() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(9, (6, 5), generator=generator)
    kept = torch.rand(6, 5, generator=generator) < torch.tensor([0.9, 0.2, 0.5, 0.9, 0.3, 0.7])[:, None]
    kept[:, 0] = True
    batch = {"tokens": tokens, "labels": tokens.masked_fill(~kept, -100), "follows": torch.tensor([0, 1, 1, 0, 1, 0])}
    model = TwoHeads()

    def in_one(model: Any, batch: Any) -> torch.Tensor:
        return torch.stack(list(model.losses(batch).values())).sum()

    certificate = anybatch.check(model, in_one, batch)
    assert [reason.code for reason in certificate.reasons] == ["count"]
    assert "a sum of means over different items" in certificate.reasons[0].message
    expected, _ = whole_gradients(model, in_one, batch)
    counts = {"words": anybatch.count_tokens("labels"), "text": anybatch.count_samples}
    anybatch.backward(model, lambda model, batch: model.losses(batch), batch, micro_batch_size=2, count=counts)
    assert_float64(gradients_of(model), expected)
