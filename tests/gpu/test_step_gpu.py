"""A training step on a GPU: Transformer Engine's attention, offloaded checkpoints, and the memory they save."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import step
from megatron_qerl.config.schema import LoraSection, ModelSection, NoiseSection, ParallelSection
from megatron_qerl.layers.packing import pack
from megatron_qerl.models.policy import LogprobQuery
from megatron_qerl.rollout.engine import GenerationRequest
from megatron_qerl.types import PolicyVersion, Problem, Prompt, SamplingParams
from tests.support.loaded import load, randomize_adapters
from tests.support.tiny_model import write_model

pytestmark = pytest.mark.gpu
MIDDLE = step.MODELS["tiny"] | {
    "vocab_size": 2048,
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.fixture
def transformer_engine() -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        pytest.skip("needs Transformer Engine, which Megatron cannot import here")


def attention_inputs(tokens: int, heads: int, groups: int, size: int) -> tuple[Tensor, ...]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    make = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(tokens, heads, size, **make)  # type: ignore[call-overload]
    # Key and value are slices, as they come out of the fused projection.
    kv = torch.randn(tokens, groups, 2 * size, **make)  # type: ignore[call-overload]
    return (q.requires_grad_(), *(t.requires_grad_() for t in kv.split(size, dim=2)))


@pytest.mark.parametrize(("heads", "groups", "size"), [(28, 4, 128), (4, 2, 64)])
def test_packed_attention_equals_sdpa(transformer_engine: None, heads: int, groups: int, size: int) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_qerl.layers.attention import SdpaCoreAttention
    from megatron_qerl.layers.attention_te import TEPackedAttention
    from megatron_qerl.models.build import transformer_config
    from megatron_qerl.models.families import family_of
    from megatron_qerl.models.shape import ModelShape
    from megatron_qerl.parallel.setup import initialize

    initialize(ParallelSection(), "auto", 1)
    family = family_of({"model_type": "llama"}, Path("x"))
    shape = ModelShape(family, 1, heads * size, 128, heads, groups, size, 64, 1e-6, True, False)
    config = transformer_config(shape, ParallelSection(), torch.bfloat16, "none")
    lengths = (300, 17, 1, 640)
    packed = pack([((1,), [(2,) * n]) for n in lengths], torch.device("cuda"), share_prefix=False)
    inputs = attention_inputs(packed.total_tokens, heads, groups, size)
    grad = torch.randn(packed.total_tokens, heads * size, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal, "packed_seq_params": packed.params}
    results = []
    for kind in (TEPackedAttention, SdpaCoreAttention):
        module: Any = kind(config, 1, AttnMaskType.causal, "self")
        out = module(*inputs, None, **options)
        results.append((out, *torch.autograd.grad(out, inputs, grad)))
    for found, wanted in zip(*results, strict=True):
        # Both round their result to BF16 (2^-9 relative) and their probabilities on the way: a few steps of the scale.
        scale = float(wanted.abs().max())
        assert float((found - wanted).abs().max()) <= 2.0**-6 * scale


def bf16_policy(path: Path, attention: str) -> Any:
    """A loaded BF16 policy with random adapters and this attention."""
    from megatron_qerl.models.build import build_policy
    from megatron_qerl.models.load import initialize_adapters, load_base
    from megatron_qerl.models.walk import expected_norms, norms
    from megatron_qerl.noise.registry import NoiseRegistry

    first = load(path, dtype="bfloat16")
    section = ModelSection(path=path, dtype="bfloat16", attention=attention)  # type: ignore[arg-type]
    model = build_policy(
        first.folder.config, section, ParallelSection(), LoraSection(rank=4), seed=1, shares_prompts=False
    )
    load_base(model, first.shape, first.folder, resident=False)
    initialize_adapters(model, first.shape)
    randomize_adapters(model)
    return model, NoiseRegistry(norms(model, first.shape), expected_norms(first.shape), NoiseSection(), 1)


def test_generation_and_scoring_agree_with_transformer_engine(transformer_engine: None, tmp_path: Path) -> None:
    from megatron_qerl.rollout.engines.embedded import EmbeddedEngine

    path = write_model(tmp_path, "qwen2", scale=0.1, hidden_size=256)
    prompts = ((5, 9, 11), (20, 21, 22, 23, 24, 25, 26), (40,))
    scored: dict[str, Tensor] = {}
    responses: list[list[tuple[int, ...]]] = []
    for attention in ("transformer_engine", "sdpa"):
        model, registry = bf16_policy(path, attention)
        assert model.attention.name == attention
        if not responses:
            engine = EmbeddedEngine(model, registry, 64)
            engine.publish(PolicyVersion("b", 0, "a", None, 1.0, 1.0, 0))
            requests = [
                GenerationRequest(Prompt(Problem(str(i), "", "", "", ""), p), 8, 0) for i, p in enumerate(prompts)
            ]
            groups = engine.generate(requests, SamplingParams(1.0, 12, (1,), 3))
            responses = [[c.token_ids for c in g] for g in groups]
            scored["engine"] = torch.tensor([x for g in groups for c in g for x in c.logprobs])
        packed = pack(list(zip(prompts, responses, strict=True)), torch.device("cuda"), share_prefix=False)
        query = LogprobQuery(packed.logit_rows, packed.targets, 1.0, 64)
        with torch.no_grad():
            found = model(packed.token_ids, packed.position_ids, packed_seq_params=packed.params, query=query)[0]
        scored[attention] = found.cpu()
    assert (scored["transformer_engine"] - scored["sdpa"]).abs().max() <= 0.25
    assert (scored["transformer_engine"] - scored["sdpa"]).abs().mean() <= 0.03
    assert (scored["transformer_engine"] - scored["engine"]).abs().max() <= 0.25


def run(arm: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(step.MODELS, "middle", MIDDLE)
    result = step.run_arm("middle", arm, step.Settings(tokens=8192, steps=2, recompute=recompute))
    gc.collect()
    torch.cuda.empty_cache()
    return result


def test_the_arms_agree_and_nvfp4_takes_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {arm: run(arm, "full_offload", monkeypatch) for arm in step.ARMS}
    ours, base = arms["nvfp4"], arms["bf16"]
    assert ours["mean_logprob"] == pytest.approx(base["mean_logprob"], abs=2e-2)
    assert ours["gradient_norm"] == pytest.approx(base["gradient_norm"], rel=0.05)
    assert ours["update_norm"] > 0.0
    packed, plain = (a["static_bytes"]["weights_packed"] for a in (ours, base))
    assert packed == pytest.approx(plain * 0.28125, rel=1e-3)
    assert ours["resting_bytes"] - ours["static_bytes"]["workspace"] < base["resting_bytes"]


def test_offloaded_checkpoints_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    parked, kept = (run("nvfp4", recompute, monkeypatch) for recompute in ("full_offload", "full"))
    assert parked["gradient_norm"] == pytest.approx(kept["gradient_norm"], rel=0.02)
    checkpoints = 8 * 8192 * 1024 * 2
    assert kept["activations_bytes"] - parked["activations_bytes"] >= 0.5 * checkpoints


def test_gradients_through_offloaded_checkpoints_are_the_same(tmp_path: Path) -> None:
    path = write_model(tmp_path, "qwen2", scale=0.15, num_hidden_layers=6)
    groups = [((5, 9, 11), [tuple(range(2, 60))]), ((7,) * 20, [tuple(range(3, 40)), (4, 5)])]
    packed = pack(groups, torch.device("cuda"), share_prefix=False)
    query = LogprobQuery(packed.logit_rows, packed.targets, 1.0, 64)
    gradients: dict[str, list[Tensor]] = {}
    for recompute in ("none", "full", "full_offload"):
        loaded = load(path, lora=LoraSection(rank=4), recompute=recompute)
        randomize_adapters(loaded.model)
        loaded.model.train()
        for _ in range(3):
            loaded.model.zero_grad()
            logprobs, _ = loaded.model(
                packed.token_ids, packed.position_ids, packed_seq_params=packed.params, query=query
            )
            (logprobs * torch.linspace(-1, 1, len(logprobs), device="cuda")).sum().backward()
        gradients[recompute] = [p.grad for p in loaded.model.parameters() if p.grad is not None]  # type: ignore[misc]
    for recompute in ("full", "full_offload"):
        for found, wanted in zip(gradients[recompute], gradients["none"], strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
