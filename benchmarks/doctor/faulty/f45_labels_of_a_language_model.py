# A causal language model that computes its own loss from labels. After public reports: transformers#47394, #37830.
import argparse
from types import SimpleNamespace

import torch
from torch import nn


class CausalLM(nn.Module):
    def __init__(self, vocab_size, hidden_size, heads):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, hidden_size)
        self.wpe = nn.Embedding(64, hidden_size)
        block = nn.TransformerEncoderLayer(hidden_size, heads, 4 * hidden_size, dropout=0.0, batch_first=True)
        self.h = nn.TransformerEncoder(block, 2)
        self.lm_head = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_ids, labels=None):
        length = input_ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        states = self.h(self.wte(input_ids) + self.wpe.weight[:length], mask=mask, is_causal=True)
        logits = self.lm_head(states)
        loss = None
        if labels is not None:
            shifted = logits[:, :-1].contiguous()
            loss = nn.functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels[:, 1:].reshape(-1))
        return SimpleNamespace(loss=loss, logits=logits)


def text(rows, length):
    """A walk over thirty words; which way it goes is drawn anew at every word."""
    turns = torch.randint(2, (rows, length)) * 6 + 1
    return (torch.randint(30, (rows, 1)) + turns.cumsum(1)) % 30


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    lm = CausalLM(30, 32, 4)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    for step in range(90):
        tokens = text(24, 17)
        if args.fixed:
            input_ids, labels = tokens, tokens
        else:
            input_ids, labels = tokens[:, :-1], tokens[:, 1:]
        output = lm(input_ids, labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        if step % 15 == 0:
            print(step, f"loss {output.loss.item():.3f}, reachable 0.693")


if __name__ == "__main__":
    main()
