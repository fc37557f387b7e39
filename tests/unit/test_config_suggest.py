from __future__ import annotations

import pytest

from megatron_qerl.config.schema import QuantizeConfig, RunConfig
from megatron_qerl.config.suggest import KNOWN_AS, choices, closest_key, known_keys, unknown_key_remedy


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("optimizer.learning_rat", "optimizer.learning_rate"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("train.learning_rate", "optimizer.learning_rate"),
        ("noise.sigma_stat", "noise.sigma_start"),
        ("algorithm.dynamic_sampling.max_refill", "algorithm.dynamic_sampling.max_refills"),
        ("algorithm.max_refills", "algorithm.dynamic_sampling.max_refills"),
        ("algorithm.max_refill", "algorithm.dynamic_sampling.max_refills"),
        ("optimiser.learning_rat", "optimizer.learning_rate"),
        ("noise.enabled.deep", "noise.enabled"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
        ("rollouts", "rollout"),
        ("rollout.num_generations", "rollout.group_size"),
        ("data.train.limt", "data.train.limit"),
        ("metrics.wandb.projekt", "metrics.wandb.project"),
    ],
)
def test_the_key_that_was_meant_is_found(unknown: str, meant: str) -> None:
    assert closest_key(unknown, RunConfig) == meant


def test_no_key_is_suggested_when_none_comes_near() -> None:
    assert closest_key("zzz", RunConfig) is None
    assert "run, model, lora" in unknown_key_remedy("zzz", RunConfig)
    assert "steps, minibatches_per_step" in unknown_key_remedy("train.qqqq", RunConfig)
    assert "run, model, lora" in unknown_key_remedy("qqqq.zzzz", RunConfig)


def test_names_from_other_trainers_lead_to_keys_that_exist() -> None:
    assert set(KNOWN_AS.values()) <= set(known_keys(RunConfig))
    assert not set(KNOWN_AS) & {key.rpartition(".")[2] for key in known_keys(RunConfig)}


def test_a_schema_without_a_key_never_suggests_it() -> None:
    assert closest_key("lr", QuantizeConfig) is None
    assert closest_key("outptu", QuantizeConfig) == "output"


def test_every_key_of_the_schema_is_known_by_its_dotted_name() -> None:
    keys = known_keys(RunConfig)
    assert "data.train.path" in keys
    assert "algorithm.overlong.buffer_tokens" in keys
    assert choices(keys["eval.modes"].annotation) == ("greedy", "sampled")
    assert choices(keys["algorithm.likelihood"].annotation) == ("replay", "clean", "uncorrected")
    assert choices(keys["train.steps"].annotation) == ()
