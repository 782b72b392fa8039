# A tiny GPT-2 with the Trainer of Transformers on counting sequences.
import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Counting(Dataset):
    def __init__(self, count):
        start = torch.randint(0, 16, (count, 1))
        stride = torch.randint(1, 4, (count, 1))
        self.ids = (start + stride * torch.arange(10)) % 16

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index].clone()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    set_seed(args.seed)
    train, test = Counting(1600), Counting(200)
    config = GPT2Config(
        vocab_size=16,
        n_positions=10,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=16,
        max_steps=120,
        learning_rate=4e-3,
        lr_scheduler_type="linear",
        warmup_steps=10,
        logging_steps=40,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=args.seed,
        disable_tqdm=True,
        gradient_accumulation_steps=1,
        max_grad_norm=1.0,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=train)
    trainer.train()
    model.eval()
    with torch.no_grad():
        guess = model(test.ids).logits[:, 1:-1].argmax(dim=-1)
    print(f"metric {(guess == test.ids[:, 2:]).float().mean().item():.4f}")


main()
