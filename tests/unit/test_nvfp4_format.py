"""The NVFP4 reference arithmetic, against the format's definition written out by hand."""

from __future__ import annotations

import pytest
import torch

from megatron_qerl.nvfp4.format import (
    PackedWeight,
    block_scales_of,
    code_values,
    decode,
    encode,
    is_power_of_two,
    pack,
    power_of_two_tensor_scale,
    quantize_blocks,
    unpack,
)

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def gaussian(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def test_sixteen_codes_stand_for_the_sixteen_values() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert code_values(codes).tolist() == VALUES


@pytest.mark.parametrize(
    ("value", "rounded"), [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
)
def test_a_tie_goes_to_the_even_code(value: float, rounded: float) -> None:
    both = code_values(encode(torch.tensor([value, -value])))
    assert both.abs().tolist() == [rounded, rounded]
    assert (encode(torch.tensor([value])) % 2).item() == 0


def test_encode_picks_the_nearest_value_everywhere() -> None:
    x = torch.linspace(-7.0, 7.0, 20_001, dtype=torch.float64)
    grid = torch.tensor(sorted(set(VALUES)), dtype=torch.float64)
    nearest = (x.unsqueeze(1) - grid).abs().min(dim=1).values
    assert torch.equal((x - code_values(encode(x), torch.float64)).abs(), nearest)


def test_encode_saturates_and_keeps_the_sign_of_what_rounds_to_zero() -> None:
    assert encode(torch.tensor([100.0, -100.0, 0.1, -0.1, 0.0, -0.0])).tolist() == [7, 15, 0, 8, 0, 0]


def test_the_even_k_is_in_the_low_nibble() -> None:
    codes = torch.tensor([[0x1, 0x2, 0xF, 0x8]], dtype=torch.uint8)
    assert pack(codes).tolist() == [[0x21, 0x8F]]


def test_unpack_inverts_pack_for_every_byte() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(8, 32)
    assert torch.equal(pack(unpack(packed)), packed)


def test_decode_multiplies_code_block_scale_and_tensor_scale() -> None:
    codes = torch.arange(32, dtype=torch.uint8).remainder(16).view(1, 32)
    block_scale = torch.tensor([[2.0, 0.5]]).to(torch.float8_e4m3fn)
    weight = decode(pack(codes), block_scale, torch.tensor(0.25), torch.float32)
    assert weight[0, :16].tolist() == [v * 2.0 * 0.25 for v in VALUES]
    assert weight[0, 16:].tolist() == [v * 0.5 * 0.25 for v in VALUES]


@pytest.mark.parametrize("exponent", [-40, -11, 0, 7])
def test_tensor_scale_is_the_smallest_power_of_two_that_fits(exponent: int) -> None:
    amax = 2688.0 * 2.0**exponent
    assert power_of_two_tensor_scale(amax) == 2.0**exponent
    assert power_of_two_tensor_scale(amax * 1.0001) == 2.0 ** (exponent + 1)
    assert power_of_two_tensor_scale(amax * 0.9999) == 2.0**exponent


def test_tensor_scale_of_nothing_is_one_and_of_tiny_weights_is_a_normal_number() -> None:
    assert power_of_two_tensor_scale(0.0) == 1.0
    assert power_of_two_tensor_scale(1e-40) == torch.finfo(torch.float32).smallest_normal


def test_power_of_two_is_recognised() -> None:
    assert all(is_power_of_two(2.0**e) for e in (-126, -11, 0, 5))
    assert not any(is_power_of_two(x) for x in (0.0, -2.0, 3.0, 1.0000001))


def test_block_scales_stay_between_the_smallest_normal_and_the_largest_number() -> None:
    amax = torch.tensor([0.0, 1e-9, 6 * 2.0**-7, 6 * 2.0**-6, 6.0, 2688.0])
    scales = block_scales_of(amax, 1.0).float().tolist()
    assert scales == [1.0, 2.0**-6, 2.0**-6, 2.0**-6, 1.0, 448.0]


def test_quantisation_moves_a_weight_by_at_most_one_block_scale() -> None:
    weight = gaussian(64, 256) * torch.logspace(-5, 2, 64).unsqueeze(1)
    packed = quantize_blocks(weight, power_of_two_tensor_scale(float(weight.abs().max())))
    error = (packed.decode(torch.float64) - weight.double()).abs().view(64, 16, 16)
    assert (error <= packed.block_scale.double().unsqueeze(-1) * float(packed.tensor_scale)).all()
    assert packed.block_scale.float().min() == 2.0**-6, "the quietest rows must have met the limit"


def test_gaussian_weights_keep_the_relative_error_of_the_format() -> None:
    weight = gaussian(256, 512)
    packed = quantize_blocks(weight, power_of_two_tensor_scale(float(weight.abs().max())))
    relative = float((packed.decode(torch.float32) - weight).norm() / weight.norm())
    assert 0.093 < relative < 0.097  # 0.0951 with a scale that is not a power of two, so nothing is lost


def test_power_of_two_scale_makes_bf16_weights_exact_and_another_does_not() -> None:
    packed = quantize_blocks(gaussian(32, 256), 2.0**-9)
    assert torch.equal(packed.decode(torch.bfloat16).double(), packed.decode(torch.float64))
    odd = PackedWeight(packed.packed, packed.block_scale, torch.tensor(0.0019, dtype=torch.float32))
    rounded = odd.decode(torch.bfloat16).double() != odd.decode(torch.float64)
    assert rounded.double().mean() > 0.7


def test_size_is_nine_sixteenths_of_a_byte_a_weight() -> None:
    assert quantize_blocks(gaussian(8, 64), 1.0).size_bytes == 8 * 64 * 9 // 16 + 4
