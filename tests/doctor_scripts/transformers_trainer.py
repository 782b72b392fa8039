"""A tiny causal language model, trained by the Transformers Trainer on Python's own source; ``--fault`` plants one."""

import argparse
import inspect
import tempfile
import textwrap

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Text(Dataset[dict[str, torch.Tensor]]):
    """Windows of bytes."""

    def __init__(self, length: int = 32) -> None:
        data = torch.tensor(list(inspect.getsource(textwrap).encode()), dtype=torch.long)
        self.windows = data[: len(data) // length * length].view(-1, length)

    def __len__(self) -> int:
        return min(320, len(self.windows))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main() -> None:
    """Trains for an epoch or two."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=["head-not-optimized", "learning-rate"])
    parser.add_argument("--save")
    options = parser.parse_args()
    set_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config)
    rate = 10.0 if options.fault == "learning-rate" else 1e-3
    trained = list(model.parameters())
    if options.fault == "head-not-optimized":
        trained = list(model.transformer.parameters())
    optimizer = torch.optim.AdamW(trained, lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=8, num_train_epochs=2, report_to=[], save_strategy="no",
            logging_steps=10, disable_tqdm=True, use_cpu=True, seed=0, max_grad_norm=1.0,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Text(), optimizers=(optimizer, scheduler))
        trainer.train()
    if options.save:
        torch.save({"weights": model.state_dict(), "random": torch.get_rng_state()}, options.save)


if __name__ == "__main__":
    main()
