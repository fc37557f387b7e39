"""The Triton dequantisation against the table, under Triton's interpreter; run by test_te_dequantize.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_extensions.dequantize import nvfp4_dequantize, nvfp4_dequantize_stack
from te_extensions.dequantize_triton import launch_matrix, launch_stack
from te_extensions.weight import NVFP4Weight
from tests.unit.te_interpreter import repair_interpreter
from tests.unit.te_nvfp4_samples import assert_same_bits, every_code_and_scale, random_codes

repair_interpreter()
DTYPES = (torch.bfloat16, torch.float32)


def decoded(weight: NVFP4Weight, dtype: torch.dtype, tile: int = 64) -> Tensor:
    out = torch.full(weight.shape, 7.0, dtype=dtype)
    launch_matrix(weight.packed, weight.block_scale, weight.tensor_scale, out, tile=tile)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**116, 2.0**-123])
def test_every_code_and_scale(dtype: torch.dtype, scale: float) -> None:
    weight = every_code_and_scale(scale)
    assert_same_bits(decoded(weight, dtype, tile=2048), nvfp4_dequantize(weight, dtype))


def test_a_nan_scale_makes_its_block_nan_and_no_other() -> None:
    weight = random_codes(4, 64, seed=0)
    weight.block_scale.view(torch.uint8)[1, 2] = 0x7F
    weight.block_scale.view(torch.uint8)[3, 0] = 0xFF
    for dtype in DTYPES:
        out = decoded(weight, dtype)
        bad = out.isnan()
        assert bad[1, 32:48].all()
        assert bad[3, :16].all()
        assert bad.sum() == 32


@pytest.mark.parametrize(("rows", "cols"), [(1, 16), (3, 96), (5, 448), (33, 640), (7, 1040)])
def test_shapes_that_do_not_fill_a_tile(rows: int, cols: int) -> None:
    weight = random_codes(rows, cols, seed=rows)
    for dtype in DTYPES:
        assert_same_bits(decoded(weight, dtype), nvfp4_dequantize(weight, dtype))


@pytest.mark.parametrize("rows", [slice(1, 5), slice(None)])
@pytest.mark.parametrize("blocks", [slice(1, 4), slice(0, 6), slice(6, 7)])
def test_slices_of_a_larger_tensor(rows: slice, blocks: slice) -> None:
    whole = random_codes(9, 112, seed=1)
    packed = whole.packed[rows, 8 * blocks.start : 8 * blocks.stop]
    view = NVFP4Weight(packed, whole.block_scale[rows, blocks], 0.5)
    for dtype in DTYPES:
        assert_same_bits(decoded(view, dtype), nvfp4_dequantize(view, dtype))


def test_a_slice_inside_a_word_is_refused() -> None:
    whole = random_codes(4, 64, seed=2)
    scales = whole.block_scale[:, :2].contiguous()
    with pytest.raises(ValueError, match="multiples of 4"):
        launch_matrix(whole.packed[:, 2:18], scales, 1.0, torch.empty(4, 32))
    with pytest.raises(ValueError, match="contiguous along K"):
        launch_matrix(whole.packed[:, ::2], scales, 1.0, torch.empty(4, 32))


def stack(count: int = 3) -> tuple[Tensor, Tensor]:
    parts = [random_codes(5, 96, seed=i) for i in range(count)]
    return torch.stack([p.packed for p in parts]), torch.stack([p.block_scale.view(torch.uint8) for p in parts]).view(
        torch.float8_e4m3fn
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [None, (1.0, 2.0**-9, 2.0**30)])
def test_a_stack_of_experts(dtype: torch.dtype, scales: tuple[float, ...] | None) -> None:
    packed, block_scale = stack()
    tensor = None if scales is None else torch.tensor(scales)
    out = torch.full((3, 5, 96), 7.0, dtype=dtype)
    launch_stack(packed, block_scale, tensor, out)
    assert_same_bits(out, nvfp4_dequantize_stack(packed, block_scale, tensor, dtype))


def test_an_expert_scale_that_would_round_makes_its_matrix_nan() -> None:
    packed, block_scale = stack(5)
    scales = torch.tensor([1.0, 0.3, 2.0**117, 2.0**-124, -1.0])
    out = torch.zeros(5, 5, 96, dtype=torch.bfloat16)
    launch_stack(packed, block_scale, scales, out)
    assert not out[0].isnan().any()
    assert out[1:].isnan().all()
