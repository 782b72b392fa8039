"""Random batches of every kind for the planner's tests; equal numbers of samples give equal batches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 96


def as_float64_batch(value: Any) -> Any:
    """The same batch with its floats in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: as_float64_batch(item) for key, item in value.items()}
    return [as_float64_batch(item) for item in value]


def batches(make: Callable[[torch.Generator, int], Any]) -> Callable[[int], Any]:
    """Makes batches from one seed."""
    return lambda samples: make(torch.Generator().manual_seed(7), samples)


def points(count: int, width: int) -> Callable[[int], Any]:
    """Sets of points ``[m, count, width]`` and a class for each point."""
    return batches(
        lambda g, m: {
            "x": torch.randn(m, count, width, generator=g),
            "y": torch.randint(10, (m, count), generator=g),
        }
    )


def images(side: int, channels: int = 3) -> Callable[[int], Any]:
    """Images and a class for each."""
    return batches(
        lambda g, m: {
            "x": torch.randn(m, channels, side, side, generator=g),
            "y": torch.randint(10, (m,), generator=g),
        }
    )


def texts(time: int, vocabulary: int = VOCABULARY) -> Callable[[int], Any]:
    """Tokens and the next ones."""

    def make(generator: torch.Generator, samples: int) -> Any:
        tokens = torch.randint(vocabulary, (samples, time + 1), generator=generator)
        return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}

    return batches(make)


def pad(samples: Sequence[Tensor]) -> dict[str, Tensor]:
    """Joins texts of different lengths; the labels of what is padded are ignored."""
    longest = max(len(sample) for sample in samples) - 1
    x = torch.zeros(len(samples), longest, dtype=torch.long)
    y = torch.full_like(x, -100)
    for row, sample in enumerate(samples):
        x[row, : len(sample) - 1], y[row, : len(sample) - 1] = sample[:-1], sample[1:]
    return {"x": x, "y": y}


def tokens_and_labels(samples: int) -> Any:
    """What causal language models of Hugging Face are given: the labels are the tokens themselves."""
    tokens = texts(48)(samples)["x"]
    return {"input_ids": tokens, "labels": tokens}


def hidden_tokens(generator: torch.Generator, samples: int) -> Any:
    """What masked language models of Hugging Face are given: labels at three tokens of ten."""
    tokens = torch.randint(VOCABULARY, (samples, 48), generator=generator)
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(samples, 48, generator=generator) > 0.3, -100)}
