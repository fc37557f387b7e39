"""The Triton dequantisation on a GPU: bit for bit the table's result. Speed is in benchmarks/kernels_memory.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_extensions.dequantize import nvfp4_dequantize, nvfp4_dequantize_stack
from te_extensions.weight import NVFP4Weight
from tests.unit.te_nvfp4_samples import assert_same_bits, every_code_and_scale, random_codes

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float32)


def on_cpu(weight: NVFP4Weight, dtype: torch.dtype) -> Tensor:
    moved = NVFP4Weight(weight.packed.cpu(), weight.block_scale.cpu(), weight.tensor_scale)
    return nvfp4_dequantize(moved, dtype)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**116, 2.0**-123])
def test_every_code_and_scale(dtype: torch.dtype, scale: float) -> None:
    weight = every_code_and_scale(scale, "cuda")
    out = nvfp4_dequantize(weight, dtype, out=poisoned(weight.shape, dtype))
    assert_same_bits(out.cpu(), on_cpu(weight, dtype))


def test_a_scale_that_is_no_power_of_two_in_float32() -> None:
    weight = random_codes(64, 640, seed=3, device="cuda", tensor_scale=0.0123)
    assert_same_bits(nvfp4_dequantize(weight, torch.float32).cpu(), on_cpu(weight, torch.float32))
    plain = nvfp4_dequantize(weight, torch.bfloat16, apply_tensor_scale=False)
    unscaled = NVFP4Weight(weight.packed, weight.block_scale, 1.0)
    assert_same_bits(plain.cpu(), on_cpu(unscaled, torch.bfloat16))


@pytest.mark.parametrize(
    ("rows", "cols"),
    [(1, 16), (3, 96), (129, 448), (1000, 640), (4608, 3584), (3584, 2368), (5120, 3456), (1536, 2048), (2048, 768)],
)
def test_shapes_of_layers_and_of_their_slices(rows: int, cols: int) -> None:
    weight = random_codes(rows, cols, seed=cols, device="cuda")
    for dtype in DTYPES:
        out = nvfp4_dequantize(weight, dtype, out=poisoned(weight.shape, dtype))
        assert_same_bits(out.cpu(), on_cpu(weight, dtype))


@pytest.mark.parametrize("rows", [slice(3, 61), slice(None)])
@pytest.mark.parametrize("blocks", [slice(1, 4), slice(28, 56), slice(55, 56)])
def test_slices_of_a_larger_tensor(rows: slice, blocks: slice) -> None:
    whole = random_codes(64, 896, seed=1, device="cuda")
    packed = whole.packed[rows, 8 * blocks.start : 8 * blocks.stop]
    view = NVFP4Weight(packed, whole.block_scale[rows, blocks], 0.5)
    for dtype in DTYPES:
        assert_same_bits(nvfp4_dequantize(view, dtype).cpu(), on_cpu(view, dtype))


def test_a_nan_scale_makes_its_block_nan() -> None:
    weight = random_codes(4, 64, seed=0, device="cuda")
    weight.block_scale.view(torch.uint8)[1, 2] = 0x7F
    for dtype in DTYPES:
        bad = nvfp4_dequantize(weight, dtype).isnan()
        assert bad[1, 32:48].all()
        assert bad.sum() == 16


def test_more_elements_than_32_bits_can_count() -> None:
    rows, cols = 2**17 + 8, 2**14
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free GPU memory for a matrix of more than 2^31 weights")
    weight = random_codes(rows, cols, seed=5, device="cuda")
    out = nvfp4_dequantize(weight, torch.bfloat16)
    for begin in (0, 2**16, rows - 8):
        part = NVFP4Weight(weight.packed[begin : begin + 8], weight.block_scale[begin : begin + 8], weight.tensor_scale)
        assert_same_bits(out[begin : begin + 8].cpu(), on_cpu(part, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stack_of_experts_in_one_launch(dtype: torch.dtype) -> None:
    parts = [random_codes(48, 96, seed=i, tensor_scale=2.0 ** (i - 4)) for i in range(6)]
    packed = torch.stack([p.packed for p in parts]).cuda()
    scales = torch.stack([p.block_scale.view(torch.uint8) for p in parts]).cuda().view(torch.float8_e4m3fn)
    tensor = torch.tensor([p.tensor_scale for p in parts], device="cuda")
    out = nvfp4_dequantize_stack(packed, scales, tensor, dtype, out=poisoned((6, 48, 96), dtype))
    for found, part in zip(out.cpu(), parts, strict=True):
        assert_same_bits(found, nvfp4_dequantize(part, dtype))
    if dtype == torch.bfloat16:
        tensor[4] = 0.3
        bad = nvfp4_dequantize_stack(packed, scales, tensor, dtype).isnan()
        assert bad[4].all()
        assert not bad[:4].any()


def test_a_captured_graph_follows_the_bytes() -> None:
    weight, other = (random_codes(256, 512, seed=i, device="cuda") for i in (0, 1))
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device="cuda")
    nvfp4_dequantize(weight, torch.bfloat16, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        nvfp4_dequantize(weight, torch.bfloat16, out=out)
    weight.packed.copy_(other.packed)
    weight.block_scale.copy_(other.block_scale)
    graph.replay()
    assert_same_bits(out.cpu(), on_cpu(other, torch.bfloat16))
