"""The operators on a GPU: every path, both directions, graphs, streams, memory. Needs a GPU, fused cases a Hopper.

Tolerance. A result rounded once to BF16 is off by at most 2^-8 of itself; FP32 sums of K products add K 2^-24 of the
sum of the products' magnitudes, twice that with partial sums. Nothing else is allowed, least of all a second rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from te_extensions import (
    LoraPart,
    LoraWeights,
    NVFP4Weight,
    adapter_bank,
    nvfp4_grouped_linear,
    nvfp4_linear,
    nvfp4_lora_linear,
    nvfp4_multi_lora_linear,
    release_workspaces,
)
from te_extensions.workspace import workspace_for
from tests.unit.test_kernels_reference import make_weight, reference

pytestmark = pytest.mark.gpu
SHAPES = [(256, 512), (136, 1088), (768, 2048)]
ROWS = [1, 7, 33, 130, 300]
PATHS = ["reference", "dequantize", "fused", "auto"]
BF16 = 2.0**-8


@pytest.fixture(autouse=True)
def exact_sums() -> Iterator[None]:
    """cuBLAS may otherwise round partial sums to BF16."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    yield
    matmul.allow_bf16_reduced_precision_reduction = before


def needs_hopper(path: str) -> None:
    if path == "fused" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fused kernel needs compute capability 9.0")


def weight_on_gpu(n: int, k: int, seed: int = 0, scale: float | None = None) -> NVFP4Weight:
    weight = make_weight(n, k, seed, scale)
    return NVFP4Weight(weight.packed.cuda(), weight.block_scale.cuda(), weight.tensor_scale)


def exact_matrix(weight: NVFP4Weight) -> Tensor:
    on_cpu = NVFP4Weight(weight.packed.cpu(), weight.block_scale.cpu(), weight.tensor_scale)
    return reference(on_cpu).cuda()


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def assert_rounded_once(got: Tensor, left: Tensor, right: Tensor, allowed: Tensor | float = 0.0) -> None:
    """``got`` is left @ right, to one BF16 rounding and FP32 sums; ``allowed`` is added to the bound."""
    left = left.detach().double()
    want = left @ right
    sums = 2 * left.shape[-1] * 2.0**-24 * (left.abs() @ right.abs())
    excess = (got.detach().double() - want).abs() - BF16 * want.abs() - sums - allowed
    assert got.dtype == torch.bfloat16
    assert float(excess.max()) <= 0.0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [None, 0.0123])
def test_forward_and_backward_of_every_path(path: str, shape: tuple[int, int], scale: float | None) -> None:
    needs_hopper(path)
    weight = weight_on_gpu(*shape, scale=scale)
    exact = exact_matrix(weight)
    for rows in ROWS:
        x = draw(rows, shape[1], seed=rows).requires_grad_()
        y = nvfp4_linear(x, weight, path=path)
        grad = draw(rows, shape[0], seed=rows + 1)
        y.backward(grad)
        assert_rounded_once(y, x, exact.t())
        assert x.grad is not None
        assert_rounded_once(x.grad, grad, exact)


def test_the_tolerance_notices_a_second_rounding() -> None:
    # Short sums, whose FP32 error cannot hide a rounding.
    weight = weight_on_gpu(768, 256, scale=0.0123)
    x = draw(300, 256, seed=1)
    once = nvfp4_linear(x, weight, path="dequantize")
    unscaled = NVFP4Weight(weight.packed, weight.block_scale, 1.0)
    twice = nvfp4_linear(x, unscaled, path="dequantize") * weight.tensor_scale
    assert_rounded_once(once, x, exact_matrix(weight).t())
    with pytest.raises(AssertionError):
        assert_rounded_once(twice, x, exact_matrix(weight).t())


def test_float32_takes_the_decoded_path() -> None:
    weight = weight_on_gpu(256, 512, scale=0.0123)
    x = draw(7, 512, seed=1, dtype=torch.float32).requires_grad_()
    y = nvfp4_linear(x, weight)
    y.sum().backward()
    torch.testing.assert_close(y.double(), x.detach().double() @ exact_matrix(weight).t(), rtol=1e-4, atol=1e-4)
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0].double(), exact_matrix(weight).sum(0), rtol=1e-4, atol=1e-4)


def test_operators_pass_opcheck() -> None:
    weight = weight_on_gpu(256, 512)
    bits = weight.block_scale.view(torch.uint8)
    ops = torch.ops.te_extensions
    x, grad = draw(8, 512, seed=1).requires_grad_(), draw(8, 256, seed=2)
    u, b, a = draw(8, 16, seed=3).requires_grad_(), draw(256, 16, seed=4).requires_grad_(), draw(16, 512, seed=5)
    packed, scale = weight.packed, weight.tensor_scale
    torch.library.opcheck(ops.nvfp4_linear.default, (x, packed, bits, scale, "dequantize"))
    torch.library.opcheck(ops.nvfp4_linear.default, (x.detach(), packed, bits, scale, "auto"))
    torch.library.opcheck(ops.nvfp4_linear_dgrad.default, (grad, packed, bits, scale, "auto"))
    torch.library.opcheck(ops.nvfp4_linear_update.default, (x, u, b, packed, bits, scale, "dequantize"))
    args = (grad, u.detach(), a, packed, bits, scale, "auto")
    torch.library.opcheck(ops.nvfp4_linear_dgrad_update.default, args)
    lora = (x, a.requires_grad_(), b, packed, bits, scale, 0.5, "dequantize")
    torch.library.opcheck(ops.nvfp4_lora_linear.default, lora)


def lora_for(n: int, k: int, rank: int, scale: float) -> LoraWeights:
    """q, k, v in two groups, k without an adapter."""
    parts = (LoraPart(n // 2), LoraPart(n // 4, False), LoraPart(n // 4))
    a, b = draw(2 * rank, k, seed=11) * k**-0.5, draw(3 * n // 4, rank, seed=12) * 0.05
    return LoraWeights(a.requires_grad_(), b.requires_grad_(), parts, scale, groups=2)


@pytest.mark.parametrize("path", ["dequantize", "fused", "auto"])
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("rows", [1, 33, 300])
@pytest.mark.parametrize("prepared", [False, True])
def test_lora(path: str, rank: int, rows: int, prepared: bool) -> None:
    needs_hopper(path)
    n, k = 768, 2048
    weight, lora = weight_on_gpu(n, k, scale=0.0123), lora_for(n, k, rank, 0.3)
    x = draw(rows, k, seed=1).requires_grad_()
    y = nvfp4_lora_linear(x, weight, lora.prepared() if prepared else lora, path=path)
    wide = lora.wide_b().detach().double()
    down = lora.a.detach().double().t() * lora.scale
    u = x.detach().double() @ down
    # u is rounded to BF16, and so is u B^T where it is the addend of a GEMM.
    allowed = 2 * BF16 * (u.abs() @ wide.abs().t()) + 2.0**-20
    full = exact_matrix(weight).t() + down @ wide.t()
    # Seen on an H200: with an addend cuBLAS rounds the product before it adds, so there one rounding more is allowed.
    if path != "fused":
        allowed = allowed + BF16 * (x.detach().double() @ exact_matrix(weight).t()).abs()
    assert_rounded_once(y, x, full, allowed)
    grad = draw(rows, n, seed=2)
    y.backward(grad)
    assert x.grad is not None
    v = (grad.double() @ wide).abs() @ down.abs().t()
    product = (grad.double() @ exact_matrix(weight)).abs()
    assert_rounded_once(x.grad, grad, full.t(), BF16 * product + 2 * BF16 * v + 2.0**-20)
    if not prepared:
        exact_a = (lora.scale * grad.double() @ wide).t() @ x.detach().double()
        assert lora.a.grad is not None
        assert float((lora.a.grad.double() - exact_a).norm() / exact_a.norm()) < 2 * BF16
        exact_b = torch.autograd.grad(lora.wide_b(), lora.b, (grad.double().t() @ u).bfloat16())[0].double()
        assert lora.b.grad is not None
        assert float((lora.b.grad.double() - exact_b).norm() / exact_b.norm()) < 2 * BF16


@pytest.mark.parametrize("path", ["dequantize", "fused"])
@pytest.mark.parametrize("rank", [8, 32])
def test_each_row_gets_its_own_adapter(path: str, rank: int) -> None:
    needs_hopper(path)
    n, k, slots, rows = 256, 512, 3, 9
    weight, x = weight_on_gpu(n, k), draw(rows, k, seed=1)
    a = draw(slots, rank, k, seed=2) * k**-0.5
    b = adapter_bank(slots, n, rank, dtype=torch.bfloat16, device=x.device).copy_(draw(slots, n, rank, seed=3))
    scale = torch.tensor([0.3, 2.0, 0.7], device="cuda")
    index = torch.tensor([2, -1, 0, 1, 1, -1, 2, 0, 0], dtype=torch.int32, device="cuda")
    y = nvfp4_multi_lora_linear(x, weight, a, b, scale, index, path=path)
    for row, adapter in enumerate(index.tolist()):
        matrix, allowed = exact_matrix(weight), 0.0
        if adapter >= 0:
            u = scale[adapter].double() * (a[adapter].double() @ x[row].double())
            matrix = matrix + scale[adapter].double() * (b[adapter].double() @ a[adapter].double())
            # A x is rounded, scaled and rounded again; and u B^T may be.
            allowed = 3 * BF16 * (b[adapter].double().abs() @ u.abs())[None] + 2.0**-20
        assert_rounded_once(y[row : row + 1], x[row : row + 1], matrix.t(), allowed)


def captured(call: object) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # type: ignore[operator]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()  # type: ignore[operator]
    return graph, y


@pytest.mark.parametrize("path", ["dequantize", "fused"])
def test_a_captured_product_follows_its_inputs_and_its_weight(path: str) -> None:
    needs_hopper(path)
    first, second = weight_on_gpu(256, 512), weight_on_gpu(512, 256, seed=5, scale=0.0123)
    x = draw(16, 512, seed=1)
    graph, y = captured(lambda: nvfp4_linear(nvfp4_linear(x, first, path=path), second, path=path))
    for round_ in range(3):
        x.copy_(draw(16, 512, seed=10 + round_))
        if round_ == 2:
            first.packed.bitwise_xor_(0x11)
        # Eager work between replays: neither may disturb the other's buffer.
        nvfp4_linear(draw(4, 256, seed=3), second, path="dequantize")
        graph.replay()
        want = nvfp4_linear(nvfp4_linear(x, first, path=path), second, path=path)
        # cuBLAS may choose another algorithm under capture; a stale W would be off by the size of y.
        torch.testing.assert_close(y, want, rtol=2**-6, atol=2e-2)


def test_an_eager_gradient_does_not_believe_in_a_captured_decode() -> None:
    weight, other = weight_on_gpu(256, 512), weight_on_gpu(256, 512, seed=1)
    x = draw(16, 512, seed=1).requires_grad_()
    nvfp4_linear(x.detach(), other, path="dequantize")
    captured(lambda: nvfp4_linear(x.detach(), weight, path="dequantize"))
    grad = draw(16, 256, seed=2)
    nvfp4_linear(x, weight, path="fused" if torch.cuda.get_device_capability() == (9, 0) else "reference").backward(
        grad
    )
    assert x.grad is not None
    assert_rounded_once(x.grad, grad, exact_matrix(weight))


def test_streams_do_not_share_a_buffer() -> None:
    weights = [weight_on_gpu(768, 2048, seed=s) for s in range(2)]
    x = draw(64, 2048, seed=1)
    streams = [torch.cuda.Stream() for _ in weights]
    torch.cuda.synchronize()
    outputs: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for stream, weight, found in zip(streams, weights, outputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(nvfp4_linear(x, weight, path="dequantize"))
    torch.cuda.synchronize()
    for weight, found in zip(weights, outputs, strict=True):
        want = nvfp4_linear(x, weight, path="reference")
        assert all(torch.equal(y, found[0]) for y in found)
        assert_rounded_once(found[0], x, exact_matrix(weight).t())
        assert torch.allclose(found[0].float(), want.float(), rtol=2**-7, atol=1e-3)


def random_weight(n: int, k: int) -> NVFP4Weight:
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    return NVFP4Weight(packed, torch.rand(n, k // 16, device="cuda").to(torch.float8_e4m3fn), 2.0**-8)


def test_forward_and_backward_of_stacked_layers_hold_one_decoded_matrix() -> None:
    size = 4096
    weights = [random_weight(size, size) for _ in range(4)]

    def step() -> None:
        x = y = draw(16, size, seed=1).requires_grad_()
        for weight in weights:
            y = nvfp4_linear(y, weight, path="dequantize").sin()
        y.sum().backward()
        assert x.grad is not None

    step()
    release_workspaces()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    step()
    matrix_bytes = size * size * 2
    used = torch.cuda.max_memory_allocated() - base
    # Activations of 16 rows are 128 KiB each.
    assert matrix_bytes <= used < matrix_bytes + (8 << 20)
    assert workspace_for(torch.device("cuda")).nbytes == matrix_bytes


def test_recomputation_decodes_once_for_forward_and_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    weight, space = weight_on_gpu(512, 512), workspace_for(torch.device("cuda"))
    x = draw(16, 512, seed=1).requires_grad_()
    y = checkpoint(lambda x: nvfp4_linear(x, weight, path="dequantize").sin(), x, use_reentrant=False)
    decodes, hits = space.decodes, space.hits
    y.backward(torch.ones_like(y))
    assert (space.decodes - decodes, space.hits - hits) == (1, 1)
    assert x.grad is not None
    cosine = torch.cos(nvfp4_linear(x.detach(), weight, path="dequantize"))
    assert_rounded_once(x.grad, cosine, exact_matrix(weight))


COUNTS = [[3, 0, 130, 7], [0, 0, 5, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("path", ["dequantize", "fused", "auto"])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("scale", [None, 0.0123])
def test_experts(path: str, counts: list[int], where: str, scale: float | None) -> None:
    needs_hopper(path)
    n, k = 256, 512
    experts = [weight_on_gpu(n, k, seed=e, scale=scale) for e in range(4)]
    scales = [w.tensor_scale * 2**e for e, w in enumerate(experts)]
    packed, block_scale = torch.stack([w.packed for w in experts]), torch.stack([w.block_scale for w in experts])
    total = sum(counts)
    x = draw(total, k, seed=1).requires_grad_()
    y = nvfp4_grouped_linear(x, torch.tensor(counts, device=where), packed, block_scale, scales, path=path)
    grad = draw(total, n, seed=2)
    y.backward(grad)
    assert y.shape == (total, n)
    assert x.grad is not None
    begin = 0
    for expert, count in enumerate(counts):
        rows = slice(begin, begin + count)
        begin += count
        if count:
            exact = exact_matrix(experts[expert]) * 2**expert
            assert_rounded_once(y[rows], x[rows], exact.t())
            assert_rounded_once(x.grad[rows], grad[rows], exact)


def test_experts_in_a_graph_follow_the_counts() -> None:
    n, k = 256, 512
    experts = [weight_on_gpu(n, k, seed=e) for e in range(4)]
    scales = [w.tensor_scale for w in experts]
    packed, block_scale = torch.stack([w.packed for w in experts]), torch.stack([w.block_scale for w in experts])
    x, counts = draw(16, k, seed=1), torch.tensor([4, 4, 4, 4], device="cuda")

    def call() -> Tensor:
        return nvfp4_grouped_linear(x, counts, packed, block_scale, scales, path="dequantize")

    graph, y = captured(call)
    counts.copy_(torch.tensor([0, 9, 7, 0]))
    graph.replay()
    assert_rounded_once(y[:9], x[:9], exact_matrix(experts[1]).t())
    assert_rounded_once(y[9:], x[9:], exact_matrix(experts[2]).t())


def test_humming_by_name_when_it_is_installed() -> None:
    pytest.importorskip("humming", reason="humming-kernels is an optional package")
    weight, x = weight_on_gpu(256, 512), draw(16, 512, seed=1).requires_grad_()
    y = nvfp4_linear(x, weight, path="humming")
    y.sum().backward()
    assert_rounded_once(y, x, exact_matrix(weight).t())
