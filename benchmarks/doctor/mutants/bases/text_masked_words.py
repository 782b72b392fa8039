# Fills in masked tokens of padded sequences with a transformer encoder.
import sys

import torch
from torch import nn

PAD, MASK, VOCAB, LENGTH = 0, 1, 14, 12


def sequences(n):
    start = torch.randint(2, VOCAB, (n, 1))
    step = torch.randint(1, 3, (n, 1))
    ids = (start - 2 + step * torch.arange(LENGTH)) % (VOCAB - 2) + 2
    lengths = torch.randint(6, LENGTH + 1, (n, 1))
    return torch.where(torch.arange(LENGTH) < lengths, ids, PAD)


def mask_tokens(ids):
    chosen = (torch.rand(ids.shape) < 0.2) & (ids != PAD)
    labels = torch.where(chosen, ids, -100)
    return torch.where(chosen, MASK, ids), labels


class MaskedModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.positions = nn.Parameter(torch.randn(LENGTH, dim) * 0.1)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        padding = ids == PAD
        hidden = self.encoder(self.tokens(ids) + self.positions, src_key_padding_mask=padding)
        return self.decoder(hidden)


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
model = MaskedModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss(ignore_index=-100)
for step in range(200):
    inputs, labels = mask_tokens(sequences(32))
    logits = model(inputs)
    loss = criterion(logits.view(-1, VOCAB), labels.view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"{step:4d} {loss.item():.4f}")
model.eval()
with torch.no_grad():
    inputs, labels = mask_tokens(sequences(300))
    guess = model(inputs).argmax(-1)
    known = labels != -100
    print(f"metric {(guess == labels)[known].float().mean().item():.4f}")
