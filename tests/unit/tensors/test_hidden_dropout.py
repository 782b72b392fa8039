"""Dropout between the layers of a recurrent module on CUDA is never drawn a second time in silence."""

import pytest
import torch
from torch import nn

from anybatch.memory import checkpointing
from anybatch.memory.checkpointing import NotRecomputable, hidden_dropout, recompute


def test_only_dropout_between_layers_in_training_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lstm = nn.LSTM(4, 4, 2, dropout=0.1)
    quiet = [nn.LSTM(4, 4, 2), nn.GRU(4, 4, 2, dropout=0.1).eval(), nn.Linear(4, 4), nn.Dropout(0.1)]
    assert hidden_dropout([*quiet, lstm]) == []  # the CPU draws from the random state
    monkeypatch.setattr(checkpointing, "has_cudnn", lambda device: True)
    assert hidden_dropout([*quiet, lstm]) == [lstm]


def test_a_block_with_it_is_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.LSTM(4, 4, 2, dropout=0.1), nn.Flatten())
    monkeypatch.setattr(checkpointing, "has_cudnn", lambda device: True)
    with (
        recompute(model, ["0"]),
        pytest.raises(NotRecomputable, match=r"the block '0' can't be recomputed: LSTM\(num_layers=2, dropout=0.1\)"),
    ):
        model[0](torch.ones(3, 2, 4))


def test_on_the_cpu_it_is_recomputed_bitwise() -> None:
    model = nn.LSTM(4, 4, 2, dropout=0.5)
    found = []
    for names in ([], [""]):
        torch.manual_seed(0)
        model.zero_grad()
        with recompute(model, names):
            model(torch.ones(3, 2, 4))[0].square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
def test_on_cuda_the_masks_of_a_second_forward_are_refused() -> None:
    model = nn.LSTM(4, 4, 2, dropout=0.5).cuda()
    with recompute(model, [""]), pytest.raises(NotRecomputable, match="cuDNN"):
        model(torch.ones(3, 2, 4, device="cuda"))


@pytest.mark.gpu
def test_the_reason_is_true() -> None:
    """If this fails, cuDNN's dropout follows the random state now, and nothing has to be refused any more.

    Newer versions of torch begin it anew, from the random state, in the first call after that state was set; what
    later calls draw is not in that state.
    """
    model = nn.LSTM(4, 64, 2, dropout=0.5).cuda()
    x = torch.ones(3, 2, 4, device="cuda")
    model(x)
    state = torch.cuda.get_rng_state()
    first = model(x)[0]
    torch.cuda.set_rng_state(state)
    assert not torch.equal(model(x)[0], first)
