"""An encoder and a decoder in one net: the targets are compared with what the decoder is given, wherever that stands.

How it could be silently wrong: the source, which may be seen as a whole, is taken for what is given too early; an
autoencoder, whose targets are its source, is accused.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Doctor
from anybatch.doctor.ask.asking import run_probes
from anybatch.doctor.diagnosing import diagnose
from test_doctor_ask import TRAINING, unasked

SYMBOLS, LENGTH = 20, 7


class Translator(nn.Module):
    """Reads a source, and gives scores for each place of a target."""

    def __init__(self, *, looks_ahead: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, 16)
        self.read = nn.GRU(16, 16, batch_first=True)
        self.write = nn.GRU(16, 8 if looks_ahead else 16, batch_first=True, bidirectional=looks_ahead)
        self.score = nn.Linear(16, SYMBOLS)

    def forward(self, source: Any, mask: Any = None, decoder: Any = None, labels: Any = None) -> torch.Tensor:
        """Gives scores."""
        state = self.read(self.embed(source))[1]
        state = (
            state.unflatten(-1, (2, 8)).permute(2, 0, 1, 3)[:, 0].contiguous() if self.write.bidirectional else state
        )
        scores: torch.Tensor = self.score(self.write(self.embed(decoder), state)[0])
        return scores


class Stepwise(Translator):
    """Is given the targets themselves, and reads at each place the one before it."""

    def __init__(self) -> None:
        super().__init__(looks_ahead=False)
        self.cell = nn.GRUCell(16, 16)

    def forward(self, source: Any, mask: Any = None, decoder: Any = None, labels: Any = None) -> torch.Tensor:
        """Gives scores."""
        state = self.read(self.embed(source))[1][0]
        token, scores = torch.ones(len(decoder), dtype=torch.long), []
        for at in range(decoder.shape[1]):
            state = self.cell(self.embed(token), state)
            scores.append(self.score(state))
            token = decoder[:, at]
        return torch.stack(scores, 1)


def found(
    given: str, source: str = "reversed", *, looks_ahead: bool = False, masked: bool = False, stepwise: bool = False,
    net: nn.Module | None = None,
) -> list[str]:  # fmt: skip
    torch.manual_seed(0)
    net = net or (Stepwise() if stepwise else Translator(looks_ahead=looks_ahead))
    adam = torch.optim.Adam(net.parameters(), 1e-3)
    with Doctor() as doctor:
        for _ in range(12):
            words = torch.randint(2, SYMBOLS, (8, LENGTH))
            text = torch.cat([torch.ones(8, 1, dtype=torch.long), words], 1)
            targets = text[:, 1:]
            decoder = targets if given == "targets" else text[:, :-1]
            first = targets.flip(1) if source == "reversed" else targets.clone()
            mask = torch.ones_like(words) if masked else None
            scores = net(first, mask, decoder=decoder, labels=targets)
            adam.zero_grad()
            F.cross_entropy(scores.reshape(-1, SYMBOLS), targets.reshape(-1)).backward()
            adam.step()
        with pytest.MonkeyPatch.context() as patch:
            for place in TRAINING:
                patch.setattr(place, unasked)
            for one in run_probes(doctor):
                doctor.emit(one)
    return [one.name for one in diagnose(doctor.run)]


@pytest.mark.parametrize("masked", [False, True])
def test_a_decoder_that_is_given_its_targets_is_found(masked: bool) -> None:
    assert found("targets", masked=masked)[:1] == ["LABEL_SHIFT"]


@pytest.mark.parametrize("source", ["reversed", "the targets"])
@pytest.mark.parametrize("masked", [False, True])
def test_one_that_is_given_those_before_is_not(source: str, masked: bool) -> None:
    assert not {"LABEL_SHIFT", "TIME_LEAK"} & set(found("those before", source, masked=masked))


def test_one_that_sees_those_after_is_found() -> None:
    assert "TIME_LEAK" in found("those before", looks_ahead=True)


@pytest.mark.parametrize("source", ["reversed", "the targets"])
def test_one_that_shifts_its_targets_itself_is_not(source: str) -> None:
    assert not {"LABEL_SHIFT", "TIME_LEAK"} & set(found("targets", source, stepwise=True))


class Attending(nn.Module):
    """Attention that is written by hand, or none: each token by itself, as a tagger may look at it."""

    def __init__(self, *, looks_back: bool) -> None:
        super().__init__()
        self.embed, self.score, self.looks_back = nn.Embedding(SYMBOLS, 16), nn.Linear(16, SYMBOLS), looks_back
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, source: Any, mask: Any = None, decoder: Any = None, labels: Any = None) -> torch.Tensor:
        """Gives scores."""
        made: torch.Tensor = self.embed(decoder)
        if self.looks_back:
            ahead = torch.ones(LENGTH, LENGTH).triu(1).bool()
            weights = (self.query(made) @ self.key(made).transpose(1, 2)).masked_fill(ahead, -torch.inf).softmax(-1)
            made = made + weights @ made
        scores: torch.Tensor = self.score(made)
        return scores


@pytest.mark.parametrize("looks_back", [True, False])
def test_attention_by_hand_over_the_targets_is_found_and_a_tagger_is_not(looks_back: bool) -> None:
    net = Attending(looks_back=looks_back)
    assert (found("targets", net=net)[:1] == ["LABEL_SHIFT"]) == looks_back
    assert "LABEL_SHIFT" not in found("those before", net=Attending(looks_back=True))
