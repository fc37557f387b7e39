"""Our layers as a Megatron backend: what it builds, what it refuses, and which attention is chosen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from megatron_qerl.config.availability import refuse_unbuilt
from megatron_qerl.config.schema import ParallelSection, RunConfig
from megatron_qerl.errors import BackendUnavailableError, ConfigError, FaultError
from megatron_qerl.layers.attention import SdpaCoreAttention
from megatron_qerl.layers.attention_te import TEPackedAttention
from megatron_qerl.layers.experts import FrozenExperts
from megatron_qerl.layers.frozen import DenseFrozen
from megatron_qerl.layers.lora import LoraSpec
from megatron_qerl.layers.norm import NoiseRMSNorm
from megatron_qerl.layers.packing import pack
from megatron_qerl.layers.provider import FrozenNVFP4SpecProvider, choose_attention
from megatron_qerl.models.build import transformer_config
from megatron_qerl.models.families import family_of
from megatron_qerl.models.shape import ModelShape
from megatron_qerl.parallel.setup import initialize

CPU = torch.device("cpu")
H, F = 32, 48


def config() -> Any:
    initialize(ParallelSection(), "auto", 1)
    shape = ModelShape(family_of({"model_type": "llama"}, "x"), 1, H, F, 4, 2, 8, 64, 1e-6, True, False)  # type: ignore[arg-type]
    return transformer_config(shape, ParallelSection(), torch.float32, "none")


def built_mlp(lora: LoraSpec | None) -> Any:
    """Megatron's own MLP, by Megatron's own spec function, from our provider."""
    settings = config()
    spec = get_mlp_module_spec_for_backend(backend=FrozenNVFP4SpecProvider(lora))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    mlp = spec(config=settings, pg_collection=groups, is_mtp_layer=False, ffn_hidden_size=F)
    generator = torch.Generator().manual_seed(0)
    mlp.linear_fc1.install(DenseFrozen(0.2 * torch.randn(2 * F, H, generator=generator)))
    mlp.linear_fc2.install(DenseFrozen(0.2 * torch.randn(H, F, generator=generator)))
    for name, parameter in mlp.named_parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        assert ".adapter." in name, "only adapters are parameters"
    return mlp


def test_a_spec_function_of_megatron_builds_our_linears() -> None:
    mlp = built_mlp(LoraSpec(4, 8.0, ("gate_proj", "up_proj", "down_proj"), 1))
    assert isinstance(mlp.linear_fc1, ColumnParallelLinear)
    assert isinstance(mlp.linear_fc2, RowParallelLinear)
    assert (mlp.linear_fc1.layout.names, mlp.linear_fc2.layout.names) == (("gate_proj", "up_proj"), ("down_proj",))
    x = torch.randn(5, 1, H, generator=torch.Generator().manual_seed(1))
    y, bias = mlp(x)

    def whole(linear: Any) -> Tensor:
        parts = {name: 2.0 * b @ a for name, (a, b) in linear.adapter.split().items()}
        matrix: Tensor = linear.frozen.matrix(torch.float32) + linear.layout.fuse_rows(parts)
        return matrix

    gate, up = (x @ whole(mlp.linear_fc1).t()).chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up) @ whole(mlp.linear_fc2).t()
    assert bias is None
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


def test_names_are_megatrons_and_the_base_is_no_parameter() -> None:
    mlp = built_mlp(LoraSpec(4, 4.0, ("up_proj",), 1))
    assert {n for n, _ in mlp.named_children()} == {"linear_fc1", "linear_fc2"}
    assert [n for n, _ in mlp.named_parameters()] == ["linear_fc1.adapter.lora_A", "linear_fc1.adapter.lora_B"]
    provider = FrozenNVFP4SpecProvider()
    assert not provider.fuse_layernorm_and_linear()
    assert provider.column_parallel_layer_norm_linear() is None
    assert provider.activation_func() is None
    assert provider.layer_norm(rms_norm=True, for_qk=True) is NoiseRMSNorm
    assert provider.core_attention() is SdpaCoreAttention
    assert FrozenNVFP4SpecProvider(attention="transformer_engine").core_attention() is TEPackedAttention


def test_layer_norm_is_refused_and_experts_are_ours() -> None:
    with pytest.raises(ConfigError, match="RMSNorm"):
        FrozenNVFP4SpecProvider().layer_norm(rms_norm=False)
    lora = LoraSpec(4, 4.0, ("up_proj",), 1)
    spec = get_mlp_module_spec_for_backend(backend=FrozenNVFP4SpecProvider(lora), num_experts=4, moe_grouped_gemm=True)
    experts = spec.keywords["submodules"].experts
    assert experts.func is FrozenExperts
    assert experts.keywords == {"lora": lora}


class FakeTE(nn.Module):
    """Stands for Megatron's wrapper of Transformer Engine; plain causal attention of each sequence."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Tensor:
        self.calls.append(options)
        assert all(t.is_contiguous() for t in (query, key, value))
        bounds = options["packed_seq_params"].cu_seqlens_q.tolist()
        out = []
        for begin, end in itertools.pairwise(bounds):
            q, k, v = (t[begin:end].transpose(0, 1) for t in (query, key, value))
            out.append(
                nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)
            )
        return torch.cat(out).flatten(1)


@pytest.fixture
def te_attention(monkeypatch: pytest.MonkeyPatch) -> TEPackedAttention:
    from megatron.core.extensions import transformer_engine as edge

    monkeypatch.setattr(edge, "TEDotProductAttention", FakeTE)
    return TEPackedAttention(config(), 1, AttnMaskType.causal, "self")


def tensors(rows: int, *lead: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    # The value is a slice, as it comes out of the fused projection.
    q, k, v = (torch.randn(rows, *lead, n, 8, generator=generator) for n in (4, 2, 4))
    return q, k, v[..., ::2, :]


GROUPS = [((1, 2, 3), [(4, 5), (6, 7, 8)]), ((9,), [(1, 2, 3, 4)])]


def test_plain_packs_go_to_transformer_engine_and_equal_sdpa(te_attention: TEPackedAttention) -> None:
    packed = pack(GROUPS, CPU, share_prefix=False)
    q, k, v = tensors(packed.total_tokens)
    options: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal, "packed_seq_params": packed.params}
    out = te_attention(q, k, v, None, **options)
    reference = SdpaCoreAttention(config(), 1, AttnMaskType.causal, "self")(q, k, v, None, **options)
    assert len(te_attention.packed.calls) == 1
    torch.testing.assert_close(out, reference)


def test_a_pack_with_shared_prompts_is_refused_by_transformer_engine(te_attention: TEPackedAttention) -> None:
    packed = pack(GROUPS, CPU, share_prefix=True)
    q, k, v = tensors(packed.total_tokens)
    with pytest.raises(FaultError, match="share_prompt_prefix"):
        te_attention(q, k, v, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed.params)
    assert te_attention.packed.calls == []


def test_cached_decoding_stays_with_sdpa(te_attention: TEPackedAttention) -> None:
    q, k, v = tensors(6, 3)
    blocked = torch.zeros(3, 1, 1, 6, dtype=torch.bool)
    blocked[1, ..., :2] = True
    out = te_attention(q[-1:], k, v, blocked, attn_mask_type=AttnMaskType.causal)
    reference = SdpaCoreAttention(config(), 1, AttnMaskType.causal, "self")(q[-1:], k, v, blocked)
    assert te_attention.packed.calls == []
    assert torch.equal(out, reference)


def pretend(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, te: bool) -> None:
    from megatron.core.extensions import transformer_engine as edge

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(edge, "HAVE_TE", te)


@pytest.mark.parametrize(
    ("setting", "gpu", "te", "shares", "dtype", "name", "reason"),
    [
        ("auto", True, True, False, torch.bfloat16, "transformer_engine", "plain sequences"),
        ("auto", True, True, True, torch.bfloat16, "sdpa", "shared"),
        ("auto", True, True, False, torch.float32, "sdpa", "BF16"),
        ("auto", True, False, False, torch.bfloat16, "sdpa", "not installed"),
        ("auto", False, True, False, torch.bfloat16, "sdpa", "NVIDIA"),
        ("sdpa", True, True, False, torch.bfloat16, "sdpa", "names it"),
        ("transformer_engine", True, True, False, torch.bfloat16, "transformer_engine", "names it"),
    ],
)
def test_the_attention_is_chosen_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    gpu: bool,
    te: bool,
    shares: bool,
    dtype: torch.dtype,
    name: str,
    reason: str,
) -> None:
    pretend(monkeypatch, gpu=gpu, te=te)
    choice = choose_attention(setting, shares_prompts=shares, dtype=dtype)
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("gpu", "te", "shares", "dtype", "error", "remedy"),
    [
        (False, True, False, torch.bfloat16, BackendUnavailableError, "sdpa"),
        (True, False, False, torch.bfloat16, BackendUnavailableError, "megatron-qerl\\[gpu\\]"),
        (True, True, True, torch.bfloat16, ConfigError, "share_prompt_prefix: false"),
        (True, True, False, torch.float32, ConfigError, "bfloat16"),
    ],
)
def test_transformer_engine_is_refused_where_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
    gpu: bool,
    te: bool,
    shares: bool,
    dtype: torch.dtype,
    error: type[Exception],
    remedy: str,
) -> None:
    pretend(monkeypatch, gpu=gpu, te=te)
    with pytest.raises(error, match=remedy):
        choose_attention("transformer_engine", shares_prompts=shares, dtype=dtype)


def run_config(model: dict[str, Any], train: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "x", "attention": "transformer_engine"} | model,
            "data": {"train": {"kind": "arithmetic"}, "eval": {"kind": "arithmetic"}},
            "algorithm": {"name": "grpo", "likelihood": "replay"},
            "train": {"steps": 20, "share_prompt_prefix": False} | train,
        }
    )


def test_contradictions_with_transformer_engine_are_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    refuse_unbuilt(run_config({}, {}))
    for model, train, key in (
        ({}, {"share_prompt_prefix": True}, "train.share_prompt_prefix"),
        ({"dtype": "float32"}, {}, "model.dtype"),
        ({"device": "cpu"}, {}, "model.device"),
    ):
        config_ = run_config(model, train)
        with pytest.raises(ConfigError, match="transformer_engine") as caught:
            refuse_unbuilt(config_)
        assert caught.value.key == key
