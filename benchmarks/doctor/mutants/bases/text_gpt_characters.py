# A small causal transformer on made-up sentences, in the manner of a well-known small repository.
import argparse

import torch
import torch.nn as nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--learning_rate", type=float, default=3e-3)
args = parser.parse_args()
torch.manual_seed(args.seed)
# hyperparameters
batch_size, block_size, n_embd, n_head, n_layer, max_iters = 16, 24, 32, 4, 2, 150

subjects, verbs, objects = (
    ["the cat", "a dog", "my horse"],
    ["sees", "likes", "chases"],
    ["the mouse", "a bird", "my hat"],
)
sentences = []
for _ in range(600):
    i, j, k = torch.randint(3, (3,)).tolist()
    sentences.append(f"{subjects[i]} {verbs[j]} {objects[k]}. ")
text = "".join(sentences)
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


def get_batch(split):
    source = train_data if split == "train" else val_data
    ix = torch.randint(len(source) - block_size - 1, (batch_size,))
    xb = torch.stack([source[i : i + block_size] for i in ix])
    yb = torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])
    return xb, yb


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, n_head, C // n_head).transpose(1, 2) for part in self.attn(self.ln_1(x)).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(len(chars), n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


@torch.no_grad()
def estimate():
    model.eval()
    right = torch.zeros(8)
    for k in range(8):
        X, Y = get_batch("val")
        logits, _ = model(X, Y)
        right[k] = (logits.argmax(-1) == Y).float().mean()
    model.train()
    return right.mean()


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
for iteration in range(max_iters):
    X, Y = get_batch("train")
    logits, loss = model(X, Y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if iteration % 50 == 0:
        print(f"step {iteration}: loss {loss.item():.4f}, accuracy {estimate().item():.4f}")
print(f"metric {estimate().item():.4f}")
