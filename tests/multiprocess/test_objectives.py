"""Every kind of divisor, weight and regularizer gives on two ranks the gradient and the sums of one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess import objectives_cases as cases
from tests.support.distributed import launch
from tests.support.tiny_model import write_model

TARGET = "tests.multiprocess.objectives_cases:run_cases"
#: Five groups whose packs make several micro-batches of uneven size.
LENGTHS = [[1 + (5 * g + 3 * r) % 9 for r in range(4)] for g in range(5)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"parallel__tensor_model_parallel_size": 2},
    "pp2": {"parallel__pipeline_model_parallel_size": 2},
}
BOUNDS = {"importance_weight_floor": 0.7, "importance_weight_cap": 1.4}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo, responses masked": {
        "name": "gspo", "likelihood": "clean", "ratio_level": "sequence", "ratio_clip_low": 0.1,
        "ratio_clip_high": 0.15, "loss_aggregation": "sequence_mean",
        "importance_correction": "sequence_mask", **BOUNDS,
    },
    "cispo by constant, divergence, entropy": {
        "name": "custom", "likelihood": "replay", "surrogate": "clipped_weight", "loss_aggregation": "constant",
        "kl_coefficient": 0.2, "entropy_coefficient": 0.05,
    },
}  # fmt: skip


def changes(objective: str, layout: str) -> dict[str, Any]:
    algorithm = {f"algorithm__{key}": value for key, value in OBJECTIVES[objective].items()}
    return {**algorithm, "noise__budget": "relative", **LAYOUTS.get(layout, {})}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Objective -> what one rank found; of each of two ranks: "objective, layout" -> what it found."""
    folder = write_model(tmp_path_factory.mktemp("model"), "qwen2", scale=0.1)
    one = {name: cases.measured(folder, changes(name, "one"), LENGTHS, None) for name in OBJECTIVES}
    arguments = {
        f"{name}, {layout}": {
            "path": folder, "changes": changes(name, layout), "lengths": LENGTHS, "rollout": one[name]["rollout"]
        }
        for name in OBJECTIVES
        for layout in LAYOUTS
    }  # fmt: skip
    return one, launch(2, TARGET, arguments, tmp_path_factory.mktemp("two"), timeout_s=400)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_ranks_compute_what_one_does(
    results: tuple[dict[str, Any], list[dict[str, Any]]], objective: str, layout: str
) -> None:
    one, ranks = results
    reference = one[objective]
    largest = max(float(t.abs().max()) for t in reference["gradient"].values())
    assert largest > 0
    for found in (rank[f"{objective}, {layout}"] for rank in ranks):
        assert found["sums"] == pytest.approx(reference["sums"], rel=1e-4)
        assert found["gradient"].keys() == reference["gradient"].keys()
        for name, tensor in found["gradient"].items():
            assert (tensor - reference["gradient"][name]).abs().max() <= 1e-4 * largest, name


def test_the_batch_uses_what_is_compared(results: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    one, _ = results
    _, responses, tokens, *_, dropped, weighed = one["gspo, responses masked"]["sums"]
    assert (responses, weighed) == (20, 20)
    assert 0 < dropped < tokens
    _, responses, tokens, divergence, compared, *_ = one["cispo by constant, divergence, entropy"]["sums"]
    assert (responses, compared) == (20, tokens)
    assert divergence > 0
