"""Routes of a mixture of experts: what the router sees, what is recorded, and what a replay forces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_qerl.config.schema import NoiseSection
from megatron_qerl.errors import FaultError
from megatron_qerl.layers.packing import pack
from megatron_qerl.layers.routing import RoutingRecord, pack_routes
from megatron_qerl.models.policy import LogprobQuery
from megatron_qerl.rollout.engine import GenerationRequest
from megatron_qerl.rollout.engines.embedded import EmbeddedEngine
from megatron_qerl.types import PolicyVersion
from tests.parity.test_embedded_engine import prompts, sampling
from tests.parity.test_moe import BLOCKS, CPU, TOP_K, adapted, gradients, packed_logprobs
from tests.support.loaded import Loaded, load
from tests.support.tiny_model import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("routes"), "qwen3_moe", tied=False, scale=0.1)


@contextmanager
def noise(loaded: Loaded) -> Iterator[None]:
    with loaded.registry.applied(loaded.registry.state(10, 100)):
        yield


def recorded(loaded: Loaded, **arguments: Any) -> tuple[Tensor, RoutingRecord]:
    with torch.no_grad(), loaded.model.routing.recording() as kept:
        logprobs = packed_logprobs(loaded, **arguments)
    return logprobs, kept.record()


STRONG = NoiseSection(roles=("post_attention",), sigma_start=0.3, sigma_end=0.1)


def test_a_clean_router_does_not_see_the_noise(folder: Path) -> None:
    clean, noisy = (load(folder, noise=STRONG, router_input=r) for r in ("clean", "noisy"))
    plain, free = recorded(clean)
    with noise(clean):
        held, routes_clean = recorded(clean)
    with noise(noisy):
        moved, routes_noisy = recorded(noisy)
    # In the first block nothing but the router's own input could have changed.
    assert torch.equal(routes_clean.experts[0], free.experts[0])
    assert not torch.equal(routes_noisy.experts[0], free.experts[0])
    assert free.flipped_share(routes_clean) < free.flipped_share(routes_noisy)
    # The experts see the noise all the same.
    assert (held - plain).abs().max() > 1e-2
    assert (moved - plain).abs().max() > 1e-2
    assert torch.equal(recorded(clean)[0], plain)


def test_flipped_share_counts_choices() -> None:
    a = RoutingRecord({0: torch.tensor([[0, 1], [2, 3]]), 1: torch.tensor([[4, 5], [6, 7]])})
    b = RoutingRecord({0: torch.tensor([[0, 2], [2, 3]]), 1: torch.tensor([[1, 2], [6, 7]])})
    assert a.flipped_share(a) == 0.0
    assert a.flipped_share(b) == 3 / 8
    with pytest.raises(FaultError, match="routing records"):
        a.flipped_share(a.rows(torch.tensor([0])))


def test_replay_of_the_same_policy_is_bit_equal(folder: Path) -> None:
    loaded = adapted(folder)
    free, routing = recorded(loaded)
    assert routing.tokens == 25
    assert all(e.shape == (25, TOP_K) and bool((e.diff(dim=1) > 0).all()) for e in routing.experts.values())
    carried, again = recorded(loaded, routing=routing)
    assert torch.equal(carried, free)
    with torch.no_grad(), loaded.model.routing.replaying(routing):
        assert torch.equal(packed_logprobs(loaded), free)
    assert again.flipped_share(routing) == 0.0
    plain, replayed = (gradients(loaded, packed_logprobs(loaded, routing=r).sum()) for r in (None, routing))
    assert all(torch.equal(plain[n], replayed[n]) for n in plain)


def test_replay_holds_the_routes_that_noise_would_flip(folder: Path) -> None:
    loaded = load(folder, noise=STRONG)
    _, routing = recorded(loaded)
    with noise(loaded):
        free, flipped = recorded(loaded)
        held, kept = recorded(loaded, routing=routing)
    assert routing.flipped_share(flipped) > 0.05
    assert routing.flipped_share(kept) == 0.0
    assert (free - held).abs().max() > 1e-3


def test_replay_is_held_when_activations_are_recomputed(folder: Path) -> None:
    """Two packs in flight, as between pipeline stages: each is recomputed with its own record."""
    loaded = load(folder, noise=STRONG)
    records = [recorded(loaded)[1]]
    with noise(loaded):
        records.append(recorded(loaded)[1])
    found = []
    for recompute in ("none", "full"):
        loaded = adapted(folder, recompute=recompute)
        loaded.model.train()
        first, second = (packed_logprobs(loaded, routing=r) for r in records)
        found.append(gradients(loaded, first.sum() + 2.0 * second.sum()))
    # Without recomputation backward goes through the two packs in turn; with it, too: sums in one order.
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_a_record_of_something_else_is_refused(folder: Path) -> None:
    loaded = load(folder)
    _, routing = recorded(loaded)
    with pytest.raises(FaultError, match="24 tokens"):
        packed_logprobs(loaded, routing=routing.rows(torch.arange(24)))
    with pytest.raises(FaultError, match="block 1"):
        packed_logprobs(loaded, routing=RoutingRecord({0: routing.experts[0]}))


@pytest.mark.parametrize("share", [True, False])
def test_the_engines_routes_are_recorded_and_replay_in_the_trainer(share: bool, folder: Path) -> None:
    loaded = adapted(folder, noise=NoiseSection(sigma_start=0.05))
    noise = loaded.registry.state(10, 100)
    engine = EmbeddedEngine(loaded.model, loaded.registry, 7)  # fewer rows than responses: several batches
    engine.publish(PolicyVersion("base", 2, "adapter", noise, 1.0, 1.0, 0))
    groups = engine.generate([GenerationRequest(p, 4, 5, routes=True) for p in prompts()], sampling(stops=(1, 7, 8)))
    assert len({len(c.token_ids) for g in groups for c in g}) > 3  # rows have left the batch
    routes = [(len(p.token_ids), [c.routes for c in g]) for p, g in zip(prompts(), groups, strict=True)]
    record = pack_routes(routes, share_prefix=share)
    packs = [(p.token_ids, [c.token_ids for c in g]) for p, g in zip(prompts(), groups, strict=True)]
    tokens = pack(packs, CPU, share_prefix=share)
    query = LogprobQuery(tokens.logit_rows, tokens.targets, 1.0, 64)

    def score(routing: RoutingRecord | None) -> tuple[Tensor, RoutingRecord]:
        tokens.params.routing = routing
        with torch.no_grad(), loaded.registry.applied(noise), loaded.model.routing.recording() as kept:
            values = loaded.model(tokens.token_ids, tokens.position_ids, packed_seq_params=tokens.params, query=query)[
                0
            ]
        return values, kept.record()

    free, chosen = score(None)
    assert record.tokens == tokens.token_ids.shape[1]
    # In FP32 no two experts are so near that the shapes of products decide: row by row, the engine's experts.
    assert all(torch.equal(record.experts[b], chosen.experts[b]) for b in range(BLOCKS))
    assert torch.equal(score(record)[0], free)
    behaviour = torch.tensor([x for g in groups for c in g for x in c.logprobs])
    assert (free - behaviour).abs().max() <= 1e-4
    # A record of other rows is not as good as the right one.
    assert (score(record.rows(torch.arange(record.tokens).flip(0)))[0] - behaviour).abs().max() > 1e-2
