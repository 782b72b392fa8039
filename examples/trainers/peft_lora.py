"""A LoRA of PEFT in ExactTrainer: the gradient of the whole batch, in as many micro-batches as the budget needs."""

from typing import Any

from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

from anybatch.integrations.transformers import ExactTrainer


def train(model: Any, dataset: Any, folder: str, memory: Any, **settings: Any) -> Any:
    """Trains the LoRA; memory is the budget, such as "24GiB"."""
    lora = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0))
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    trainer = ExactTrainer(lora, TrainingArguments(folder, **sizes, **settings), train_dataset=dataset, memory=memory)
    trainer.train()
    return trainer
