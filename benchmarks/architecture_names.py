"""The architectures of Transformers that are looked at, and the heads beside or instead of those for text."""

from __future__ import annotations

from collections.abc import Mapping

_TEXT = (
    "albert", "bart", "bert", "big_bird", "biogpt", "bloom", "camembert", "canine", "codegen", "convbert", "ctrl",
    "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "falcon", "flaubert", "fnet", "funnel",
    "gemma", "gemma2", "glm", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "helium", "ibert",
    "led", "llama", "longformer", "longt5", "luke", "m2m_100", "mamba", "mamba2", "marian", "mbart",
    "megatron-bert", "mistral", "mobilebert", "modernbert", "mpnet", "mpt", "mra", "mt5", "mvp", "nemotron",
    "nystromformer", "olmo", "olmo2", "openai-gpt", "opt", "pegasus", "pegasus_x", "persimmon", "phi", "phi3",
    "plbart", "prophetnet", "qwen2", "qwen3", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "rwkv", "smollm3", "squeezebert", "stablelm", "starcoder2", "t5", "umt5", "xglm", "xlm", "xlm-roberta", "xlnet",
    "xmod", "yoso",
)  # fmt: skip
_EXPERTS = (
    "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "jamba", "minimax", "mixtral", "olmoe",
    "phimoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
_CAUSAL_ONLY = (
    "falcon_mamba", "recurrent_gemma", "apertus", "cohere", "seed_oss", "lfm2", "arcee",
)  # fmt: skip
_IMAGES = (
    "beit", "bit", "convnext", "convnextv2", "dinov2", "focalnet", "mobilenet_v2", "mobilevit", "poolformer", "pvt",
    "regnet", "resnet", "segformer", "swin", "swinv2", "vit",
)  # fmt: skip
_SOUNDS = (
    "hubert", "unispeech-sat", "wav2vec2", "wavlm",
)  # fmt: skip

TRANSFORMERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_EXPERTS, ("causal, router loss", "causal")),
    "switch_transformers": ("seq2seq",),
    **dict.fromkeys(_SOUNDS, ("CTC, sum", "CTC, mean", "audio")),
    **dict.fromkeys(("clip", "siglip"), ("contrastive",)),
    **dict.fromkeys(_IMAGES, ("image",)),
    "segformer": ("segmentation", "image"),
    **dict.fromkeys(_TEXT, ()),
    "bert": ("causal", "masked", "sequence", "token", "question", "pretraining"),
    **dict.fromkeys(_CAUSAL_ONLY, ("causal",)),
}
