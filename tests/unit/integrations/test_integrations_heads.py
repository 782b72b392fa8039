"""ExactTrainer on heads whose loss is the mean over something else than labels, or no mean."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from anybatch.errors import AnyBatchWarning, BatchError
from anybatch.integrations.transformers import ExactTrainer
from trainer_heads import LENGTH, SIZES, Samples, assert_whole, bert, llama, tokens, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def answers(*, ends_behind: bool = False) -> Samples:
    """Texts of which the first have their answer within the text, and the last ones behind it."""
    torch.manual_seed(2)
    found = []
    for row in range(22):
        begin = torch.tensor(row % 4 if row < 15 else LENGTH + 3)
        end = torch.tensor(LENGTH + 1) if ends_behind else begin + 2
        found.append({"input_ids": torch.randint(3, 32, (LENGTH,)), "start_positions": begin, "end_positions": end})
    return found


def test_answers_behind_the_text_do_not_count(tmp_path: Path) -> None:
    model = bert("QuestionAnswering")
    _, seen = trained(ExactTrainer, copy.deepcopy(model), answers(), tmp_path, micro_batch_size=3)
    assert_whole(seen.gradients[0], model, answers())


def test_answers_that_are_half_behind_the_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="begin within the text of 9 tokens and end behind it"):
        trained(ExactTrainer, bert("QuestionAnswering"), answers(ends_behind=True), tmp_path)


def speech(reduction: str) -> Any:
    return transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(
            vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
            feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False,
            feat_extract_norm="layer", do_stable_layer_norm=True, ctc_loss_reduction=reduction, pad_token_id=0,
        )
    )  # fmt: skip


def sounds() -> Samples:
    torch.manual_seed(3)
    found = []
    for row in range(22):
        labels = torch.randint(1, 12, (6,))
        labels[2 + row % 5 :] = -100
        found.append({"input_values": torch.randn(400), "labels": labels})
    return found


def test_averaged_ctc_counts_samples(tmp_path: Path) -> None:
    model = speech("mean")
    _, seen = trained(ExactTrainer, copy.deepcopy(model), sounds(), tmp_path, micro_batch_size=3)
    assert_whole(seen.gradients[0], model, sounds())


def test_summed_ctc_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="ctc_loss_reduction = 'mean'"):
        trained(ExactTrainer, speech("sum"), sounds(), tmp_path)


def test_a_balanced_router_is_named(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=3, output_router_logits=True, router_aux_loss_coef=0.1
    )
    with pytest.warns(AnyBatchWarning, match="load balancing"):
        trained(ExactTrainer, transformers.MixtralForCausalLM(config), tokens(), tmp_path, verify="off")


def test_the_model_is_unwrapped_once_and_not_for_each_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    calls: list[Any] = []
    unwrap = Accelerator.unwrap_model
    counting = ("count_items", "is_shifted", "_model_of", "check_head")

    def counted(self: Accelerator, model: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(sys._getframe(1).f_code.co_name)
        return unwrap(self, model, *args, **kwargs)

    monkeypatch.setattr(Accelerator, "unwrap_model", counted)
    trained(ExactTrainer, llama(), tokens(), tmp_path, micro_batch_size=2)
    assert [name for name in calls if name in counting] == ["_model_of"]
