"""Experts spread over ranks compute what one rank computes, from the file's bytes to the second update.

All in FP32 on random models. Layouts differ only in the order of sums: of at most 200 tokens times 3 experts times 64
features here, whose roundings of 2^-24 each grow with the square root of the count, to some 1e-5 of the largest element
where terms cancel. ``BOUND`` is relative to that element. A rule that is broken on purpose must exceed it by far.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_qerl.cli.main import main
from megatron_qerl.config.schema import QuantizeConfig
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from tests.multiprocess import experts_cases as cases
from tests.support.distributed import launch
from tests.support.layouts import difference
from tests.support.tiny_model import write_model
from tests.support.tiny_run import write_run

TARGET = "tests.multiprocess.experts_cases:run_cases"
BOUND = 2e-5
#: Response lengths: seven groups whose packs make several micro-batches of uneven size.
LENGTHS = [[1 + (5 * g + 3 * r) % 9 for r in range(4)] for g in range(7)]
MODES = ("per_expert", "shared_outer")
SIZES = {"num_key_value_heads": 4, "moe_intermediate_size": 64}
#: (layout, model, mode, extra)
TWO = [
    *(("ep2", model, mode, {}) for model in ("packed", "dense") for mode in MODES),
    ("ep2", "packed", "none", {}),
    ("ep2", "packed", "per_expert", {"recompute": "full"}),
    *(("ep2_allgather", "packed", mode, {}) for mode in MODES),
    *((layout, "packed", mode, {}) for layout in ("tp2_ep2", "tp2_etp2", "tp2_etp1") for mode in MODES),
    *((layout, "packed", "per_expert", {}) for layout in ("dp", "ep2_distributed", "tp2_ep2_allgather")),
    # All tokens on the experts of one rank: the other computes on no row, and must still take part in backward.
    ("ep2", "packed", "per_expert", {"routes": [0, 1, 3]}),
    ("tp2_ep2", "packed", "shared_outer", {"routes": [4, 5, 7]}),
]
FOUR = [
    *((layout, "packed", mode, {}) for layout in ("ep2", "tp2_ep2", "tp2_ep2_etp2", "ep4") for mode in MODES),
    ("ep4_allgather", "packed", "per_expert", {}),
    ("tp2_ep2_etp2_allgather", "packed", "shared_outer", {}),
    ("tp2_ep2_distributed", "packed", "per_expert", {}),
    ("pp2_ep2", "packed", "shared_outer", {}),
    ("cp2_ep2", "packed", "per_expert", {}),
]
#: (layout, mode, what is broken, what must show it)
BROKEN = [
    ("ep2", "per_expert", {"sabotage": "own factors are reduced like any other"}, "gradient"),
    ("ep2", "shared_outer", {"sabotage": "shared factors are reduced like an expert's"}, "gradient"),
    ("tp2_ep2", "shared_outer", {"sabotage": "shared factors are not summed over tensor ranks"}, "gradient"),
    ("tp2_etp2", "per_expert", {"sabotage": "parts of a replicated factor's gradient stay apart"}, "gradient"),
    ("tp2_etp2", "per_expert", {"sabotage": "split factors are left out of the norm"}, "norms"),
    ("tp2_etp2", "per_expert", {"sabotage": "replicated factors are counted on every rank"}, "norms"),
    ("ep2", "per_expert", {"shift": 4}, "hashes"),
    ("ep2", "per_expert", {"shift": 4}, "logprobs"),
]


def case_id(layout: str, model: str, mode: str, extra: dict[str, Any]) -> str:
    return " ".join((layout, model, mode, *(f"{k}={v}" for k, v in extra.items())))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from megatron_qerl.nvfp4.quantize import quantize

    root = tmp_path_factory.mktemp("experts")
    source = write_model(root / "source", "qwen3_moe", tied=False, dtype=torch.bfloat16, scale=0.1, **SIZES)
    packed = quantize(QuantizeConfig(source=source, output=root / "nvfp4", device="cpu"))
    return {"packed": packed, "dense": source}


References = dict[tuple[str, str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> References:
    found: References = {}
    for _, model, mode, extra in (*TWO, *FOUR):
        routes = extra.get("routes")
        key = (model, mode, str(routes))
        if key not in found:
            rollout = None if routes is None else found[model, mode, "None"]["rollout"]
            found[key] = cases.train(folders[model], "one", mode, LENGTHS, rollout, routes=routes)
    return found


def _launch(world: int, wanted: list[Any], folders: Any, references: Any, folder: Path) -> list[dict[str, Any]]:
    arguments = {
        case_id(layout, model, mode, extra): {
            "path": folders[model],
            "layout": layout,
            "mode": mode,
            "lengths": LENGTHS,
            "rollout": references[model, mode, "None"]["rollout"],
            **extra,
        }
        for layout, model, mode, extra in sorted(wanted, key=lambda case: case[0])
    }
    return launch(world, TARGET, arguments, folder, timeout_s=540)


@pytest.fixture(scope="module")
def two(folders: Any, references: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    broken = [(layout, "packed", mode, extra) for layout, mode, extra, _ in BROKEN]
    return _launch(2, [*TWO, *broken], folders, references, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(folders: Any, references: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _launch(4, FOUR, folders, references, tmp_path_factory.mktemp("four"))


def _compare(ranks: list[dict[str, Any]], case: Any, references: References) -> None:
    _, model, mode, extra = case
    reference = references[model, mode, str(extra.get("routes"))]
    for rank, results in enumerate(ranks):
        found = results[case_id(*case)]
        assert found["start"] == reference["start"]
        for what in ("logprobs", "gradient", *(("norms", "adapter") if "routes" not in extra else ())):
            gap = difference(found[what], reference[what])
            assert gap <= BOUND, f"{what} of rank {rank}: {gap:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("case", TWO, ids=lambda c: case_id(*c))
def test_two_ranks_equal_one(case: Any, two: list[dict[str, Any]], references: References) -> None:
    _compare(two, case, references)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=lambda c: case_id(*c))
def test_four_ranks_equal_one(case: Any, four: list[dict[str, Any]], references: References) -> None:
    _compare(four, case, references)


@pytest.mark.slow
def test_data_parallel_ranks_have_different_numbers_of_rows(two: list[dict[str, Any]]) -> None:
    """Otherwise the padding of the all-gather and the split sizes of the all-to-all would be untested."""
    for layout in ("ep2", "ep2_allgather"):
        rows = [results[case_id(layout, "packed", "per_expert", {})]["rows"] for results in two]
        assert rows[0] != rows[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep2", "tp2_ep2", "tp2_etp2"])
def test_expert_e_is_the_checkpoints_expert_e(layout: str, two: list[dict[str, Any]], folders: dict[str, Path]) -> None:
    folder = ModelFolder.open(folders["packed"])
    split = 2 if layout == "tp2_etp2" else 1
    seen: set[str] = set()
    for rank, results in enumerate(two):
        for key, digest in results[case_id(layout, "packed", "per_expert", {})]["hashes"].items():
            block, place, expert = key.split(".")
            prefix = f"model.layers.{block}.mlp.experts.{expert}"
            width = folder.nvfp4_shape(f"{prefix}.gate_proj")[0]
            mine = slice(rank * width // 2, (rank + 1) * width // 2) if split == 2 else slice(0, width)
            if place == "fc1":
                matrix = torch.cat(
                    [
                        folder.read_nvfp4(f"{prefix}.{p}", rows=mine).decode(torch.float32)
                        for p in ("gate_proj", "up_proj")
                    ]
                )
            else:
                matrix = folder.read_nvfp4(f"{prefix}.down_proj", cols=mine).decode(torch.float32)
            assert digest == hashlib.sha256(matrix.contiguous().numpy().tobytes()).hexdigest(), key
            assert split == 2 or key not in seen, "an expert is on one rank"
            seen.add(key)
    assert len(seen) == 2 * 2 * 8


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_a_broken_rule_shows(broken: Any, two: list[dict[str, Any]], references: References) -> None:
    layout, mode, extra, what = broken
    reference = references["packed", mode, "None"]
    found = [results[case_id(layout, "packed", mode, extra)] for results in two]
    if what == "hashes":
        assert any(f["hashes"][k] != v for f in found for k, v in reference["hashes"].items() if k in f["hashes"])
        return
    assert max(difference(f[what], reference[what]) for f in found) > 50 * BOUND


RUN_LAYOUTS = {
    "ep2": ["parallel.expert_model_parallel_size=2"],
    "pp2": ["parallel.pipeline_model_parallel_size=2"],  # a stage records the routes of its own blocks
    "cp2_ep2": ["parallel.context_parallel_size=2", "parallel.expert_model_parallel_size=2"],
    "tp2_ep2": [
        "parallel.expert_model_parallel_size=2",
        "parallel.tensor_model_parallel_size=2",
        "parallel.expert_tensor_parallel_size=1",
        "parallel.sequence_parallel=true",
    ],
}


@pytest.mark.slow
def test_whole_runs_on_two_ranks_equal_one(folders: dict[str, Path], tmp_path: Path) -> None:
    """Generation too: ranks that share experts decode in step, and the tokens are those of one rank.

    The trainer replays the engine's routes, whichever rank recorded them.
    """
    config = write_run(tmp_path)
    common = ["train", str(config), f"model.path={folders['packed']}", "train.steps=3", "noise.router=clean"]
    common += ["algorithm.dynamic_sampling.enabled=false"]
    assert main([*common, "run.name=one"]) == 0
    arguments = {name: [*common, f"run.name={name}", *extra] for name, extra in RUN_LAYOUTS.items()}
    codes = launch(2, "tests.multiprocess.experts_cases:whole_runs", arguments, tmp_path / "ranks", timeout_s=540)
    assert codes == [dict.fromkeys(arguments, 0)] * 2
    runs = {name: _steps(tmp_path / "runs" / name) for name in ("one", *arguments)}
    assert any(values["optimizer/gradient_norm"] > 0 for values in runs["one"])
    for name in arguments:
        for found, wanted in zip(runs[name], runs["one"], strict=True):
            for key in ("reward/mean", "tokens/completion", "noise/modules_touched"):
                assert found.get(key) == wanted.get(key), (name, key)
            # Of a run: Adam divides by the root of its second moment, which small gradients make uneven.
            assert difference(found["optimizer/gradient_norm"], wanted["optimizer/gradient_norm"]) <= 1e-4, name
            assert found["parity/logprob_max_abs"] <= 1e-4
            assert found.get("routing/flipped_by_engine") == wanted.get("routing/flipped_by_engine")


def _steps(run: Path) -> list[dict[str, float]]:
    return [json.loads(line)["values"] for line in (run / "metrics.jsonl").read_text().splitlines()]
