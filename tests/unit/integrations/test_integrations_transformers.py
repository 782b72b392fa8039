"""The Trainer of Transformers gives another gradient than its whole batch; ExactTrainer gives that one."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer

import anybatch
from anybatch.integrations.transformers import ExactTrainer, ExactTraining
from reference import distance, norm
from trainer_heads import HEADS, Tagger, assert_whole, collated, llama, needs_transformers, tokens, trained, truth

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
WAYS: dict[str, dict[str, Any]] = {"as batches": {}, "in threes": {"micro_batch_size": 3}}
# How far off the Trainer's own gradient is, relative, at least and at most, with transformers 5.23. Several heads take
# num_items_in_batch and don't divide by it, so that their batches are added up instead of averaged.
OWN_ERROR = {
    "causal": (0.0, 1e-6), "masked": (1.0, 4.0), "tokens": (1.0, 4.0), "classes": (1.0, 4.0), "numbers": (1.0, 4.0),
    "several": (1.0, 4.0), "sequences": (1.0, 4.0), "no head of Transformers": (0.1, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", HEADS)
def test_the_gradient_is_that_of_the_whole_batch(head: str, way: str, tmp_path: Path) -> None:
    model, samples = HEADS[head][0](), HEADS[head][1]()
    expected, loss = truth(model, samples)
    trainer, seen = trained(ExactTrainer, copy.deepcopy(model), samples, tmp_path, **WAYS[way])
    assert len(seen.gradients) == 1
    assert_whole(seen.gradients[0], model, samples)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, abs=1e-4)  # before transformers 5 it is rounded
    assert trainer.state.log_history[0].get("grad_norm", norm(expected)) == pytest.approx(norm(expected), rel=1e-6)


@pytest.mark.parametrize("head", ["causal", "no head of Transformers"])
def test_the_gradient_under_a_budget(head: str, tmp_path: Path) -> None:
    model, samples = HEADS[head][0](), HEADS[head][1]()
    trainer, seen = trained(ExactTrainer, copy.deepcopy(model), samples, tmp_path, memory="64MiB")
    assert_whole(seen.gradients[0], model, samples)
    assert trainer._exact.state_dict()["plan"]["plan"]["budget"] == 64 * 2**20


@needs_transformers(5, 0, "its gradient is off by other amounts")
@pytest.mark.parametrize("head", HEADS)
def test_the_own_gradient_of_the_trainer(head: str, tmp_path: Path) -> None:
    make, samples = HEADS[head][0](), HEADS[head][1]()
    expected, _ = truth(make, samples)
    _, seen = trained(Trainer, copy.deepcopy(make), samples, tmp_path)
    low, high = OWN_ERROR[head]
    assert low <= distance(seen.gradients[0], expected) / norm(expected) <= high


def smoothed(model: Any, batch: Any) -> torch.Tensor:
    """As the label smoother of Transformers, on all samples."""
    logits = model(input_ids=batch["input_ids"])["logits"][:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits[labels != -100], labels[labels != -100], label_smoothing=0.1)


def test_label_smoothing(tmp_path: Path) -> None:
    model, samples = llama(), tokens()
    arguments = {"label_smoothing_factor": 0.1}
    _, seen = trained(ExactTrainer, copy.deepcopy(model), samples, tmp_path, args=arguments, micro_batch_size=5)
    assert_whole(seen.gradients[0], model, samples, smoothed)


def by_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss function that divides by the number that it is given."""
    total: torch.Tensor = F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return total / torch.as_tensor(num_items_in_batch)


def by_mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """One that does not look at it."""
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("function", [by_items, by_mean])
def test_a_loss_function_of_the_users(function: Any, tmp_path: Path) -> None:
    model, samples = Tagger(), tokens()
    _, seen = trained(
        ExactTrainer, copy.deepcopy(model), samples, tmp_path, compute_loss_func=function, micro_batch_size=3
    )
    assert_whole(seen.gradients[0], model, samples)


class PerSample(ExactTraining, Trainer):
    """A Trainer of the user's with a loss that is the mean over samples."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(input_ids=inputs["input_ids"])["logits"].square().mean()


def test_a_trainer_of_the_users_with_a_count(tmp_path: Path) -> None:
    model, samples = Tagger(), tokens()

    def squares(model: Any, batch: Any) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=batch["input_ids"])["logits"].square().mean()
        return found

    count = anybatch.count_samples
    _, seen = trained(PerSample, copy.deepcopy(model), samples, tmp_path, count=count, micro_batch_size=3)
    assert_whole(seen.gradients[0], model, samples, squares)


def test_batches_without_any_label_add_nothing(tmp_path: Path) -> None:
    samples = tokens()
    for sample in samples[8:16]:
        sample["labels"] = torch.full_like(sample["labels"], -100)
    model = Tagger()
    _, seen = trained(ExactTrainer, copy.deepcopy(model), samples, tmp_path, micro_batch_size=3)
    assert_whole(seen.gradients[0], model, samples)


def test_an_update_without_any_label_changes_nothing(tmp_path: Path) -> None:
    samples = tokens(8)
    for sample in samples:
        sample["labels"] = torch.full_like(sample["labels"], -100)
    model = Tagger()
    before = copy.deepcopy(model).double().state_dict()
    trainer, _ = trained(ExactTrainer, model, samples, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert trainer.state.log_history[0]["loss"] == 0


def test_recomputed_blocks(tmp_path: Path) -> None:
    model, samples = llama(), tokens()
    arguments = {"gradient_checkpointing": True}
    _, seen = trained(ExactTrainer, copy.deepcopy(model), samples, tmp_path, args=arguments, micro_batch_size=3)
    assert_whole(seen.gradients[0], model, samples)


def test_bfloat16_is_as_near_as_the_whole_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # which transformers 4 sets, and leaves so
    model, samples = llama(), tokens()
    expected, _ = truth(model, samples)
    errors = []
    for kind, size, windows in ((Trainer, 22, 1), (ExactTrainer, 8, 3)):
        arguments = {"bf16": True, "per_device_train_batch_size": size, "gradient_accumulation_steps": windows}
        _, seen = trained(kind, copy.deepcopy(model), samples, tmp_path, args=arguments)
        assert {g.dtype for g in seen.gradients[0] if g is not None} == {torch.float32}
        errors.append(distance(seen.gradients[0], expected))
    assert 0 < errors[1] <= 2 * errors[0]


def test_memory_that_runs_out_makes_smaller_micro_batches(tmp_path: Path) -> None:
    model, samples = Tagger(), tokens(44)
    most: list[int] = []

    class Small(Tagger):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            most.append(len(input_ids))
            if len(input_ids) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(input_ids, labels)

    small = Small()
    small.load_state_dict(model.state_dict())
    _, seen = trained(ExactTrainer, small, samples, tmp_path)
    assert_whole(seen.gradients[0], model, samples[:24])
    assert [n for n in most if n > 4] == [8]  # what was learnt stays


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"auto_find_batch_size": True}, "auto_find_batch_size"), ({"optim": "lomo"}, "LOMO")],
)
def test_what_takes_the_gradient_away_is_refused(arguments: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(anybatch.BatchError, match=text):
        trained(ExactTrainer, Tagger(), tokens(), tmp_path, args=arguments)


def test_a_head_that_couples_samples_is_found(tmp_path: Path) -> None:
    class Coupled(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(9)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            logits = self.out(self.norm(self.embed(input_ids)))
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()) if labels is not None else logits}

    with pytest.raises(anybatch.NotSplittable, match="norm"):
        trained(ExactTrainer, Coupled(), tokens(), tmp_path)


def test_the_labels_are_counted_as_the_head_does(tmp_path: Path) -> None:
    trainer, _ = trained(ExactTrainer, llama(), tokens(), tmp_path)
    batch = collated(tokens(4))
    assert int(trainer.count_items(batch)) == int(batch["labels"][:, 1:].ne(-100).sum())
    assert int(trainer.count_items({"shift_labels": batch["labels"]})) == int(batch["labels"].ne(-100).sum())
