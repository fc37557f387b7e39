"""The embedded engine generates what the trainer would score, whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_qerl.config.schema import LoraSection, NoiseSection
from megatron_qerl.errors import FaultError
from megatron_qerl.layers.packing import pack
from megatron_qerl.models.policy import LogprobQuery
from megatron_qerl.rollout.engine import GenerationRequest
from megatron_qerl.rollout.engines.embedded import EmbeddedEngine
from megatron_qerl.types import Completion, NoiseState, PolicyVersion, Problem, Prompt, SamplingParams
from tests.support.loaded import Loaded, load, randomize_adapters
from tests.support.tiny_model import write_model

EOS = 1
LENGTHS = (3, 11, 6, 1, 8)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    path = write_model(tmp_path_factory.mktemp("model"), request.param, scale=0.15)
    result = load(path, lora=LoraSection(rank=4), noise=NoiseSection(sigma_start=0.05))
    randomize_adapters(result.model)
    return result


def prompts(lengths: Sequence[int] = LENGTHS) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(
            Problem(f"p{i}", "q", "7", f"p{i}", "test"), tuple(torch.randint(3, 73, (n,), generator=generator).tolist())
        )
        for i, n in enumerate(lengths)
    ]


def sampling(temperature: float = 1.0, new: int = 12, stops: tuple[int, ...] = (EOS,), seed: int = 3) -> SamplingParams:
    return SamplingParams(temperature, new, stops, seed)


def generate(
    loaded: Loaded,
    noise: NoiseState | None = None,
    *,
    group_size: int = 4,
    params: SamplingParams | None = None,
    rows: int = 128,
    which: Sequence[int] | None = None,
    stream: int = 0,
) -> list[list[Completion]]:
    engine = EmbeddedEngine(loaded.model, loaded.registry, rows)
    engine.publish(PolicyVersion("base", 2, "adapter", noise, 1.0, 1.0, 0))
    chosen = prompts() if which is None else [prompts()[i] for i in which]
    return engine.generate([GenerationRequest(p, group_size, stream) for p in chosen], params or sampling())


def trainer_logprobs(
    loaded: Loaded, groups: list[list[Completion]], noise: NoiseState | None, t: float
) -> torch.Tensor:
    packs = [(p.token_ids, [c.token_ids for c in g]) for p, g in zip(prompts(), groups, strict=True)]
    tokens = pack(packs, torch.device("cpu"), share_prefix=True)
    query = LogprobQuery(tokens.logit_rows, tokens.targets, t, 64)
    with torch.no_grad(), loaded.registry.applied(noise):
        return loaded.model(tokens.token_ids, tokens.position_ids, packed_seq_params=tokens.params, query=query)[0]


def flat(groups: list[list[Completion]]) -> torch.Tensor:
    return torch.tensor([x for g in groups for c in g for x in c.logprobs])


@pytest.mark.parametrize("stage_step", [0, 10, 50])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_the_trainers_under_the_same_noise(loaded: Loaded, stage_step: int, temperature: float) -> None:
    noise = loaded.registry.state(stage_step, 100)
    groups = generate(loaded, noise, params=sampling(temperature))
    ours = trainer_logprobs(loaded, groups, noise, temperature)
    assert (ours - flat(groups)).abs().max() <= 1e-4
    if noise.active:
        # The control: scored without the noise that shaped them, the numbers are far apart.
        assert (trainer_logprobs(loaded, groups, None, temperature) - flat(groups)).abs().max() > 1e-2


def test_greedy_equals_decoding_without_a_cache(loaded: Loaded) -> None:
    groups = generate(loaded, group_size=1, params=sampling(0.0))
    for prompt, (completion,) in zip(prompts(), groups, strict=True):
        ids = list(prompt.token_ids)
        for token in completion.token_ids:
            with torch.no_grad():
                logits = loaded.model(torch.tensor([ids]), torch.arange(len(ids))[None])[0]
            assert token == int(logits.argmax())
            ids.append(token)


def test_a_completion_does_not_depend_on_its_batch(loaded: Loaded) -> None:
    together = generate(loaded)
    alone = [generate(loaded, which=[i])[0] for i in range(len(LENGTHS))]
    narrow = generate(loaded, rows=3)
    for a, b, c in zip(together, alone, narrow, strict=True):
        assert [x.token_ids for x in a] == [x.token_ids for x in b] == [x.token_ids for x in c]
        assert [x.response_index for x in c] == [0, 1, 2, 3]


def test_seed_stream_and_response_index_choose_the_draw(loaded: Loaded) -> None:
    first = generate(loaded)
    assert generate(loaded) == first
    assert generate(loaded, params=sampling(seed=4)) != first
    assert generate(loaded, stream=1) != first
    assert len({c.token_ids for c in first[1]}) > 1


def test_stop_tokens_end_a_response_and_are_its_last_token(loaded: Loaded) -> None:
    stops = tuple(range(0, 80, 4))
    groups = generate(loaded, params=sampling(stops=stops), group_size=8)
    reasons = set()
    for completion in (c for g in groups for c in g):
        reasons.add(completion.finish_reason)
        body, last = completion.token_ids[:-1], completion.token_ids[-1]
        assert not set(body) & set(stops)
        assert (last in stops) == (completion.finish_reason == "stop")
        assert len(completion.token_ids) == 12 or completion.finish_reason == "stop"
    assert reasons == {"stop", "length"}


def test_policy_version_names_noise_and_temperature(loaded: Loaded) -> None:
    noise = loaded.registry.state(10, 100)
    completion = generate(loaded, noise, params=sampling(0.6))[0][0]
    assert completion.policy.noise == noise
    assert completion.policy.adapter_version == 2
    assert completion.policy.temperature == 0.6


def test_noise_is_gone_after_generating_even_when_it_fails(loaded: Loaded) -> None:
    noise = loaded.registry.state(10, 100)
    generate(loaded, noise)
    assert all(m.noise is None for m in loaded.registry.targets.values())
    with pytest.raises(FaultError, match="does not cut the support"):
        generate(loaded, noise, params=SamplingParams(1.0, 4, (EOS,), 3, top_p=0.9))
    assert all(m.noise is None for m in loaded.registry.targets.values())


def test_sampled_frequencies_follow_the_distribution(loaded: Loaded) -> None:
    draws = generate(loaded, which=[1], group_size=4096, params=sampling(new=1), rows=4096)[0]
    ids = torch.tensor([prompts()[1].token_ids])
    with torch.no_grad():
        p = torch.softmax(loaded.model(ids, torch.arange(ids.shape[1])[None])[0], -1).double()
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in draws]), minlength=80).double()
    likely = p * 4096 > 5
    chi2 = float(((counts - 4096 * p)[likely] ** 2 / (4096 * p)[likely]).sum())
    # Mean and deviation of chi-squared with that many categories; five deviations.
    n = int(likely.sum()) - 1
    assert chi2 < n + 5 * (2 * n) ** 0.5


def test_bfloat16_parity_bound(tmp_path: Path) -> None:
    result = load(write_model(tmp_path, "qwen2", scale=0.15), dtype="bfloat16", lora=LoraSection(rank=4))
    randomize_adapters(result.model)
    groups = generate(result, None)
    difference = (trainer_logprobs(result, groups, None, 1.0) - flat(groups)).abs()
    assert 0.0 < float(difference.mean()) <= 0.02
    assert float(difference.max()) <= 0.25


def test_the_cache_peak_is_that_of_the_whole_batch(loaded: Loaded) -> None:
    engine = EmbeddedEngine(loaded.model, loaded.registry, 128)
    engine.publish(PolicyVersion("base", 0, "a", None, 1.0, 1.0, 0))
    stops = tuple(range(0, 80, 2))
    engine.generate([GenerationRequest(p, 4, 0) for p in prompts()], sampling(stops=stops))
    heads, size, layers = loaded.shape.num_query_groups, loaded.shape.kv_channels, loaded.shape.num_blocks
    assert engine.kv_cache_peak_bytes == 4 * len(LENGTHS) * (max(LENGTHS) + 12) * heads * size * layers * 2 * 4


def test_an_unpublished_engine_refuses(loaded: Loaded) -> None:
    engine = EmbeddedEngine(loaded.model, loaded.registry, 8)
    with pytest.raises(FaultError, match="before a policy was published"):
        engine.generate([GenerationRequest(prompts()[0], 1, 0)], sampling())
