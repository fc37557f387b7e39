"""Random models of a few thousand weights, as complete Hugging Face folders with a character tokenizer.

The vocabulary is mostly digits, so that even a random model answers a one-digit problem now and then and groups carry a
signal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

CHARACTERS = "0123456789+-*=? abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,"
SPECIAL = ("<pad>", "<eos>", "<unk>")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 80,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
# What a mixture of experts has beside them: two blocks of eight experts, three for each token.
EXPERT_SIZES: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}


def write_tokenizer(folder: Path) -> None:
    """A tokenizer with one token a character and a chat template that appends ``=``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    fast.save_pretrained(folder)


def write_model(
    folder: Path,
    family: str = "llama",
    *,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scale: float = 0.3,
    **sizes: Any,
) -> Path:
    """A random model of ``family`` (llama, qwen2, qwen3, qwen3_moe); weights are wide enough that logits differ.

    Norm scales and biases are random too: ones and zeros would hide a swapped name.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SIZES | (EXPERT_SIZES if family == "qwen3_moe" else {}) | sizes
    config = AutoConfig.for_model(
        family, **{"tie_word_embeddings": tied, "eos_token_id": 1, "pad_token_id": 0, **sizes}
    )
    if family in ("qwen3", "qwen3_moe"):
        config.head_dim = sizes.get("head_dim", 16)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in name else scale * noise)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
