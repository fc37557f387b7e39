"""The CPU paths of te_extensions against slow references, with controls that must fail."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_qerl.nvfp4.format import decode, power_of_two_tensor_scale, quantize_blocks
from te_extensions import HeadShard, NVFP4Weight, linear_logprob, nvfp4_dequantize, nvfp4_linear, nvfp4_materialize
from te_extensions.norm import rms_norm_noise


def make_weight(n: int = 48, k: int = 96, seed: int = 0, scale: float | None = None) -> NVFP4Weight:
    dense = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05
    tensor_scale = power_of_two_tensor_scale(dense.abs().max()) if scale is None else torch.tensor(scale)
    packed = quantize_blocks(dense, tensor_scale)
    return NVFP4Weight(packed.packed, packed.block_scale, float(packed.tensor_scale))


def reference(weight: NVFP4Weight) -> Tensor:
    return decode(weight.packed, weight.block_scale, torch.tensor(weight.tensor_scale), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dequantisation_is_exact(dtype: torch.dtype) -> None:
    weight = make_weight()
    assert torch.equal(nvfp4_dequantize(weight, dtype).double(), reference(weight))


def test_every_code_and_every_block_scale_decodes_exactly() -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = scales[torch.isfinite(scales.float()) & (scales.float() > 0)]
    packed = bytes_.repeat(len(finite), 1)
    weight = NVFP4Weight(packed, finite[:, None].expand(-1, 32).contiguous(), 0.25)
    assert torch.equal(nvfp4_dequantize(weight, torch.bfloat16).double(), reference(weight))


def broken(weight: NVFP4Weight, how: str) -> NVFP4Weight:
    if how == "nibbles":
        return dataclasses.replace(weight, packed=(weight.packed >> 4) | (weight.packed << 4))
    if how == "neighbour scale":
        rolled = weight.block_scale.view(torch.uint8).roll(1, dims=1).view(torch.float8_e4m3fn)
        return dataclasses.replace(weight, block_scale=rolled)
    return dataclasses.replace(weight, tensor_scale=2 * weight.tensor_scale)


@pytest.mark.parametrize("how", ["nibbles", "neighbour scale", "tensor scale"])
def test_negative_control_is_far_outside_the_tolerance(how: str) -> None:
    weight = make_weight()
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    wrong = nvfp4_linear(x, broken(weight, how)).double()
    right = x.double() @ reference(weight).t()
    assert (wrong - right).norm() > 0.1 * right.norm()


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("scale", [None, 0.0123])
def test_forward_and_input_gradient_match_float64(resident: bool, scale: float | None) -> None:
    weight = make_weight(scale=scale)
    x = torch.randn(3, 7, 96, generator=torch.Generator().manual_seed(1), requires_grad=True)
    cache = nvfp4_materialize(weight, x.dtype) if resident else None
    y = nvfp4_linear(x, weight, dequantized=cache)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(grad)
    exact = reference(weight)
    # A float32 dot product of length K errs by at most K eps times the product of norms.
    bound = 96 * 2.0**-23
    want = x.detach().double() @ exact.t()
    want_grad = grad.double() @ exact
    assert (y.detach().double() - want).abs().max() <= bound * float(want.abs().max() * 10)
    assert x.grad is not None
    assert (x.grad.double() - want_grad).abs().max() <= bound * float(want_grad.abs().max() * 10)


def test_backward_saves_no_tensor() -> None:
    saved: list[Tensor] = []
    x = torch.randn(4, 96, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        nvfp4_linear(x, make_weight())
    assert saved == []


def test_a_scale_that_would_round_is_not_folded_into_bfloat16() -> None:
    with pytest.raises(ValueError, match="not a power of two"):
        nvfp4_dequantize(make_weight(scale=0.0123), torch.bfloat16)


def test_weight_refuses_scales_that_do_not_fit() -> None:
    good = make_weight()
    with pytest.raises(ValueError, match="one scale a block"):
        NVFP4Weight(good.packed, good.block_scale[:, :-1].contiguous(), 1.0)
    with pytest.raises(ValueError, match="finite and positive"):
        dataclasses.replace(good, tensor_scale=0.0)


def head_case(vocab: int = 50, rows: int = 23) -> tuple[Tensor, Tensor, HeadShard]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, 16, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, 16, generator=generator)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return hidden, targets, HeadShard(weight, 0, vocab, None)


@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprob_entropy_and_gradient_match_full_logits(chunk: int, temperature: float) -> None:
    hidden, targets, head = head_case()
    logprobs, entropy = linear_logprob(hidden, targets, head, temperature=temperature, chunk_rows=chunk)
    upstream = torch.randn(23, generator=torch.Generator().manual_seed(4))
    (logprobs * upstream).sum().backward()
    exact = hidden.detach().double().requires_grad_(True)
    full = torch.log_softmax(exact @ head.weight.double().t() / temperature, dim=-1)
    picked = full.gather(1, targets[:, None]).squeeze(1)
    (picked * upstream.double()).sum().backward()
    assert torch.allclose(logprobs.double(), picked, atol=2e-5)
    assert torch.allclose(entropy.double(), -(full.exp() * full).sum(1), atol=2e-5)
    assert hidden.grad is not None
    assert exact.grad is not None
    assert torch.allclose(hidden.grad.double(), exact.grad, atol=2e-5)


def test_padding_rows_of_the_head_get_no_probability() -> None:
    hidden, targets, head = head_case()
    padded = HeadShard(torch.cat((head.weight, torch.full((6, 16), 9.0))), 0, 50, None)
    assert torch.equal(linear_logprob(hidden, targets, padded)[0], linear_logprob(hidden, targets, head)[0])
    entropy = linear_logprob(hidden, targets, padded)[1]
    assert torch.isfinite(entropy).all()


def test_a_trainable_head_is_refused() -> None:
    hidden, targets, head = head_case()
    with pytest.raises(ValueError, match="must be frozen"):
        linear_logprob(hidden, targets, dataclasses.replace(head, weight=head.weight.requires_grad_(True)))


def test_zero_noise_is_bit_equal_to_no_noise_and_noise_is_added_to_the_scale() -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    gamma = torch.rand(32, generator=torch.Generator().manual_seed(1)) + 0.5
    z = 1e-2 * torch.randn(32, generator=torch.Generator().manual_seed(2))
    assert torch.equal(rms_norm_noise(x, gamma, torch.zeros(32), 1e-6), rms_norm_noise(x, gamma, None, 1e-6))
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * (gamma + z).double()
    # One rounding to bfloat16 at the end: half a unit in the last place.
    assert ((rms_norm_noise(x, gamma, z, 1e-6).double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()


def test_small_noise_survives_in_float32_and_would_not_in_bfloat16() -> None:
    gamma = torch.ones(4096)
    z = 5e-4 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert ((gamma + z) != gamma).float().mean() > 0.99
    assert ((gamma.bfloat16() + z.bfloat16()) != gamma.bfloat16()).float().mean() < 0.01
