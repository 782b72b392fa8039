"""Sizes of tiny models: what is said to every configuration, and what single architectures need beside that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORDS, CLASSES = 64, 3
PADDING, BEGIN, END = 0, 1, 2

SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "n_embed"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "d_inner"), 48),
    **dict.fromkeys(("ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "hidden_dim"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    "vocab_size": WORDS, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "d_head": 8, "d_embed": 32,
    "image_size": 64, "embedding_size": 32, "type_vocab_size": 2, "use_cache": False,
    "pad_token_id": PADDING, "bos_token_id": BEGIN, "eos_token_id": END, "decoder_start_token_id": BEGIN,
}  # fmt: skip

# Mostly because sizes of their own have to agree. ``None`` leaves out what ``SIZES`` says.
_DEEPSEEK = {
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16, "n_group": 1,
    "topk_group": 1, "num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
_SOUND = {
    "conv_dim": [16, 16, 16], "conv_stride": [5, 4, 4], "conv_kernel": [10, 4, 4], "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False, "classifier_proj_size": 16,
}  # fmt: skip
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_WORDS = {"vocab_size": WORDS, "max_position_embeddings": 64, "pad_token_id": PADDING, "bos_token_id": BEGIN}
_TWO = {
    "text_config": {**_TOWER, **_WORDS, "eos_token_id": END},
    "vision_config": {**_TOWER, "image_size": 64, "patch_size": 16},
}
NEEDS: Mapping[str, Mapping[str, Any]] = {
    "bit": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 4},
    "clip": {**_TWO, "projection_dim": 16},
    "convnextv2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "greedy"},
    "deepseek_v3": _DEEPSEEK,
    "dots1": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "focalnet": {"embed_dim": 8, "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "hubert": _SOUND,
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "longformer": {"attention_window": 4},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 8, "head_dim": 8, "chunk_size": 4},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 48]},
    "pegasus_x": {"block_size": 4, "num_global_tokens": 2},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "poolformer": {
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_encoder_blocks": 2,
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
        "drop_path_rate": 0.0,
    },
    "pvt": {
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_encoder_blocks": 2,
        "num_attention_heads": [1, 2],
        "patch_sizes": [4, 2],
        "strides": [4, 2],
        "sequence_reduction_ratios": [2, 1],
        "mlp_ratios": [2, 2],
    },
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "segformer": {
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_encoder_blocks": 2,
        "num_attention_heads": [1, 2],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "sr_ratios": [2, 1],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16,
    },
    "swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    "swinv2": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    "siglip": _TWO,
    "unispeech-sat": _SOUND,
    "wav2vec2": _SOUND,
    "wavlm": _SOUND,
    "yoso": {"use_expectation": True},
    "xmod": {"default_language": "en_XX"},
}

# Made as they are, but for what is said here; 64 by 64 pixels, three classes.
_CLASSES = {"num_classes": CLASSES}
_SMALL = {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 32, "patch_size": [4, 4], "window_size": [4, 4]}
TORCHVISION: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("efficientnet_b0", "googlenet", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small"), _CLASSES),
    **dict.fromkeys(("regnet_y_400mf", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1"), _CLASSES),
    "googlenet": {**_CLASSES, "aux_logits": False, "init_weights": False},
    "SwinTransformer": {**_SMALL, **_CLASSES},
    "VisionTransformer": {
        "image_size": 64, "patch_size": 16, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48, **_CLASSES
    },
}  # fmt: skip
_SMALL_IMAGES = {**_CLASSES, "img_size": 64}
_TESTS = (
    "test_byobnet", "test_convnext", "test_convnext2", "test_convnext3", "test_efficientnet", "test_efficientnet_evos",
    "test_efficientnet_gn", "test_efficientnet_ln", "test_mambaout", "test_nfnet", "test_resnet",
)  # fmt: skip
TIMM: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys((*_TESTS, "ghostnet_050", "lcnet_050", "mobilenetv3_small_050", "resnet10t"), _CLASSES),
    **dict.fromkeys(("test_vit", "test_vit2", "test_vit3", "test_vit4"), _SMALL_IMAGES),
}
