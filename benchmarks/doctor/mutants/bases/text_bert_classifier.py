# A tiny BERT from Transformers, made anew, that tells which of two marker words comes first.
import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)


def make_batch(n, length=10):
    ids = torch.randint(5, 30, (n, length))
    lengths = torch.randint(6, length + 1, (n,))
    labels = torch.randint(2, (n,))
    for row in range(n):
        first, second = sorted(torch.randperm(int(lengths[row]))[:2].tolist())
        ids[row, first], ids[row, second] = (3, 4) if labels[row] else (4, 3)
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


config = BertConfig(
    vocab_size=30,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    num_labels=2,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
no_decay = ["bias", "LayerNorm.weight"]
groups = [
    {"params": [p for n, p in model.named_parameters() if not any(k in n for k in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in model.named_parameters() if any(k in n for k in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=2e-3)
total_steps = 220
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=20, num_training_steps=total_steps)
model.train()
for step in range(total_steps):
    batch = make_batch(32)
    outputs = model(**batch)
    loss = outputs.loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 55 == 0:
        print(f"step {step} loss {loss.item():.4f}")
model.eval()
with torch.no_grad():
    batch = make_batch(300)
    labels = batch.pop("labels")
    accuracy = (model(**batch).logits.argmax(dim=-1) == labels).float().mean().item()
print(f"metric {accuracy:.4f}")
