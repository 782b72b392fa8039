"""A mask of the rows of the training that only an evaluation reads is told, and one that is used otherwise is not."""

import ast

import pytest

from anybatch.doctor.ask.heldout import evaluated_splits

GIVEN = "train_mask = torch.zeros(9, dtype=torch.bool)\ntrain_mask[order[:5]] = True\n"
TEST = "@torch.no_grad()\ndef test():\n    return [acc(out[m], y[m]) for m in (train_mask, test_mask)]\n"
INSIDE = "for epoch in range(9):\n    with torch.no_grad():\n        print(acc(out[train_mask]), acc(out[test_mask]))\n"


@pytest.mark.parametrize("text", [GIVEN + TEST, GIVEN + INSIDE, TEST.replace("train_mask", "data.train_mask")])
def test_a_mask_that_only_the_evaluation_reads_is_told(text: str) -> None:
    assert [one[:2] for one in evaluated_splits(ast.parse(text))] == [("train_mask", "test_mask")]


@pytest.mark.parametrize(
    "text",
    [
        GIVEN + TEST + "loss = f(out[train_mask], y[train_mask])\n",
        GIVEN + TEST + "loss = (f(out, y) * train_mask).sum()\n",
        GIVEN + TEST + "fit(model, x, y, train_mask)\n",
        GIVEN + TEST + "loader = DataLoader(Subset(data, train_mask))\n",
        GIVEN + TEST.replace("train_mask, test_mask", "train_mask"),  # nothing is held out
        GIVEN + TEST.replace("@torch.no_grad()\n", ""),  # it may be called in training
        TEST.replace("train_mask, test_mask", "test_mask"),
        "train_mask = padding(tokens)\nout = model(tokens, train_mask)\n",
    ],
)
def test_a_mask_that_the_training_reads_is_not(text: str) -> None:
    assert list(evaluated_splits(ast.parse(text))) == []
