"""Layers that save memory compute what the plain ones compute: values, and every gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_qerl.config.schema import LoraSection, QuantizeConfig
from megatron_qerl.errors import FaultError
from megatron_qerl.layers import mlp as mlp_module
from megatron_qerl.layers.frozen import DenseFrozen, FrozenWeight, NVFP4Frozen
from megatron_qerl.layers.kernels import NVFP4Weight
from megatron_qerl.layers.mlp import FrozenMLP
from megatron_qerl.layers.offload import CheckpointOffload
from megatron_qerl.layers.packing import pack
from megatron_qerl.models.policy import LogprobQuery
from tests.support.loaded import Loaded, load, randomize_adapters
from tests.support.tiny_model import write_model

CPU = torch.device("cpu")
GROUPS = [((5, 9, 11), [(7, 8, 9), (30,), (60, 61)]), ((20, 21, 22, 23), [(1, 2, 3, 4, 5)])]


def weight(kind: str, tensor_scale: float) -> FrozenWeight:
    """A [24, 32] base of one kind."""
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (24, 16), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0x30, 0x40, (24, 2), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    nvfp4 = NVFP4Frozen(NVFP4Weight(packed, scale, tensor_scale), torch.float32, resident=kind == "resident")
    return DenseFrozen(nvfp4.matrix(torch.float32)) if kind == "dense" else nvfp4


@pytest.mark.parametrize("tensor_scale", [0.125, 0.1])
@pytest.mark.parametrize("kind", ["packed", "resident", "dense"])
@pytest.mark.parametrize("updated", [False, True])
def test_products_and_gradients_of_every_kind_of_base(kind: str, updated: bool, tensor_scale: float) -> None:
    base = weight(kind, tensor_scale)
    matrix = base.matrix(torch.float32).double()
    generator = torch.Generator().manual_seed(4)
    x, u, b = (torch.randn(s, generator=generator, requires_grad=True) for s in ((3, 2, 32), (3, 2, 4), (24, 4)))
    grad = torch.randn(3, 2, 24, generator=generator)
    y = base.multiply(x, (u, b) if updated else None)
    expected = x.double() @ matrix.t() + (u.double() @ b.double().t() if updated else 0.0)
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    inputs = (x, u, b) if updated else (x,)
    for found, wanted in zip(
        torch.autograd.grad(y, inputs, grad), torch.autograd.grad(expected, inputs, grad.double()), strict=True
    ):
        torch.testing.assert_close(found.double(), wanted.double(), atol=1e-5, rtol=1e-5)
    v, a = torch.randn(3, 2, 4, generator=generator), torch.randn(4, 32, generator=generator)
    found = base.input_gradient(grad, (v, a) if updated else None)
    wanted = grad.double() @ matrix + (v.double() @ a.double() if updated else 0.0)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def policy(folder: Path, *, lora: LoraSection | None, recompute: str = "none", **sizes: Any) -> Loaded:
    path = folder / "model"
    if not path.exists():
        write_model(path, "qwen2", scale=0.2, **sizes)
    loaded = load(path, lora=lora, recompute=recompute)
    randomize_adapters(loaded.model)
    loaded.model.train()
    return loaded


def gradients(loaded: Loaded) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of two groups and the adapters' gradients of a weighted sum of them."""
    tokens = pack(GROUPS, CPU, share_prefix=True)
    query = LogprobQuery(tokens.logit_rows, tokens.targets, 1.0, 4)
    logprobs, _ = loaded.model(tokens.token_ids, tokens.position_ids, packed_seq_params=tokens.params, query=query)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    found = {n: p.grad for n, p in loaded.model.named_parameters() if p.requires_grad}
    for parameter in loaded.model.parameters():
        parameter.grad = None
    return logprobs.detach(), found  # type: ignore[return-value]


def plain_mlp(self: FrozenMLP, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    """The MLP as automatic differentiation would have it."""
    y, _bias = self.linear_fc1(hidden_states)
    gate, up = y.chunk(2, dim=-1)
    return self.linear_fc2(torch.nn.functional.silu(gate) * up)[0], None


@pytest.mark.parametrize("rows", [2048, 4])
@pytest.mark.parametrize("targets", [None, ("gate_proj", "up_proj"), ("down_proj", "q_proj", "v_proj")])
def test_the_mlp_has_the_gradients_of_automatic_differentiation(
    rows: int, targets: tuple[str, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = LoraSection(rank=4, alpha=8.0) if targets is None else LoraSection(rank=4, targets=targets)
    loaded = policy(tmp_path, lora=lora)
    monkeypatch.setattr(mlp_module, "BACKWARD_ROWS", rows)
    logprobs, found = gradients(loaded)
    monkeypatch.setattr(FrozenMLP, "forward", plain_mlp)
    reference, wanted = gradients(loaded)
    torch.testing.assert_close(logprobs, reference, atol=1e-5, rtol=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert wanted[name].abs().max() > 1e-4, f"{name} has a gradient"
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=1e-4, msg=name)


def test_a_second_backward_through_the_mlp_is_refused(tmp_path: Path) -> None:
    loaded = policy(tmp_path, lora=LoraSection(rank=4))
    mlp = next(m for m in loaded.model.modules() if isinstance(m, FrozenMLP))
    out, _ = mlp(torch.randn(6, 1, 64, requires_grad=True))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


@pytest.mark.parametrize("recompute", ["full", "full_offload"])
def test_recomputation_changes_no_bit(recompute: str, tmp_path: Path) -> None:
    plain = gradients(policy(tmp_path, lora=LoraSection(rank=4)))
    loaded = policy(tmp_path, lora=LoraSection(rank=4), recompute=recompute)
    for _ in range(2):
        again = gradients(loaded)
        assert torch.equal(again[0], plain[0])
        assert all(torch.equal(again[1][n], g) for n, g in plain[1].items())


def test_offloading_parks_every_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    loaded = policy(tmp_path, lora=LoraSection(rank=4), recompute="full_offload")
    gradients(loaded)
    tokens = pack(GROUPS, CPU, share_prefix=True).total_tokens
    checkpoint_bytes = tokens * 64 * 4
    # Two blocks, each a checkpoint for attention and one for the MLP.
    assert loaded.model.models[0].decoder.offload.parked_bytes == 4 * checkpoint_bytes
    plain = policy(tmp_path, lora=LoraSection(rank=4), recompute="full")
    assert plain.model.models[0].decoder.offload is None


def test_a_parked_tensor_is_given_back_once() -> None:
    offload = CheckpointOffload()
    x = torch.randn(4, 1, 8, requires_grad=True)
    with offload.active(x):
        y = (x * x).sum()
    y.backward(retain_graph=True)
    assert torch.equal(x.grad, 2 * x)  # type: ignore[arg-type]
    with pytest.raises(FaultError, match="twice"):
        y.backward()


def test_nvfp4_and_dense_bases_of_one_matrix_train_alike(tmp_path: Path) -> None:
    """The arms of the step benchmark: the same matrix, packed and plain."""
    from megatron_qerl.nvfp4.quantize import quantize

    source = write_model(tmp_path / "source", "qwen2", scale=0.2, dtype=torch.bfloat16)
    packed = quantize(QuantizeConfig(source=source, output=tmp_path / "nvfp4", device="cpu"))
    loaded = load(packed, lora=LoraSection(rank=4))
    randomize_adapters(loaded.model)
    logprobs, found = gradients(loaded)
    for module in loaded.model.modules():
        if hasattr(module, "install"):
            module.install(DenseFrozen(module.frozen.matrix(torch.float32)))
    reference, wanted = gradients(loaded)
    torch.testing.assert_close(logprobs, reference, atol=1e-5, rtol=1e-5)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    "targets",
    [("q_proj", "k_proj", "v_proj"), ("v_proj",), ("q_proj", "v_proj"), ("k_proj", "up_proj"), ("gate_proj",)],
)
def test_each_projection_of_a_fused_linear_gets_its_own_adapter(targets: tuple[str, ...], tmp_path: Path) -> None:
    loaded = policy(tmp_path, lora=LoraSection(rank=4, alpha=8.0, targets=targets))
    linears = [m for m in loaded.model.modules() if getattr(m, "adapter", None) is not None]
    assert linears
    for linear in linears:
        adapter, rows = linear.adapter, dict(linear.layout.parts)
        x = torch.randn(5, 1, 64, generator=torch.Generator().manual_seed(6))
        split = adapter.split()
        products = {n: 2.0 * b @ a for n, (a, b) in split.items()}
        delta = linear.layout.fuse_rows({n: products.get(n, torch.zeros(rows[n], 64)) for n in rows})
        found = adapter.low_rank(x) @ adapter.expansion().t()
        torch.testing.assert_close(found, x @ delta.t(), atol=1e-5, rtol=1e-5)
        weighting = torch.linspace(-1, 1, found.numel()).view(found.shape)
        got = torch.autograd.grad((found * weighting).sum(), (adapter.lora_A, adapter.lora_B))
        wanted = torch.autograd.grad(((x @ delta.t()) * weighting).sum(), (adapter.lora_A, adapter.lora_B))
        for gradient, reference in zip(got, wanted, strict=True):
            torch.testing.assert_close(gradient, reference, atol=1e-4, rtol=1e-4)
