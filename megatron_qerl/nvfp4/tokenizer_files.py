"""Which files are a model's tokenizer, and what identifies them.

Token ids mean nothing without the tokenizer that made them, so a checkpoint records the hash of these files and a
run compares. The files are copied unchanged when a model is quantised.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_qerl.errors import CheckpointError

TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def tokenizer_hash(path: Path) -> str:
    """SHA-256 over the names and bytes of the tokenizer files in a folder."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        file = path / name
        if file.is_file():
            data = file.read_bytes()
            digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def chat_template_hash(path: Path) -> str | None:
    """SHA-256 of the chat template, from its own file or from tokenizer_config.json; None when there is none."""
    for name in CHAT_TEMPLATE_FILES:
        if (path / name).is_file():
            return hashlib.sha256((path / name).read_bytes()).hexdigest()
    config = path / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_vocabulary(path: Path, config: dict[str, Any]) -> None:
    """Every token id of tokenizer.json must be a row of the embedding.

    Raises:
        CheckpointError: the largest token id is not below ``vocab_size``.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        return
    content = json.loads(file.read_text(encoding="utf-8"))
    size = 1 + max([*_vocabulary_ids(content), *(token["id"] for token in content.get("added_tokens", []))], default=-1)
    vocab_size = config.get("vocab_size")
    if vocab_size is None or size > vocab_size:
        rule = f"exceeds vocab_size = {vocab_size} in config.json, so this is the tokenizer of another model"
        raise CheckpointError(str(file), f"{size} token ids", rule, "Copy the tokenizer files of the source model")


def _vocabulary_ids(content: dict[str, Any]) -> Iterable[int]:
    vocabulary = content.get("model", {}).get("vocab", {})
    # BPE, WordPiece and WordLevel map a token to its id; Unigram lists the tokens in order.
    return vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
