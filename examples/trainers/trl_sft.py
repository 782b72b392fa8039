"""SFTTrainer of TRL with the gradient of its whole batch: ExactTraining stands before it among the bases."""

from typing import Any

from trl import SFTConfig, SFTTrainer

from anybatch.integrations.transformers import ExactTraining


class ExactSFTTrainer(ExactTraining, SFTTrainer):
    """Takes memory= and the other options of ExactTraining."""


def train(model: Any, dataset: Any, tokenizer: Any, folder: str, memory: Any, **settings: Any) -> Any:
    """Trains on texts; memory is the budget, such as "24GiB"."""
    arguments = SFTConfig(folder, per_device_train_batch_size=4, gradient_accumulation_steps=4, **settings)
    trainer = ExactSFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer, memory=memory)
    trainer.train()
    return trainer
