"""Tiny random models on disk, for the NVFP4 tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

HIDDEN, INTERMEDIATE, LAYERS, HEADS, HEAD_DIM = 64, 96, 2, 4, 16
END_OF_TEXT = "<end>"
FAMILIES = ("llama", "qwen2", "qwen3")


def config_values(family: str, **overrides: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
    }
    if family == "qwen2":
        del values["head_dim"]
    return values | overrides


def write_model(
    folder: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **overrides: Any
) -> Any:
    """Build a random model with transformers, save it with a tokenizer, and return it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**config_values(family, **overrides))
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # scales that differ, with some channels far louder than the rest
                loud = torch.rand(parameter.shape) < 0.06
                parameter.copy_((0.5 + torch.rand(parameter.shape)) * torch.where(loud, 12.0, 1.0))
            elif name.endswith(("v_proj.weight", "up_proj.weight")):
                parameter.mul_(5.0)  # fused groups whose members have different amaxes
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.eval()


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with 256 byte tokens and one special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
