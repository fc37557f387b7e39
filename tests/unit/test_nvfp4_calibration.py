"""Calibration text and tokens: exact sizes, the same for a seed, and clear errors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from megatron_qerl.config.schema import CalibrationSection
from megatron_qerl.errors import DataError
from megatron_qerl.nvfp4.calibration import calibration_tokens
from megatron_qerl.nvfp4.calibration_text import built_in_text
from tests.unit.nvfp4_tiny_models import write_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def section(**options: object) -> CalibrationSection:
    return CalibrationSection(method="awq", **{"sequences": 4, "sequence_length": 64} | options)


def text(seed: int, documents: int = 40) -> list[str]:
    return list(itertools.islice(built_in_text(seed), documents))


def test_the_built_in_text_depends_on_the_seed_alone() -> None:
    assert text(1) == text(1)
    assert text(1) != text(2)


def test_the_built_in_text_is_varied_and_long_enough() -> None:
    documents = text(1, 2000)
    assert len(set(documents)) > 1900
    assert len(set(" ".join(documents).split())) > 500
    assert sum(map(len, documents)) > 2000 * 150  # 256 x 2048 tokens are some 2 MB, and the generator never ends


def test_the_built_in_arithmetic_is_right() -> None:
    sums = [line for document in text(3, 400) for line in document.splitlines() if line.count(" = ") == 1]
    checked = 0
    for line in sums:
        left, _, right = line.partition(" = ")
        if left.replace("-", "").replace("+", "").replace("*", "").replace(" ", "").isdigit() and right.isdigit():
            assert eval(left) == int(right), line
            checked += 1
    assert checked > 100


def test_tokens_have_exactly_the_asked_shape(model: Path) -> None:
    tokens, record = calibration_tokens(section(), model)
    assert tokens.shape == (4, 64)
    assert tokens.dtype == torch.int64
    assert (record.dataset, record.sequences, record.sequence_length, record.seed) == ("built-in", 4, 64, 1)


def test_the_record_hashes_the_tokens(model: Path) -> None:
    first, again, other = (calibration_tokens(section(seed=seed), model) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert first[1] == again[1]
    assert first[1].tokens_sha256 != other[1].tokens_sha256


def test_documents_are_joined_with_the_end_token_in_file_order(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("\n".join(json.dumps({"body": word}) for word in ("ab", "c" * 9)) + "\n\n")
    tokens, record = calibration_tokens(section(dataset=file, text_field="body", sequences=2, sequence_length=5), model)
    end = 256
    flat = tokens.flatten().tolist()
    assert flat[2] == end
    assert end not in flat[:2] + flat[3:]
    assert len(set(flat[3:])) == 1
    assert record.dataset == "text.jsonl"


def test_too_little_text_says_how_much_is_needed(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text(json.dumps({"text": "hello"}))
    with pytest.raises(DataError, match=r"6 tokens.* = 256 tokens are needed"):
        calibration_tokens(section(dataset=file), model)


@pytest.mark.parametrize(
    ("line", "message"), [("{", "not JSON"), ('{"other": "x"}', "string field 'text'"), ("[1]", "string field 'text'")]
)
def test_a_bad_line_is_named(model: Path, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=f"bad.jsonl:2 .*{message}"):
        calibration_tokens(section(dataset=file), model)


def test_a_missing_file_is_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file") as caught:
        calibration_tokens(section(dataset=tmp_path / "none.jsonl"), model)
    assert "\n" not in str(caught.value)
