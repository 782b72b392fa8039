"""A list that is as long as its tensors have rows: samples where they can be nothing else, refused where they can."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch
from anybatch import BatchError, count_samples


def detection(rows: int) -> Any:
    """Images of different sizes with 3 channels, and boxes with 4 numbers, as a detector takes them."""
    images = [torch.randn(3, 8 + i, 9) for i in range(rows)]
    return images, [{"box": torch.rand(4)} for _ in range(rows)]


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, images: Any) -> Any:
        return torch.stack([self.head(self.convolution(image).mean((1, 2))) for image in images])


def loss_fn(model: Any, batch: Any) -> Any:
    return (model(batch[0]) - torch.stack([target["box"] for target in batch[1]])).square().mean()


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_a_detector_trains_on_batches_of_any_length(rows: int) -> None:
    torch.manual_seed(0)
    model, batch = Detector().double(), detection(rows)
    batch = ([one.double() for one in batch[0]], [{"box": one["box"].double()} for one in batch[1]])
    loss_fn(model, batch).backward()
    want = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    anybatch.backward(model, loss_fn, batch, micro_batch_size=2)
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


AMBIGUOUS = {
    "leaves of other widths beside a tensor": {"x": [torch.zeros(3, n) for n in (2, 4, 6)], "y": torch.zeros(3)},
}  # fmt: skip


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_could_be_leaves_is_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(BatchError, match=r"make it a tuple if the items are leaves.*stack them.*pass collate="):
        count_samples(AMBIGUOUS[name])
