"""The temperature that a token entropy needs, on distributions whose entropy is known in closed form."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megatron_qerl.errors import FaultError
from megatron_qerl.experiment.config import EntropySection
from megatron_qerl.experiment.entropy import MatchedTemperature, _solve, read_match, write_match
from megatron_qerl.metrics.entropy import token_entropy


def two_tokens(temperature: float) -> float:
    """Entropy of softmax([1, 0] / T): that of a coin with p = 1 / (1 + exp(-1 / T))."""
    p = 1.0 / (1.0 + math.exp(-1.0 / temperature))
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


@pytest.mark.parametrize("wanted", [0.6, 1.0, 1.37, 1.9])
def test_a_coins_temperature_is_found_from_its_entropy(wanted: float) -> None:
    temperature, reached, evaluations = _solve(two_tokens, two_tokens(wanted), EntropySection())
    assert reached == pytest.approx(two_tokens(wanted), rel=1e-4)
    # An error of 1e-4 H in the entropy is one of 1e-4 H / H'(T) in the temperature.
    slope = (two_tokens(wanted + 1e-5) - two_tokens(wanted - 1e-5)) / 2e-5
    assert temperature == pytest.approx(wanted, abs=1.01e-4 * two_tokens(wanted) / slope)
    assert evaluations < 15


def test_a_mean_over_contexts_is_matched_as_a_whole() -> None:
    logits = np.random.Generator(np.random.PCG64(2)).normal(0.0, 3.0, (40, 50))

    def mean_entropy(temperature: float) -> float:
        return float(token_entropy(logits, temperature).mean())

    temperature, _, _ = _solve(mean_entropy, mean_entropy(1.08), EntropySection())
    assert temperature == pytest.approx(1.08, abs=1e-3)


def test_an_entropy_out_of_reach_says_which_keys_to_widen() -> None:
    with pytest.raises(FaultError, match=r"temperature for a token entropy of 0\.69 nats.*entropy\.temperature_high"):
        _solve(two_tokens, 0.69, EntropySection())


def test_a_match_is_read_as_it_was_written(tmp_path: Path) -> None:
    stages = ({"stage": 0, "sigma": 0.0, "nats": 0.1},)
    match = MatchedTemperature(1.1, 0.5, 0.5, 1.0, 0.4, stages, 0.6, 0.7, 8, 64, 5, "how")
    write_match(match, tmp_path / "entropy/arm.json")
    assert read_match(tmp_path / "entropy/arm.json") == match
