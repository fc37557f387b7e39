"""The formulas of docs/scaling.md against every byte that a rank hands to a collective. FP32, so 4 bytes a number."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_qerl.config.schema import QuantizeConfig
from megatron_qerl.nvfp4.quantize import quantize
from tests.support.distributed import launch
from tests.support.layouts import layout
from tests.support.tiny_model import write_model

TARGET = "tests.multiprocess.communication_cases:run_cases"
BLOCKS, HIDDEN, RANK, TOP_K = 4, 64, 4, 3
KEYS_AND_VALUES = 2 * 4 * 16
LENGTHS = [[5, 3, 9, 1], [4, 4], [12, 2, 7], [8, 1], [3, 6, 2]]
FULL = {"train__recompute": "full"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("dense", layout(tp=2)),
    "tp_sp": ("dense", layout(tp=2, sp=True)),
    "tp_sp full": ("dense", layout(tp=2, sp=True) | FULL),
    "dp": ("dense", layout(do=False)),
    "dp distributed": ("dense", layout(do=True)),
    "pp": ("dense", layout(pp=2)),
    "cp": ("dense", layout(cp=2)),
    "ep": ("experts", layout(ep=2)),
    "ep full": ("experts", layout(ep=2) | FULL),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Case -> what each rank sent."""
    root = tmp_path_factory.mktemp("communication")
    sizes = {"num_hidden_layers": BLOCKS, "num_key_value_heads": 4}
    folders = {}
    for name, family in (("dense", "qwen2"), ("experts", "qwen3_moe")):
        source = write_model(root / name, family, tied=False, dtype=torch.bfloat16, scale=0.1, **sizes)
        folders[name] = quantize(QuantizeConfig(source=source, output=root / f"{name}_nvfp4", device="cpu"))
    arguments = {
        name: {"path": folders[model], "lengths": LENGTHS, "changes": {"train__microbatch_tokens": 128} | changes}
        for name, (model, changes) in CASES.items()
    }
    ranks = launch(2, TARGET, arguments, root / "ranks")
    return {name: [rank[name] for rank in ranks] for name in CASES}


def total(sent: list[tuple[str, int]], collective: str) -> int:
    return sum(size for name, size in sent if name == collective)


def hidden(rank: dict[str, Any]) -> int:
    """Bytes of the hidden states of the one micro-batch."""
    (rows,) = rank["rows"]
    return 4 * int(rows) * HIDDEN


def low_rank(rank: dict[str, Any]) -> int:
    """Bytes of all of a block's u = A x: three parts of qkv, two of gate_up, o and down."""
    (rows,) = rank["rows"]
    return 4 * int(rows) * RANK * 7


def head_sums(rank: dict[str, Any]) -> int:
    """Bytes all-reduced for a vocabulary in parts: four numbers and a gradient of the hidden state a scored token."""
    (scored,) = rank["scored"]
    return 4 * int(scored) * (4 + HIDDEN)


def test_tensor_parallel(found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found["tp"]:
        # Two sums forward and two backward a block. Below the first adapter nothing needs a gradient, which leaves one
        # out; the embedding adds one.
        wide = 4 * BLOCKS * hidden(rank)
        assert total(rank["passes"], "all-reduce") == wide + BLOCKS * low_rank(rank) + head_sums(rank)


def test_sequence_parallel(found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found["tp_sp"]:
        wide, low = hidden(rank), BLOCKS * low_rank(rank)
        # The head gathers; the embedding scatters, and below the first adapter nothing is scattered.
        assert total(rank["passes"], "all-gather") == (4 * BLOCKS + 1) * wide + low
        assert total(rank["passes"], "reduce-scatter") == 4 * BLOCKS * wide + low
    for rank in found["tp_sp full"]:
        wide = hidden(rank)
        # Forward again: two gathers and two scatters a block; a checkpoint gives its input a gradient, the first too.
        assert Counter(rank["passes"])["all-gather", wide] == 6 * BLOCKS + 1
        assert Counter(rank["passes"])["reduce-scatter", wide] == 6 * BLOCKS + 1


def test_data_parallel(found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found["dp"]:
        assert total(rank["passes"], "all-reduce") == 4 * rank["adapters"]
    for rank in found["dp distributed"]:
        assert total(rank["passes"], "reduce-scatter") == 4 * rank["adapters"]
        assert total(rank["update"], "all-gather") == 4 * rank["adapters"]  # the width of the model's dtype


def test_pipeline_parallel(found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found["pp"]:
        assert rank["passes"] == [("send", hidden(rank))]


def test_context_parallel(found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found["cp"]:
        gathered = [size for name, size in rank["passes"] if name == "all-gather"]
        scattered = [size for name, size in rank["passes"] if name == "reduce-scatter"]
        assert gathered == scattered == [gathered[0]] * BLOCKS
        # Keys and values of the pack, whose sequences are padded to multiples of four.
        rows = gathered[0] // (4 * KEYS_AND_VALUES)
        assert sum(rank["rows"]) <= rows < sum(rank["rows"]) + 4 * (len(LENGTHS) + sum(map(len, LENGTHS)))


@pytest.mark.parametrize(("name", "times"), [("ep", 2), ("ep full", 3)])
def test_expert_parallel(found: dict[str, list[dict[str, Any]]], name: str, times: int) -> None:
    """What a rank's tokens cost, by dispatch and combine; what it receives it sends back."""
    ranks = found[name]
    everywhere = sum(total(rank["passes"], "all-to-all") for rank in ranks)
    states = sum(hidden(rank) for rank in ranks)
    weights = states // HIDDEN  # one router weight a row: dispatched, and its gradient sent back
    assert everywhere == BLOCKS * TOP_K * (2 * times * states + times * weights)
