"""Calibration tokens: text -> one endless row of token ids -> sequences of exactly the asked length.

Documents are joined with the end-of-text token and cut without regard to where they end, so no token is padding and
every position counts alike. The hash of the ids goes into the manifest: with it and the file anyone can tell whether
two checkpoints saw the same data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_qerl.config.schema import CalibrationSection
from megatron_qerl.errors import DataError
from megatron_qerl.nvfp4.calibration_text import built_in_text
from megatron_qerl.nvfp4.manifest import CalibrationRecord


def calibration_tokens(section: CalibrationSection, model: Path) -> tuple[Tensor, CalibrationRecord]:
    """Token ids [sequences, sequence_length], int64, and what to record about them.

    Args:
        section: which text and how much of it.
        model: folder with the tokenizer.
    Raises:
        DataError: the file is missing, a line is not an object with the text field, or the text is too short.
    """
    tokenizer = _tokenizer(model)
    wanted_tokens = section.sequences * section.sequence_length
    texts = built_in_text(section.seed) if section.dataset is None else jsonl_text(section.dataset, section.text_field)
    ids: list[int] = []
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=False) + separator
        if len(ids) >= wanted_tokens:
            break
    if len(ids) < wanted_tokens:
        rule = f"too little text, sequences * sequence_length = {wanted_tokens} tokens are needed"
        remedy = "Lower calibration.sequences or give more text"
        raise DataError("calibration.dataset", f"{section.dataset} ({len(ids)} tokens)", rule, remedy)
    tokens = np.array(ids[:wanted_tokens], dtype="<i4").reshape(section.sequences, section.sequence_length)
    record = CalibrationRecord(
        dataset="built-in" if section.dataset is None else section.dataset.name,
        sequences=section.sequences,
        sequence_length=section.sequence_length,
        seed=section.seed,
        tokens_sha256=hashlib.sha256(tokens.tobytes()).hexdigest(),
    )
    return torch.from_numpy(tokens.astype(np.int64)), record


def jsonl_text(path: Path, text_field: str) -> Iterator[str]:
    """The text of each line of a JSONL file, in file order.

    Raises:
        DataError: names the file and the line.
    """
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise DataError(
            "calibration.dataset", path, rule, "Check the path, or use null for the built-in text"
        ) from error
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _text(f"{path}:{number}", line, text_field)


def _text(where: str, line: str, text_field: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise DataError(where, line.strip()[:40], "not JSON", "Give one JSON object a line") from error
    text = entry.get(text_field) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        rule = f"must be an object with a string field {text_field!r}"
        raise DataError(where, line.strip()[:40], rule, "Set calibration.text_field to the field with the text")
    return text


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)
