"""Noise: schedule, exact draws, replace semantics, and a proof that fails when it should."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_qerl.bookkeeping import noise_values
from megatron_qerl.config.schema import NoiseSection
from megatron_qerl.errors import ConfigError, FaultError, NoiseProofError
from megatron_qerl.noise.budget import relative_budget
from megatron_qerl.noise.proof import check_counts, check_engine, compare_engine, logprob_change, read_back
from megatron_qerl.noise.registry import NoiseRegistry, NormKey
from megatron_qerl.noise.schedule import sigma_of_stage, stage_of_step
from megatron_qerl.noise.state import draw
from megatron_qerl.types import NoiseState


class Norm:
    """The least that a registry needs of a norm."""

    def __init__(self, channels: int = 32, dtype: torch.dtype = torch.float32) -> None:
        self.weight = torch.ones(channels, dtype=dtype)
        self.noise: torch.Tensor | None = None

    def set_noise(self, z: torch.Tensor | None) -> None:
        self.noise = z


def norms() -> dict[NormKey, Norm]:
    keys = [(b, role) for b in range(3) for role in ("input", "post_attention")]
    return {k: Norm() for k in [*keys, (3, "final")]}


def registry(config: NoiseSection | None = None, seed: int = 1) -> NoiseRegistry:
    modules = norms()
    return NoiseRegistry(modules, dict.fromkeys(modules, 32), config or NoiseSection(), seed)


def test_exponential_schedule_hits_both_endpoints_exactly_in_equal_log_steps() -> None:
    config = NoiseSection(sigma_start=1e-2, sigma_end=5e-4, stages=10)
    sigmas = [sigma_of_stage(config, k) for k in range(10)]
    assert sigmas[0] == 0.0
    assert sigmas[1] == 1e-2
    assert sigmas[9] == 5e-4
    steps = [math.log(b / a) for a, b in itertools.pairwise(sigmas[1:])]
    assert max(steps) - min(steps) < 1e-12
    assert steps[0] == pytest.approx(math.log(5e-4 / 1e-2) / 8)


def test_stages_cover_the_run_evenly() -> None:
    stages = [stage_of_step(s, 95, 10) for s in range(95)]
    assert stages == sorted(stages)
    assert {stages.count(k) for k in range(10)} == {9, 10}


def test_the_draw_depends_on_seed_step_block_role_and_slot_only() -> None:
    state = registry().state(50, 100)
    base = draw(state, 1, "input", 64)
    assert base.dtype == np.float32
    assert np.array_equal(base, draw(replace(state, stage=3, modules_hash="x"), 1, "input", 64))
    assert np.array_equal(base[:40], draw(state, 1, "input", 40))
    for other in (
        draw(replace(state, seed=2), 1, "input", 64),
        draw(replace(state, step=51), 1, "input", 64),
        draw(state, 2, "input", 64),
        draw(state, 1, "post_attention", 64),
        draw(state, 1, "input", 64, slot=1),
    ):
        assert not np.array_equal(base, other)


def test_the_draw_is_frozen() -> None:
    """These numbers are part of the format: a recorded run must replay on any later version."""
    state = NoiseState(1, 0.01, 1, 7, "rollout", ("input",), "")
    expected = [0.003343265736475587, -0.012080485001206398, 0.004051468800753355, 0.00150655722245574]
    assert np.array_equal(draw(state, 2, "input", 4), np.array(expected, dtype=np.float32))


def test_a_state_survives_json() -> None:
    state = registry().state(50, 100)
    fields = json.loads(json.dumps(state.__dict__))
    again = NoiseState(**{**fields, "roles": tuple(fields["roles"])})
    assert again == state
    assert np.array_equal(draw(again, 0, "input", 16), draw(state, 0, "input", 16))


def test_sigma_is_the_standard_deviation_of_the_draw() -> None:
    z = draw(replace(registry().state(50, 100), sigma=0.02), 0, "input", 100_000)
    assert z.std() == pytest.approx(0.02, rel=5 / math.sqrt(2 * 100_000))


def test_applying_replaces_and_restoring_is_bit_equal() -> None:
    r = registry()
    r.apply(r.state(20, 100))
    first = {k: m.noise for k, m in r.targets.items()}
    r.apply(r.state(50, 100))
    for key, module in r.targets.items():
        assert module.noise is not None
        wanted = torch.from_numpy(draw(r.state(50, 100), key[0], key[1], 32))
        assert torch.equal(module.noise, wanted)
        assert not torch.equal(module.noise, first[key])  # type: ignore[arg-type]
        assert torch.equal(module.weight, torch.ones(32))
    r.apply(None)
    assert all(m.noise is None for m in r._all.values())


def test_noise_leaves_when_the_block_raises() -> None:
    r = registry()
    with pytest.raises(RuntimeError), r.applied(r.state(50, 100)):
        raise RuntimeError
    assert all(m.noise is None for m in r._all.values())


def test_stage_zero_and_disabled_noise_touch_nothing() -> None:
    for r in (registry(), registry(NoiseSection(enabled=False))):
        state = r.state(0, 100)
        assert not state.active
        r.apply(state)
        assert all(m.noise is None for m in r._all.values())
    assert registry(NoiseSection(enabled=False)).state(99, 100).sigma == 0.0


def test_a_steered_sigma_replaces_the_schedules_except_in_the_clean_stage() -> None:
    r = registry()
    assert r.state(50, 100, 0.07) == replace(r.state(50, 100), sigma=0.07)
    assert r.state(9, 100, 0.07) == r.state(9, 100)
    assert not registry(NoiseSection(enabled=False)).state(50, 100, 0.07).active


def test_the_proof_passes_and_reports_the_effective_sigma() -> None:
    r = registry()
    state = r.state(10, 100)
    with r.applied(state):
        result = read_back(r, state)
    assert (result.touched, result.expected) == (6, 6)
    assert result.sigma_effective == pytest.approx(0.01, rel=0.25)
    check_counts(result.touched, result.expected, state)


def test_the_proof_fails_when_nothing_was_applied() -> None:
    r = registry()
    state = r.state(10, 100)
    result = read_back(r, state)
    assert result.touched == 0
    with pytest.raises(NoiseProofError, match="changed 0 norms, expected 6"):
        check_counts(result.touched, result.expected, state)


@pytest.mark.parametrize("how", ["one missing", "another draw", "twice as large"])
def test_the_proof_fails_when_one_norm_is_wrong(how: str) -> None:
    r = registry()
    state = r.state(10, 100)
    with r.applied(state):
        victim = r.targets[(1, "post_attention")]
        assert victim.noise is not None
        victim.noise = {
            "one missing": None,
            "another draw": victim.noise.roll(1),
            "twice as large": 2 * victim.noise,
        }[how]
        assert read_back(r, state).touched == 5


def test_the_proof_fails_when_a_norm_outside_the_roles_is_noisy() -> None:
    r = registry()
    state = r.state(10, 100)
    with r.applied(state):
        r._all[(3, "final")].noise = torch.ones(32)
        with pytest.raises(NoiseProofError, match="final"):
            read_back(r, state)


def test_bfloat16_scales_swallow_a_small_sigma_and_the_proof_sees_it() -> None:
    modules = {(0, "input"): Norm(dtype=torch.bfloat16)}
    config = NoiseSection(sigma_start=5e-4, sigma_end=5e-4, roles=("input",))
    r = NoiseRegistry(modules, {(0, "input"): 32}, config, 1)
    state = r.state(50, 100)
    for module in r.targets.values():
        # What adding noise to BF16 scales in place does.
        z = torch.from_numpy(draw(state, 0, "input", 32))
        module.noise = (module.weight + z.bfloat16()) - module.weight
    assert read_back(r, state).touched == 0


def test_a_probe_that_does_not_move_stops_the_run() -> None:
    state = registry().state(10, 100)
    with pytest.raises(NoiseProofError, match="did not change a single log-probability"):
        logprob_change(torch.zeros(3), torch.zeros(3), state)
    assert logprob_change(torch.zeros(2), torch.tensor([0.1, -0.3]), state) == (pytest.approx(0.2), pytest.approx(0.3))


def test_a_missing_norm_is_refused_when_the_registry_is_built() -> None:
    modules = norms()
    del modules[(1, "input")]
    with pytest.raises(NoiseProofError, match=r"\(1, 'input'\)"):
        NoiseRegistry(modules, dict.fromkeys(norms(), 32), NoiseSection(), 1)


@pytest.mark.parametrize("changes", [{"stages": 1}, {"schedule": "constant", "sigma_start": 0.0}])
def test_enabled_noise_that_would_never_act_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="would never add noise"):
        NoiseSection.model_validate(changes)


def test_engine_slope_is_one_with_the_noise_and_zero_without() -> None:
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(2000, generator=generator)
    noisy = clean + 0.01 * torch.randn(2000, generator=generator)
    rounding = 0.03 * torch.randn(2000, generator=generator)
    state = registry().state(95, 100)
    right, wrong = compare_engine(noisy + rounding, noisy, clean), compare_engine(clean + rounding, noisy, clean)
    assert right.slope == pytest.approx(1.0, abs=4 * right.slope_error)
    assert wrong.slope == pytest.approx(0.0, abs=4 * wrong.slope_error)
    check_engine(right, state, 0.0005)
    with pytest.raises(NoiseProofError, match="another noise than the one that was recorded"):
        check_engine(wrong, state, 0.0005)
    check_engine(wrong, state, 0.02)  # within rounding: no verdict


def test_one_token_that_carries_the_whole_effect_proves_nothing() -> None:
    clean = torch.zeros(130)
    noisy = torch.full((130,), 1e-4)
    noisy[7] = 0.3
    rollout = noisy + 0.003 * torch.randn(130, generator=torch.Generator().manual_seed(0))
    rollout[7] = 0.5
    comparison = compare_engine(rollout, noisy, clean)
    assert comparison.slope > 1.5
    assert comparison.slope_error > 0.5
    check_engine(comparison, registry().state(95, 100), 0.0)


def test_folded_scales_get_divided_noise_and_sigma_is_stated_in_the_original_scale() -> None:
    modules = norms()
    factor = np.linspace(0.1, 4.0, 32, dtype=np.float32)
    expected = dict.fromkeys(modules, 32)
    r = NoiseRegistry(modules, expected, NoiseSection(), 1, folded={(1, "input"): factor, (3, "final"): factor})
    plain = registry()
    state = r.state(10, 100)
    with r.applied(state):
        assert torch.equal(modules[(1, "input")].noise, torch.from_numpy(draw(state, 1, "input", 32) / factor))  # type: ignore[arg-type]
        assert torch.equal(modules[(2, "input")].noise, torch.from_numpy(draw(state, 2, "input", 32)))  # type: ignore[arg-type]
        folded = read_back(r, state)
    with plain.applied(plain.state(10, 100)):
        unfolded = read_back(plain, plain.state(10, 100))
    assert folded.touched == 6
    assert folded.sigma_effective == pytest.approx(unfolded.sigma_effective, rel=1e-4)
    assert r.hash != plain.hash


def scaled_norms() -> dict[NormKey, Norm]:
    """Scales of another size in each norm, among them one near zero and one of zero in the first."""
    modules = norms()
    for index, module in enumerate(modules.values()):
        module.weight = (0.1 + index) * torch.linspace(0.7, 1.3, 32)
    modules[(0, "input")].weight[3] = 1e-3
    modules[(0, "input")].weight[4] = 0.0
    return modules


def test_a_relative_budget_scales_each_norms_noise_and_is_proved_and_reported() -> None:
    modules, config = scaled_norms(), NoiseSection(budget="relative")
    factor = np.linspace(0.5, 2.0, 32, dtype=np.float32)
    r = NoiseRegistry(modules, dict.fromkeys(modules, 32), config, 1, folded={(2, "input"): factor})
    state, plain = r.state(10, 100), registry().state(10, 100)
    assert state == replace(plain, budget="relative", modules_hash=r.hash)
    with r.applied(state):
        for key, module in r.targets.items():
            scale = module.weight.double().numpy() * (factor if key in r.folded else 1.0)
            budget = relative_budget(scale, 1.0)
            deviation = budget.sigma * budget.shrink
            normal = draw(replace(plain, sigma=1.0), *key, 32).astype(np.float64)
            found = module.noise.double().numpy() * (factor if key in r.folded else 1.0)  # type: ignore[union-attr]
            assert found == pytest.approx(state.sigma * deviation * normal, rel=1e-6)
        result = read_back(r, state)
    assert (result.touched, result.expected) == (6, 6)
    assert result.sigma_effective == pytest.approx(state.sigma, rel=0.25)
    assert result.near_zero == {"0.input": 2}
    values = noise_values(state, result, (0.1, 0.2))
    assert values["noise/near_zero_channels"] == 2.0
    assert "noise/near_zero_channels" not in noise_values(plain, replace(result, near_zero={}), (0.1, 0.2))


def test_a_relative_draw_rebuilds_from_its_json_and_the_scales_alone() -> None:
    first, second = (
        NoiseRegistry(m, dict.fromkeys(m, 32), NoiseSection(budget="relative"), seed)
        for m, seed in ((scaled_norms(), 1), (scaled_norms(), 2))
    )
    fields = json.loads(json.dumps(first.state(50, 100).__dict__))
    again = NoiseState(**{**fields, "roles": tuple(fields["roles"])})
    second.apply(again)
    for key, module in second.targets.items():
        assert torch.equal(module.noise, first.displacement(first.state(50, 100), key))  # type: ignore[arg-type]


def test_noise_of_another_budget_is_refused_and_does_not_pass_the_proof() -> None:
    modules = scaled_norms()
    absolute, relative = (
        NoiseRegistry(modules, dict.fromkeys(modules, 32), NoiseSection(budget=b), 1) for b in ("absolute", "relative")
    )
    with pytest.raises(FaultError, match=r"noise.budget: absolute, this run has relative"):
        relative.apply(absolute.state(10, 100))
    with absolute.applied(absolute.state(10, 100)):
        assert read_back(relative, relative.state(10, 100)).touched == 0


def test_a_state_of_another_model_is_refused() -> None:
    r = registry()
    with pytest.raises(FaultError, match="was recorded for modules"):
        r.apply(replace(r.state(10, 100), modules_hash="0" * 64))


def test_a_role_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="q_norm"):
        registry(NoiseSection(roles=("input", "q_norm")))


def test_a_norm_of_another_size_is_refused() -> None:
    modules = norms()
    with pytest.raises(NoiseProofError, match="channels"):
        NoiseRegistry(modules, dict.fromkeys(modules, 64), NoiseSection(), 1)


def test_additive_noise_on_the_scale_is_a_row_scaling_of_the_next_weight() -> None:
    """h_z = u (w + z) and h_z W = h diag(1 + z/w) W (reading, section 5.1), in float64."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        u, w, z = rng.normal(size=24), 1 + 0.2 * rng.normal(size=24), 0.05 * rng.normal(size=24)
        weight = rng.normal(size=(24, 7))
        left = (u * (w + z)) @ weight
        right = (u * w) @ (np.diag(1 + z / w) @ weight)
        assert np.abs(left - right).max() <= 1e-14


def test_repository_configs_name_their_noise_source() -> None:
    import yaml

    for path in Path(__file__).parents[2].glob("configs/**/*.yaml"):
        noise = (yaml.safe_load(path.read_text()) or {}).get("noise", {})
        assert not ({"sigma_start", "sigma_end"} & set(noise)) or noise.get("source"), path
