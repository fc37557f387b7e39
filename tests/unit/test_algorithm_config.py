"""A named objective is what its name says, and a combination without a meaning is refused with its remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_qerl.config.schema import AlgorithmSection, NoiseSection, RunConfig

SEQUENCE = {"ratio_level": "sequence", "ratio_clip_low": 3e-4, "ratio_clip_high": 4e-4}
GSPO = {**SEQUENCE, "loss_aggregation": "sequence_mean"}
VALID: dict[str, dict[str, Any]] = {
    "grpo": {"loss_aggregation": "sequence_mean", "kl_coefficient": 0.04, "kl_estimator": "k3"},
    "dapo": {"dynamic_sampling": {"enabled": True}},
    "dr_grpo": {"advantage": "mean", "loss_aggregation": "constant", "loss_constant_tokens": 512},
    "gspo": GSPO,
    "cispo": {"surrogate": "clipped_weight", "ratio_clip_low": 10.0},
    "custom": {"advantage": "leave_one_out", "surrogate": "clipped_weight", "entropy_coefficient": 1e-3},
}


def build(name: str, **settings: Any) -> AlgorithmSection:
    return AlgorithmSection(**({"name": name, "likelihood": "replay"} | settings))


@pytest.mark.parametrize("name", VALID)
def test_each_objective_has_a_valid_setting(name: str) -> None:
    assert build(name, **VALID[name]).name == name


def test_nothing_is_added_to_the_loss_by_default() -> None:
    plain = build("grpo")
    assert plain.kl_coefficient == plain.entropy_coefficient == 0.0


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "grpo without std": ({"name": "grpo", "advantage": "mean"}, "advantage = mean", "name: dr_grpo"),
    "grpo by sequence": ({"name": "grpo", **GSPO}, "ratio_level = sequence", "name: gspo"),
    "grpo as cispo": ({"name": "grpo", "surrogate": "clipped_weight"}, "surrogate = clipped_weight", "name: cispo"),
    "grpo with refills": ({"name": "grpo", "dynamic_sampling": {"enabled": True}}, "dynamic_sampling", "name: dapo"),
    "dapo by response": ({"name": "dapo", "loss_aggregation": "sequence_mean"}, "sequence_mean", "name: grpo"),
    "dapo with kl": ({"name": "dapo", "kl_coefficient": 0.1}, "kl_coefficient = 0.1", "name: grpo"),
    "dr_grpo with std": (
        {"name": "dr_grpo", "loss_aggregation": "constant"},
        "advantage = mean_std",
        "advantage: mean",
    ),
    "dr_grpo by token": ({"name": "dr_grpo", "advantage": "mean"}, "token_mean", "loss_aggregation: constant"),
    "cispo as grpo": ({"name": "cispo"}, "surrogate = clipped_ratio", "surrogate: clipped_weight"),
    "gspo with default clips": (
        {"name": "gspo", "ratio_level": "sequence", "loss_aggregation": "sequence_mean"},
        "ratio_clip_high and ratio_clip_low",
        "3e-4",
    ),
    "sequence ratio by token": (
        {"name": "custom", **SEQUENCE},
        "once for each of its tokens",
        "loss_aggregation: sequence_mean",
    ),
    "sequence weight": ({"name": "custom", **GSPO, "surrogate": "clipped_weight"}, "belongs to one token", "token"),
    "sequence ratio, token weights": (
        {"name": "gspo", **GSPO, "likelihood": "clean"},
        "importance_correction = token_truncate",
        "sequence_truncate",
    ),
    "clip that never clips": ({"name": "grpo", "ratio_clip_low": 1.0}, "ratio_clip_low = 1.0", "below 1"),
    "k1 as a loss": ({"name": "grpo", "kl_coefficient": 0.1, "kl_estimator": "k1"}, "expectation zero", "k2"),
    "correction of nothing": (
        {"name": "grpo", "importance_correction": "token_mask"},
        "no effect with likelihood = replay",
        "likelihood: clean",
    ),
    "cap below one": ({"name": "grpo", "likelihood": "clean", "importance_weight_cap": 0.9}, "cap = 0.9", "above 1"),
    "floor above one": (
        {"name": "grpo", "likelihood": "clean", "importance_correction": "token_mask", "importance_weight_floor": 1.0},
        "importance_weight_floor = 1.0",
        "below 1",
    ),
    "constant of nothing": ({"name": "grpo", "loss_constant_tokens": 9}, "loss_constant_tokens", "constant"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_combination_is_refused_with_its_remedy(case: str) -> None:
    settings, rule, remedy = REFUSED[case]
    with pytest.raises(ValidationError) as caught:
        build(**settings)
    message = caught.value.errors()[0]["msg"]
    stated, _, way_out = message.rpartition("; ")
    assert rule in stated
    assert remedy in way_out


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"source": "paper main text"}, "0.05 -> 0.0005"),
        ({"source": "published scripts", "sigma_start": 1e-2, "sigma_end": 5e-4}, "0.01 -> 0.0001"),
        ({"source": "paper Table 4", "budget": "relative"}, "budget = relative"),
        ({"schedule": "linear", "stages": 2}, "two stages"),
        ({"feedback": {"enabled": True}}, "schedule = exponential would be overruled"),
        ({"feedback": {"enabled": True}, "schedule": "constant", "enabled": False}, "nothing to steer"),
        ({"feedback": {"enabled": True}, "schedule": "constant", "sigma_start": 0.5}, "lies outside"),
        ({"feedback": {"enabled": True}, "schedule": "constant", "application": "accumulate"}, "adds displacements"),
        ({"feedback": {"sigma_min": 0.1}}, "no room"),
    ],
)
def test_noise_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        NoiseSection(**settings)


def test_noise_without_an_effect_may_have_any_source() -> None:
    assert not NoiseSection(enabled=False, source="paper main text").enabled


def run_config(**sections: Any) -> RunConfig:
    arithmetic = {"kind": "arithmetic"}
    base = {
        "run": {"name": "t"},
        "model": {"path": "m"},
        "data": {"train": arithmetic, "eval": {**arithmetic, "split": "heldout"}},
        "algorithm": {"name": "grpo", "likelihood": "clean"},
        "train": {"steps": 20},
    }
    return RunConfig.model_validate(base | sections, strict=False)


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 50}])
def test_clean_refuses_a_support_that_was_cut(cut: dict[str, Any]) -> None:
    assert run_config().rollout.top_p == 1.0
    with pytest.raises(ValidationError, match="cannot be repaired by importance weights"):
        run_config(rollout=cut)
