"""The examples inside trainers of other libraries: one update of theirs with ours is that of the whole batch."""

import copy
import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from source_tree import ROOT

FOLDER = ROOT / "examples" / "trainers"
ONCE: dict[str, Any] = {
    "max_steps": 1, "use_cpu": True, "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0, "save_strategy": "no", "disable_tqdm": True, "report_to": "none",
}  # fmt: skip


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"trainers_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts() -> list[str]:
    drawn = random.Random(0)
    return [" ".join(f"w{drawn.randrange(50)}" for _ in range(drawn.randrange(3, 20))) for _ in range(16)]


def words() -> Any:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    known = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{place}": place + 3 for place in range(50)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def assert_same_update(
    before: torch.nn.Module, ours: torch.nn.Module, whole: torch.nn.Module, factor: float = 1.0
) -> None:
    """The update of the whole batch by the library's own trainer, times a factor where that divides by more."""
    starts = dict(before.named_parameters())
    moved = 0.0
    for (name, mine), other in zip(ours.named_parameters(), whole.parameters(), strict=True):
        start = starts.get(name, other * 0 if "lora_B" in name else other)  # where PEFT begins
        torch.testing.assert_close(mine, start + factor * (other - start), rtol=1e-4, atol=1e-6)
        moved += float((other - start).detach().abs().sum())
    assert moved > 1e-3


def test_each_has_at_most_20_lines() -> None:
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.glob("*.py")}
    assert len(lines) == 4
    assert max(lines.values()) <= 20, lines


@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore::FutureWarning")
def test_a_lora_of_peft_in_the_exact_trainer(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from transformers import Trainer, TrainingArguments

    module, model = example("peft_lora"), gpt2()
    rows: list[dict[str, torch.Tensor]] = []
    for text in texts():
        tokens = torch.tensor(words()(text)["input_ids"][:3])
        labels = torch.where(torch.arange(3) < 2 + len(rows) % 2, tokens, -100)  # uneven counts
        rows.append({"input_ids": tokens, "labels": labels})
    before = copy.deepcopy(model)
    ours = module.train(model, rows, str(tmp_path / "ours"), None, **ONCE).model
    torch.manual_seed(0)
    config = module.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0)
    other = module.get_peft_model(copy.deepcopy(before), config)
    first = {name: one for name, one in ours.named_parameters() if "lora_A" in name}
    for name, one in other.named_parameters():
        if name in first:  # drawn at random; its gradient is 0 in the first update
            one.data.copy_(first[name].data)
    arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=16, **ONCE)
    Trainer(other, arguments, train_dataset=rows).train()
    every = 16 + 16 + 8  # labels, by all of which Transformers divides; the first of each row is predicted by nothing
    assert_same_update(before, ours, other, every / (every - 16))
    assert any(bool(one.any()) for name, one in ours.named_parameters() if "lora_B" in name)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_sft_trainer_of_trl(tmp_path: Path) -> None:
    trl: Any = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    module, model, data = example("trl_sft"), gpt2(), datasets.Dataset.from_dict({"text": texts()})
    before, other = copy.deepcopy(model), copy.deepcopy(model)
    options = {**ONCE, "bf16": False}
    ours = module.train(model, data, words(), str(tmp_path / "ours"), None, **options).model
    arguments = trl.SFTConfig(str(tmp_path), per_device_train_batch_size=16, **options)
    trl.SFTTrainer(other, arguments, train_dataset=data, processing_class=words()).train()
    tokens = sum(len(text.split()) for text in texts())
    # TRL divides by all labels too.
    assert_same_update(before, ours, other, (tokens + 16) / tokens)


def test_the_trainer_of_sentence_transformers_with_all_pairs_of_the_batch(tmp_path: Path) -> None:
    st, datasets = pytest.importorskip("sentence_transformers"), pytest.importorskip("datasets")
    modules: Any = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    quiet: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(vocab_size=64, intermediate_size=32, **sizes, **quiet)).save_pretrained(tmp_path / "bert")
    words().save_pretrained(tmp_path / "bert")
    encoder = modules.Transformer(str(tmp_path / "bert"))
    model = st.SentenceTransformer(modules=[encoder, modules.Pooling(16)], device="cpu")
    data = datasets.Dataset.from_dict({"anchor": texts(), "positive": texts()[::-1]})
    before, other = copy.deepcopy(model), copy.deepcopy(model)
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

    def trained(one: Any, trainer: Callable[..., Any]) -> Any:
        arguments = st.SentenceTransformerTrainingArguments(str(tmp_path), per_device_train_batch_size=16, **ONCE)
        loss = losses.MultipleNegativesRankingLoss(one)
        trainer(one, arguments, train_dataset=data, loss=loss).train()
        return one

    ours = trained(model, example("sentence_transformers_coupled").CoupledTrainer)
    assert_same_update(before, ours, trained(other, st.SentenceTransformerTrainer))


def test_a_recipe_as_torchtune_writes_it() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)).double()
    other = copy.deepcopy(model)
    batches = []
    for rows in (4, 3, 5):
        tokens = torch.randint(20, (rows, 6))
        labels = torch.where(torch.rand(rows, 6) < 0.5, tokens, -100)
        batches.append({"tokens": tokens, "labels": labels})
    module = example("recipe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    (found,) = module.train(model, batches, optimizer, 3, scheduler=scheduler, clip_norm=1e9)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in ("tokens", "labels")}
    loss = module.next_token_loss(other, whole)
    loss.backward()
    assert found == pytest.approx(loss.item(), rel=1e-12)
    with torch.no_grad():
        for mine, one in zip(model.parameters(), other.parameters(), strict=True):
            assert one.grad is not None
            torch.testing.assert_close(mine, one - 0.5 * one.grad, rtol=1e-12, atol=1e-12)
