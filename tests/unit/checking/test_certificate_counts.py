"""What a loss is the mean over: the count that ``check`` offers makes it exact, and is the right one of several."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import anybatch
from anybatch import Certificate, Mean, check, count_tokens
from anybatch.checking.averages import Columns, Pieces
from anybatch.testing import assert_exact

Batch = dict[str, Any]
WORDS = 11


class LanguageModel(nn.Module):
    """Predicts the next token by a recurrent network."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.recurrent = nn.GRU(6, 8, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.drop(self.recurrent(self.embedding(tokens))[0]))
        return logits


def shifted_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """As causal language models do it: labels are shifted inside, and logits are cast to float32 first."""
    logits = model(batch["input_ids"]).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def text_batch() -> Batch:
    tokens = torch.randint(1, WORDS, (8, 9))
    labels = tokens.clone()
    for row, length in enumerate((2, 9, 5, 3, 7, 4, 8, 6)):
        labels[row, length:] = -100
    labels[1:4, 0] = -100  # so that counting from the second label on is not one less in each row
    return {"input_ids": tokens, "labels": labels}


def line(certificate: Certificate) -> str:
    assert [reason.code for reason in certificate.reasons] == ["count"], certificate
    return certificate.reasons[0].remedy


def count_of(remedy: str, **names: Any) -> Any:
    """Runs the line that was offered."""
    assert remedy.startswith("count=")
    return eval(remedy.removeprefix("count="), {"anybatch": anybatch, "torch": torch, **names})


# A causal language model whose labels are shifted inside of the loss.


def test_samples_and_unshifted_tokens_are_flagged_and_the_shift_is_offered() -> None:
    batch = text_batch()
    valid = int((batch["labels"][:, 1:] != -100).sum())
    for count, counted in ((anybatch.count_samples, 8), (count_tokens("labels"), int((batch["labels"] != -100).sum()))):
        certificate = check(LanguageModel(), shifted_loss, batch, count=count)
        assert line(certificate) == 'count=anybatch.count_tokens("labels", shift=1)'
        evidence = certificate.reasons[0].evidence
        assert (evidence["items"], evidence["counted"], evidence["samples"]) == (valid, counted, 8)
        assert evidence["error_with_remedy"] < 1e-10
        assert f"averaged over {valid} labels" in certificate.reasons[0].message


def test_with_the_shift_it_is_exact_also_with_dropout() -> None:
    certificate = assert_exact(LanguageModel(0.2), shifted_loss, text_batch(), count=count_tokens("labels", shift=1))
    assert certificate.error < 1e-10
    assert [note.where for note in certificate.notes] == ["drop"]


# Every way to count that can be read off a batch: the line that is offered is run, and is exact.

TOKENS = text_batch()
MASK = torch.rand(8, 6, generator=torch.Generator().manual_seed(1)) < 0.6
X = torch.randn(8, 6, 5, generator=torch.Generator().manual_seed(2))
CLASSES = torch.tensor([0, 1, 2, 2, 1, 0, 0, -100])
CRITERION = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))


def masked(batch: Batch, model: nn.Module) -> torch.Tensor:
    each: torch.Tensor = (model(batch["x"])[..., 0] - 1).pow(2)
    return each


CASES: dict[str, tuple[Callable[[Any, Batch], torch.Tensor], Batch, str]] = {
    "ignored labels": (
        lambda m, b: F.cross_entropy(m(b["x"])[:, 0], b["y"]),
        {"x": X, "y": CLASSES},
        'anybatch.count_tokens("y")',
    ),
    "another ignored label": (
        lambda m, b: F.cross_entropy(m(b["x"]).transpose(1, 2), b["target"], ignore_index=2),
        {"x": X, "target": torch.where(MASK, 1, 2)},
        'anybatch.count_tokens("target", ignore_index=2)',
    ),
    "a mask": (
        lambda m, b: (masked(b, m) * b["mask"]).sum() / b["mask"].sum(),
        {"x": X, "mask": MASK},
        "lambda batch: batch['mask'].sum()",
    ),
    "a mask of numbers, clamped": (
        lambda m, b: (masked(b, m) * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
        {"x": X, "mask": MASK.float()},
        "lambda batch: batch['mask'].sum()",
    ),
    "a shifted attention mask": (
        lambda m, b: (masked(b, m)[:, :-1] * b["mask"][:, 1:]).sum() / b["mask"][:, 1:].sum(),
        {"x": X, "mask": MASK.long()},
        "lambda batch: batch['mask'][..., 1:].sum()",
    ),
    "what is no padding": (
        lambda m, b: masked(b, m)[~b["pad"]].mean(),
        {"x": X, "pad": ~MASK},
        "lambda batch: (batch['pad'] == 0).sum()",
    ),
    "weights of samples": (
        lambda m, b: (masked(b, m).mean(1) * b["w"]).sum() / b["w"].sum(),
        {"x": X, "w": torch.linspace(0.1, 2, 8)},
        "lambda batch: batch['w'].sum(dtype=torch.float64)",
    ),
    "weights of classes": (
        lambda m, b: CRITERION(m(b["x"])[:, 0], b["y"]),
        {"x": X, "y": CLASSES},
        "lambda batch: CRITERION.weight[batch['y'][batch['y'] != -100]].sum(dtype=torch.float64)",
    ),
    "lengths of lists": (
        lambda m, b: torch.cat([m(item) for item in b["boxes"]]).pow(2).mean(),
        {"id": torch.arange(6), "boxes": [torch.randn(n, 5) for n in (1, 4, 2, 3, 5, 2)]},
        "lambda batch: sum(len(item) for item in batch['boxes'])",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_count_that_is_offered_is_exact(case: str) -> None:
    loss_fn, batch, expected = CASES[case]
    model = nn.Linear(5, 3)
    remedy = line(check(model, loss_fn, batch))
    assert remedy == f"count={expected}"
    assert_exact(model, loss_fn, batch, count=count_of(remedy, CRITERION=CRITERION))


def test_a_tuple_batch_and_a_tensor_are_counted_by_their_paths() -> None:
    def of_pair(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0])[:, 0], batch[1])

    remedy = line(check(nn.Linear(5, 3), of_pair, (X, CLASSES)))
    assert remedy == 'count=anybatch.count_tokens("1")'
    assert_exact(nn.Linear(5, 3), of_pair, (X, CLASSES), count=count_of(remedy))

    def of_tokens(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), ignore_index=0)

    tokens = torch.where(MASK, 3, 0)
    remedy = line(check(LanguageModel(), of_tokens, tokens))
    assert remedy == 'count=anybatch.count_tokens("", ignore_index=0)'
    assert_exact(LanguageModel(), of_tokens, tokens, count=count_of(remedy))


def test_only_the_loss_with_the_wrong_count_is_named_among_several() -> None:
    batch = {"x": X[:, 0], "a": CLASSES.clamp(min=0), "b": torch.tensor([0, 1, -100, -100, -100, 2, 1, -100])}
    model = nn.ModuleDict({"trunk": nn.Linear(5, 6), "a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})

    def heads(model: Any, batch: Batch) -> Any:
        with anybatch.cut(model["trunk"](batch["x"])) as features:
            for name in ("a", "b"):
                yield name, F.cross_entropy(model[name](features), batch[name])

    certificate = check(model, heads, batch)
    remedy = line(certificate)
    assert certificate.reasons[0].where == "loss 'b'"
    assert remedy == "count={'a': anybatch.count_samples, 'b': anybatch.count_tokens(\"b\")}"
    assert_exact(model, heads, batch, count=count_of(remedy))


def test_a_split_that_separates_two_counts_decides_in_a_sum_of_means() -> None:
    """As many labels are not 0 as values are there, in the first splits, but not sample by sample."""
    nan = float("nan")
    values = torch.tensor([[nan], [1.0], [2.0], [3.0], [4.0], [nan], [nan], [5.0]])
    batch = {"x": X[:, 0], "y": torch.tensor([1, 0, 2, 1, 0, 2, 1, 0]), "value": values}
    model = nn.ModuleDict({"trunk": nn.Linear(5, 6), "class": nn.Linear(6, 3), "value": nn.Linear(6, 1)})

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        features, known = model["trunk"](batch["x"]), ~batch["value"].isnan()
        found: torch.Tensor = F.cross_entropy(model["class"](features), batch["y"])
        return found + F.mse_loss(model["value"](features)[known], batch["value"][known])

    reason = check(model, loss_fn, batch).reasons[0]
    assert "(~batch['value'].isnan()).sum()" in reason.remedies[0], reason


def test_a_split_that_separates_two_counts_decides_between_them() -> None:
    """Both count 3, 8 and 16 items at the cuts of the first splits, but not sample by sample."""
    labels, mask = torch.full((8, 3), -100), torch.zeros(8, 3)
    for row, (label_count, mask_count) in enumerate(
        zip((1, 2, 3, 2, 3, 1, 2, 2), (2, 1, 2, 3, 1, 3, 2, 2), strict=True)
    ):
        labels[row, :label_count], mask[row, :mask_count] = 1, 1
    batch = {"x": X[:, :3], "labels": labels, "mask": mask}
    by_mask = check(nn.Linear(5, 3), lambda m, b: (masked(b, m) * b["mask"]).sum() / b["mask"].sum(), batch)
    assert line(by_mask) == "count=lambda batch: batch['mask'].sum()"
    by_labels = check(
        nn.Linear(5, 3), lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["labels"].flatten()), batch
    )
    assert line(by_labels) == 'count=anybatch.count_tokens("labels")'
    assert by_mask.reasons[0].evidence["also_fits"] == by_labels.reasons[0].evidence["also_fits"] == []


def test_a_wrong_count_that_the_first_splits_happen_to_hide_is_found() -> None:
    """Every cut of the first splits has two labels a sample before it and behind it."""
    labels = torch.full((8, 3), -100)
    for row, count in enumerate((1, 3, 2, 2, 3, 1, 2, 2)):
        labels[row, :count] = 1
    certificate = check(
        nn.Linear(5, 3),
        lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["labels"].flatten()),
        {"x": X[:, :3], "labels": labels},
    )
    assert line(certificate) == 'count=anybatch.count_tokens("labels")'
    assert certificate.splits == ((4, 4), (2, 2, 4), (1, 7))


def test_counts_that_are_the_same_for_every_sample_are_said() -> None:
    batch = {**TOKENS, "attention_mask": (TOKENS["labels"] != -100).long()}
    certificate = check(LanguageModel(), shifted_loss, batch)
    assert line(certificate) == 'count=anybatch.count_tokens("labels", shift=1)'
    assert certificate.reasons[0].evidence["also_fits"] == ["lambda batch: batch['attention_mask'][..., 1:].sum()"]
    assert "1 other way to count" in certificate.reasons[0].message


def test_labels_of_even_length_are_noted_because_they_hide_a_wrong_count() -> None:
    batch = {"input_ids": TOKENS["input_ids"], "labels": TOKENS["input_ids"]}
    certificate = check(LanguageModel(), shifted_loss, batch)
    assert certificate.exact
    assert [(note.code, note.evidence["labels_per_sample"]) for note in certificate.notes] == [("even-batch", 9)]
    assert not check(LanguageModel(), shifted_loss, batch, count=count_tokens("labels", shift=1)).notes


def test_a_denominator_that_is_in_no_leaf_is_still_told_from_a_loss_that_does_not_add_up() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        weights = batch["x"][:, 0, 0].exp()
        total: torch.Tensor = (masked(batch, model).mean(1) * weights).sum() / weights.sum()
        return total

    certificate = check(nn.Linear(5, 3), loss_fn, {"x": X})
    assert line(certificate).startswith("return anybatch.Mean(total, denominator)")
    expected = X[:, 0, 0].double().exp()
    assert certificate.reasons[0].evidence["weights"][0] == pytest.approx(
        [float(expected[:4].sum() / expected.sum()), float(expected[4:].sum() / expected.sum())], rel=1e-6
    )

    def remedied(model: nn.Module, batch: Batch) -> Mean:
        weights = batch["x"][:, 0, 0].exp()
        return Mean((masked(batch, model).mean(1) * weights).sum(), weights.sum())

    assert_exact(nn.Linear(5, 3), remedied, {"x": X})


def test_a_mean_over_as_many_items_as_are_drawn_needs_a_mean_of_its_own() -> None:
    def drawn(model: nn.Module, batch: Batch) -> Mean:
        chosen = torch.rand(batch["input_ids"].shape) < 0.5
        logits = model(torch.where(chosen, 0, batch["input_ids"]))[chosen]
        return Mean(F.cross_entropy(logits, batch["input_ids"][chosen], reduction="sum"), chosen.sum())

    def divided(model: nn.Module, batch: Batch) -> torch.Tensor:
        mean = drawn(model, batch)
        value: torch.Tensor = mean.total / mean.count
        return value

    certificate = check(LanguageModel(), divided, TOKENS)
    assert line(certificate).startswith("return anybatch.Mean(total, denominator)")
    assert "depends on the random numbers" in certificate.reasons[0].message
    assert len(certificate.reasons[0].remedies) == 1
    assert_exact(LanguageModel(), drawn, TOKENS)


def test_a_count_that_does_not_add_up_is_a_reason_and_the_right_one_is_offered() -> None:
    batch = {"x": X, "y": CLASSES}

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"])[:, 0], batch["y"])

    certificate = check(nn.Linear(5, 3), loss_fn, batch, count=lambda batch: 1)
    assert line(certificate) == 'count=anybatch.count_tokens("y")'
    assert "of its micro-batches together 2" in certificate.reasons[0].message
    mean = check(nn.Linear(5, 3), lambda m, b: Mean(loss_fn(m, b), 1), batch)
    assert line(mean).startswith("return anybatch.Mean(total, items)")
    assert mean.reasons[0].evidence == {"items": 1.0, "items_of_parts": [2.0, 3.0]}


def test_parts_make_up_the_whole_in_value_and_in_gradient() -> None:
    def pieces(*values: float, signs: tuple[float, float] = (1, 1)) -> Pieces:
        first, *others = torch.tensor([4.0, *values], dtype=torch.float64).split(1)
        gradients = torch.ones(3, 1, dtype=torch.float64)
        parts = Columns(torch.cat(others), gradients * torch.tensor(signs), [])
        return Pieces(Columns(first, gradients, []), [parts], 1e-9)

    assert pieces(2.0, 5.0).residual(0, [1 / 3, 2 / 3]) < 1e-15
    assert pieces(2.0, 5.0).residual(0, [0.5, 0.5]) > 0.01  # the gradients alone would fit
    assert pieces(4.0, 4.0, signs=(1, -1)).residual(0, [0.5, 0.5]) > 0.1  # the values alone would fit
    nothing = pieces(4.0, float("nan"))
    assert nothing.residual(0, [1.0, 0.0]) == 0.0
    assert nothing.residual(0, [0.5, 0.5]) == float("inf")


# Raw samples, each micro-batch padded to its own longest one.


def collate(samples: list[torch.Tensor]) -> Batch:
    tokens = pad_sequence(samples, batch_first=True)
    return {"input_ids": tokens, "labels": torch.where(tokens == 0, -100, tokens)}


@pytest.mark.parametrize("cost", [None, len])
def test_raw_samples_are_collated_and_their_count_is_found(cost: Any) -> None:
    samples = [torch.randint(1, WORDS, (length,)) for length in (3, 9, 4, 6, 8, 2)]
    options = {"collate": collate, "cost": cost, "micro_batch_size": None if cost is None else 16}

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    remedy = line(check(LanguageModel(), loss_fn, samples, **options))
    assert remedy == 'count=anybatch.count_tokens("labels")'
    assert_exact(LanguageModel(), loss_fn, samples, count=count_of(remedy), **options)


def test_padding_that_takes_part_in_the_loss_is_told_apart() -> None:
    samples = [torch.randint(1, WORDS, (length,)) for length in (3, 9, 4, 6, 8, 2)]
    certificate = check(
        LanguageModel(), lambda m, b: m(b["input_ids"]).pow(2).mean((1, 2)).mean(), samples, collate=collate
    )
    assert [reason.code for reason in certificate.reasons] == ["padding"]


def test_the_count_of_a_loss_that_is_divided_by_something_else_stays_open() -> None:
    batch = {"x": X[:, 0], "y": torch.arange(8) % 3, "is_b": torch.arange(8) > 2}
    batch["seg"] = torch.arange(8.0).where(torch.tensor([1, 0, 1, 1, 1, 1, 0, 0]) > 0, -1.0)

    def losses(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        out, kept = model(batch["x"]), batch["seg"] >= 0
        odd = out.square().sum() / batch["x"].square().sum()
        by_mask, marked = out[batch["is_b"]].square().mean(), (out[kept, 0] - batch["seg"][kept]).square().mean()
        return {"a": F.cross_entropy(out, batch["y"]), "b": by_mask, "marked": marked, "odd": odd}

    certificate = check(nn.Linear(5, 3), losses, batch)
    remedy = next(one.remedy for one in certificate.reasons if one.where == "loss 'b'")
    assert remedy == (
        "count={'a': anybatch.count_samples, 'b': lambda batch: batch['is_b'].sum(), 'marked': lambda batch: "
        "(batch['seg'] >= 0).sum(), 'odd': ...}  # ...: what these are divided by, which is not known"
    )
    counts = {**count_of(remedy), "odd": lambda batch: batch["x"].square().sum()}
    assert check(nn.Linear(5, 3), losses, batch, count=counts).exact
