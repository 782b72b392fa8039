# Reads a sequence of tones from a spectrogram with CTC, as one recognises speech.
import sys

import torch
from torch import nn

SYMBOLS, BINS, BLANK = 4, 10, 0


def utterance():
    length = int(torch.randint(2, 5, (1,)))
    labels = torch.randint(1, SYMBOLS + 1, (length,))
    frames = []
    for label in labels.tolist():
        duration = int(torch.randint(3, 6, (1,)))
        tone = torch.zeros(BINS)
        tone[2 * label - 1] = 2.0
        frames += [tone] * duration + [torch.zeros(BINS)]
    return torch.stack(frames) + 0.3 * torch.randn(len(frames), BINS), labels


def batch_of(n):
    items = [utterance() for _ in range(n)]
    spectra = nn.utils.rnn.pad_sequence([s for s, _ in items], batch_first=True)
    labels = torch.cat([label for _, label in items])
    input_lengths = torch.tensor([len(s) for s, _ in items])
    label_lengths = torch.tensor([len(label) for _, label in items])
    return spectra, labels, input_lengths, label_lengths


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(BINS, 24, 3, padding=1)
        self.gru = nn.GRU(24, 24, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(48, SYMBOLS + 1)

    def forward(self, spectra):
        x = torch.relu(self.conv(spectra.transpose(1, 2))).transpose(1, 2)
        x, _ = self.gru(x)
        return self.fc(x).log_softmax(dim=2)


def decode(row):
    best, previous = [], BLANK
    for symbol in row.tolist():
        if symbol not in (previous, BLANK):
            best.append(symbol)
        previous = symbol
    return best


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
net = Recogniser()
ctc = nn.CTCLoss(blank=BLANK, zero_infinity=True)
optimizer = torch.optim.Adam(net.parameters(), lr=8e-3)
for step in range(150):
    spectra, labels, input_lengths, label_lengths = batch_of(16)
    log_probs = net(spectra)
    loss = ctc(log_probs.transpose(0, 1), labels, input_lengths, label_lengths)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step} ctc {loss.item():.3f}")
with torch.no_grad():
    spectra, labels, input_lengths, label_lengths = batch_of(100)
    guesses = net(spectra).argmax(dim=2)
right = 0
for guess, truth, n in zip(guesses, labels.split(label_lengths.tolist()), input_lengths.tolist(), strict=True):
    right += decode(guess[:n]) == truth.tolist()
print(f"metric {right / 100:.4f}")
