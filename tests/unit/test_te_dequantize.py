"""Dequantisation: the table's options, and the Triton kernel under the interpreter."""

from __future__ import annotations

import pytest
import torch

from te_extensions.dequantize import foldable, nvfp4_dequantize, nvfp4_dequantize_stack
from te_extensions.weight import NVFP4Weight
from tests.unit.te_interpreter import run_cases
from tests.unit.te_nvfp4_samples import assert_same_bits, every_code_and_scale, random_codes


def test_triton_kernel_under_the_interpreter() -> None:
    run_cases("te_dequantize_cases.py")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 2.0**-123, 2.0**116])
def test_the_table_is_exact_to_the_ends_of_the_foldable_range(dtype: torch.dtype, scale: float) -> None:
    weight = every_code_and_scale(scale)
    exact = nvfp4_dequantize(every_code_and_scale(), torch.float64) * scale
    assert_same_bits(nvfp4_dequantize(weight, dtype).double(), exact)


@pytest.mark.parametrize("scale", [2.0**-124, 2.0**117])
def test_one_step_outside_the_foldable_range_bfloat16_is_not_exact(scale: float) -> None:
    weight = every_code_and_scale()
    exact = nvfp4_dequantize(weight, torch.float64) * scale
    assert not torch.equal(exact.bfloat16().double(), exact)
    assert not foldable(scale)
    with pytest.raises(ValueError, match="not a power of two between"):
        nvfp4_dequantize(NVFP4Weight(weight.packed, weight.block_scale, scale), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_out_is_filled_and_returned(dtype: torch.dtype) -> None:
    weight = random_codes(5, 96, seed=0)
    out = torch.full(weight.shape, float("nan"), dtype=dtype)
    assert nvfp4_dequantize(weight, dtype, out=out) is out
    assert_same_bits(out, nvfp4_dequantize(weight, dtype))


def test_out_that_does_not_fit_is_refused() -> None:
    weight = random_codes(4, 64, seed=0)
    for out in (
        torch.empty(4, 32, dtype=torch.bfloat16),
        torch.empty(4, 64),
        torch.empty(64, 4, dtype=torch.bfloat16).t(),
        torch.empty(4, 64, dtype=torch.bfloat16, device="meta"),
    ):
        with pytest.raises(ValueError, match="needed a contiguous"):
            nvfp4_dequantize(weight, torch.bfloat16, out=out)
    with pytest.raises(ValueError, match=r"dtype = torch\.float16"):
        nvfp4_dequantize(weight, torch.float16)


def test_column_slices_are_decoded_in_place() -> None:
    whole = random_codes(6, 128, seed=0)
    part = NVFP4Weight(whole.packed[:, 16:48], whole.block_scale[:, 2:6], whole.tensor_scale)
    assert_same_bits(nvfp4_dequantize(part, torch.bfloat16), nvfp4_dequantize(whole, torch.bfloat16)[:, 32:96])


def test_a_stack_is_its_matrices() -> None:
    parts = [random_codes(3, 64, seed=i, tensor_scale=2.0**-i) for i in range(4)]
    packed = torch.stack([p.packed for p in parts])
    scales = torch.stack([p.block_scale.view(torch.uint8) for p in parts]).view(torch.float8_e4m3fn)
    tensor = torch.tensor([p.tensor_scale for p in parts])
    out = torch.empty(4, 3, 64, dtype=torch.bfloat16)
    assert nvfp4_dequantize_stack(packed, scales, tensor, torch.bfloat16, out) is out
    for found, part in zip(out, parts, strict=True):
        assert_same_bits(found, nvfp4_dequantize(part, torch.bfloat16))
    plain = nvfp4_dequantize_stack(packed, scales, None, torch.bfloat16)
    assert_same_bits(plain[2], nvfp4_dequantize(parts[2], torch.bfloat16, apply_tensor_scale=False))


def test_a_stack_that_does_not_fit_is_refused() -> None:
    part = random_codes(4, 64, seed=0)
    packed, scales = part.packed.repeat(2, 1, 1), part.block_scale.repeat(2, 1, 1)
    with pytest.raises(ValueError, match=r"tensor_scales\[1\] = 0\.30"):
        nvfp4_dequantize_stack(packed, scales, torch.tensor([1.0, 0.3]), torch.bfloat16)
    with pytest.raises(ValueError, match=r"needed \(2,\) float32"):
        nvfp4_dequantize_stack(packed, scales, torch.tensor([1.0]), torch.bfloat16)
    with pytest.raises(ValueError, match="one scale a block"):
        nvfp4_dequantize_stack(packed, scales[:, :, :2], None, torch.bfloat16)
    with pytest.raises(ValueError, match="must be contiguous"):
        nvfp4_dequantize_stack(packed[:, :2], scales[:, :2], None, torch.bfloat16)
