"""The fused Hopper kernel: right for every shape, bit for bit the same in every batch. Needs compute capability 9.0.

Cases run in loops inside one test a property, and a failure names its cases: starting a test costs more than a case.
The bounds and the float64 reference are those of ``benchmarks.kernels_proof``, which derives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.kernels_proof import Difference, Poison, Reference, decode, difference, random_weight
from te_extensions.fused import FusedAdapter, FusedLora, fused_linear, fused_refusal
from te_extensions.weight import NVFP4Weight

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the fused kernel is built for compute capability 9.0 (Hopper)",
    ),
]

# 4608 fills its tiles of 128 or 256 rows, 640 leaves half of one of 256; 1000 and 77 are no multiples of 64, 77 is odd.
N_VALUES = (4608, 1000, 640, 77)
# From less than one K-tile to many; 64, 448 and 640 divided by 128 leave or do not leave half a tile.
K_VALUES = (64, 448, 640, 3584, 5120)
# The edges of the token tiles, and batches between them.
M_VALUES = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 100, 128, 129, 200, 256, 300, 1000)
# Enough weights for tiles of 256 rows, with and without whole boxes of block scales.
LARGE = ((20480, 3584), (20000, 3456), (5120, 13824))
#: Up to here all batches sum in one order; above it in others (``te_extensions.fused``).
ONE_ORDER_ROWS = 64
#: Up to here a batch is one token tile.
ONE_TILE_ROWS = 256


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(0)


def inputs(rows: int, features: int, generator: torch.Generator) -> Tensor:
    return torch.randn((rows, features), generator=generator, device=DEVICE).bfloat16()


@contextmanager
def case(name: str) -> Iterator[None]:
    """Say which case it was when a call raises: after a CUDA error nothing else in the process works."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in case {name}")
        raise


def faults(found: Sequence[tuple[str, Difference]]) -> list[str]:
    return [f"{name}: {d.fault}" for name, d in found if d.fault is not None]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal including the sign of zeros, and NaN never is."""
    return bool(torch.equal(a.view(torch.int16), b.view(torch.int16))) and not bool(a.isnan().any())


def test_every_shape_is_right_in_poisoned_memory(generator: torch.Generator) -> None:
    poison, found, reached = Poison(DEVICE), [], 0
    for n, k in (*((n, k) for n in N_VALUES for k in K_VALUES), *LARGE):
        weight = random_weight(n, k, generator)
        x = inputs(max(M_VALUES), k, generator)
        reference = Reference(x, decode(weight), generator)
        for m in M_VALUES:
            name = f"N={n} K={k} M={m}"
            with case(name):
                poison.spread(2 * m * n)
                y = fused_linear(x[:m], weight)
                assert (y.shape, y.dtype) == ((m, n), torch.bfloat16)
                found.append((name, reference.check(y)))
                reached += poison.reached(y)
    assert faults(found) == []
    assert reached > 0, "no output came from poisoned memory, so this test has shown less than it says"


def test_wrong_weights_are_noticed(generator: torch.Generator) -> None:
    """The comparison above can fail."""
    from benchmarks.kernels_proof import corrupted

    weight = random_weight(1000, 640, generator)
    for m in (1, 33, 300):
        x = inputs(m, 640, generator)
        reference = x.double() @ decode(weight).t()
        for name, wrong in corrupted(weight).items():
            assert difference(fused_linear(x, wrong), reference).fault is not None, (name, m)


@pytest.mark.parametrize(
    "batches",
    [tuple(m for m in M_VALUES if m <= ONE_ORDER_ROWS), (65, 96, 100, 128), (129, 180, 200, 256), (257, 300, 512)],
    ids=["up to 64", "65 to 128", "129 to 256", "two token tiles"],
)
def test_a_row_does_not_depend_on_its_batch(batches: tuple[int, ...], generator: torch.Generator) -> None:
    different = []
    for n, k in ((4608, 3584), (1000, 640), (640, 5120), *LARGE):
        weight = random_weight(n, k, generator)
        x = inputs(max(batches), k, generator)
        whole = fused_linear(x, weight)
        for m in batches:
            with case(f"N={n} K={k} M={m}"):
                order = torch.randperm(m, generator=generator, device=DEVICE)
                loud = x[:m].clone()
                loud[1:] = 1e4 * inputs(m - 1, k, generator)
                last = torch.cat((loud[1:], loud[:1]))
                checks = [
                    ("fewer rows", fused_linear(x[:m], weight), whole[:m]),
                    ("other neighbours", fused_linear(loud, weight)[:1], whole[:1]),
                ]
                if max(batches) <= ONE_TILE_ROWS:  # with several token tiles a row's tile decides where its sum is cut
                    checks += [
                        ("other places", fused_linear(x[order], weight), whole[order]),
                        ("last place", fused_linear(last, weight)[-1:], whole[:1]),
                    ]
                for what, y, expected in checks:
                    if not same_bits(y, expected):
                        different.append(f"N={n} K={k} M={m}: {what}")
    assert different == []


def test_repeated_calls_give_the_same_bits(generator: torch.Generator) -> None:
    different = []
    poison = Poison(DEVICE)
    for n, k in ((4608, 5120), (77, 5120)):
        weight = random_weight(n, k, generator)
        for m in (1, 16, 64, 128, 300):
            x = inputs(m, k, generator)
            first = fused_linear(x, weight)
            for turn in range(20):
                poison.spread(2 * m * n)
                if not same_bits(fused_linear(x, weight), first):
                    different.append(f"N={n} K={k} M={m} turn {turn}")
    assert different == []


def test_calls_on_two_streams_do_not_disturb_each_other(generator: torch.Generator) -> None:
    weights = [random_weight(4608, 3584, generator) for _ in range(2)]
    x = inputs(64, 3584, generator)
    expected = [fused_linear(x, weight) for weight in weights]
    streams = [torch.cuda.Stream() for _ in weights]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for stream, weight, into in zip(streams, weights, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(fused_linear(x, weight))
    torch.cuda.synchronize()
    for into, one in zip(results, expected, strict=True):
        assert all(same_bits(y, one) for y in into)


def test_a_captured_graph_replays_with_new_inputs(generator: torch.Generator) -> None:
    n, k = 1000, 3584
    weight = random_weight(n, k, generator)
    b = inputs(n, 32, generator)
    for m in (1, 16, 100, 300):
        x, u = inputs(m, k, generator), inputs(m, 32, generator)
        fused_linear(x, weight, FusedLora(u, b))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plain = fused_linear(x, weight)
            # The second call reuses the first one's freed scratch memory inside the graph.
            adapted = fused_linear(x, weight, FusedLora(u, b))
        for turn in range(5):
            x.copy_(inputs(m, k, generator))
            u.copy_(inputs(m, 32, generator))
            plain.fill_(float("nan"))
            adapted.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(plain, fused_linear(x, weight)), (m, turn)
            assert same_bits(adapted, fused_linear(x, weight, FusedLora(u, b))), (m, turn)


def test_lora_is_added_before_the_one_rounding(generator: torch.Generator) -> None:
    found, different = [], []
    for n, k in ((4608, 3584), (1000, 640), (77, 64)):
        weight = random_weight(n, k, generator)
        x_all = inputs(max(M_VALUES), k, generator)
        base = x_all.double() @ decode(weight).t()
        # Adapter and base of one size, so that an error in either shows.
        size = float(base.square().mean().sqrt())
        for rank in (16, 32, 64, 96, 256):
            b = (inputs(n, rank, generator) * (size / rank**0.5)).bfloat16()
            u_all = inputs(max(M_VALUES), rank, generator)
            # Rows without an adapter, and columns of an adapter that does not apply.
            u_all[::3] = 0.0
            u_all[1::3, rank // 2 :] = 0.0
            for m in (1, 8, 17, 64, 128, 129, 300):
                name = f"N={n} K={k} R={rank} M={m}"
                with case(name):
                    x, u = x_all[:m], u_all[:m]
                    y = fused_linear(x, weight, FusedLora(u, b))
                    found.append((name, difference(y, base[:m] + u.double() @ b.double().t())))
                    if not same_bits(y[::3] + 0.0, fused_linear(x, weight)[::3] + 0.0):
                        different.append(name)
    assert faults(found) == []
    assert different == [], "a row whose u is zero must have the bits of the base"


def test_a_whole_adapter_is_projected_in_the_launch(generator: torch.Generator) -> None:
    """u = s x A^T comes out as torch rounds it, but for the order of FP32 sums, and y as with that u given."""
    found, different = [], []
    for n, k in ((4608, 3584), (1000, 448), *LARGE):
        weight = random_weight(n, k, generator)
        for rank in (16, 32, 96, 128):
            a, b = inputs(rank, k, generator) * k**-0.5, inputs(n, rank, generator) * 0.05
            for m in (1, 3, 8, 9, 16, 33, 64, 100, 128):
                x = inputs(m, k, generator)
                alone = min(m, 66) if m > ONE_ORDER_ROWS else 1
                with case(f"N={n} K={k} R={rank} M={m}"):
                    y = fused_linear(x, weight, FusedAdapter(a, b, 0.3))
                    again = fused_linear(x, weight, FusedAdapter(a, b, 0.3))
                    first = fused_linear(x[:alone], weight, FusedAdapter(a, b, 0.3))
                    exact = decode(weight) + 0.3 * b.double() @ a.double()
                    found.append((f"N={n} K={k} R={rank} M={m}", Reference(x, exact, generator).check(y)))
                    if not (same_bits(y, again) and same_bits(y[:alone], first)):
                        different.append(f"N={n} K={k} R={rank} M={m}")
    assert faults(found) == []
    assert different == []
    with pytest.raises(ValueError, match="R = 24 is not a multiple of 16"):
        fused_linear(x, weight, FusedAdapter(a[:24], b[:, :24].contiguous(), 0.3))


def test_any_tensor_scale(generator: torch.Generator) -> None:
    found = []
    weight = random_weight(1000, 640, generator)
    for scale in (1.0, 2.0**-14, 0.0123, 1.0 / 3.0, 3.7e-6, 25000.0):
        scaled = replace(weight, tensor_scale=float(torch.tensor(scale, dtype=torch.float32)))
        matrix = decode(scaled)
        for m in (1, 16, 100, 300):
            x = inputs(m, 640, generator)
            found.append((f"scale {scale} M={m}", difference(fused_linear(x, scaled), x.double() @ matrix.t())))
    assert faults(found) == []


def with_scale_codes(weight: NVFP4Weight, codes: Callable[[tuple[int, ...]], Tensor]) -> NVFP4Weight:
    shape = tuple(weight.block_scale.shape)
    return replace(weight, block_scale=codes(shape).to(torch.uint8).view(torch.float8_e4m3fn))


def test_every_block_scale_is_read_exactly(generator: torch.Generator) -> None:
    """E4M3 codes: 0 is zero, 1..7 are the subnormals k * 2^-9, 126 is 448."""
    weight = random_weight(1000, 640, generator, tensor_scale=1.0)

    def between(low: int, high: int) -> Callable[[tuple[int, ...]], Tensor]:
        return lambda shape: torch.randint(low, high + 1, shape, generator=generator, device=DEVICE)

    found = []
    for what, low, high in (("subnormal", 1, 7), ("zero or subnormal", 0, 7), ("around 2^-6", 6, 9), ("all", 0, 126)):
        chosen = with_scale_codes(weight, between(low, high))
        for m in (1, 16, 100, 300):
            x = inputs(m, 640, generator)
            found.append((f"{what} M={m}", difference(fused_linear(x, chosen), x.double() @ decode(chosen).t())))
    # One code at a time: a wrong one cannot hide behind larger neighbours.
    for code in range(1, 127):
        chosen = with_scale_codes(weight, between(code, code))
        x = inputs(8, 640, generator)
        found.append((f"code {code}", difference(fused_linear(x, chosen), x.double() @ decode(chosen).t())))
    assert faults(found) == []
    nothing = with_scale_codes(weight, between(0, 0))
    for m in (1, 100, 300):
        assert not bool(fused_linear(inputs(m, 640, generator), nothing).count_nonzero())


def test_what_it_cannot_do_is_refused(generator: torch.Generator) -> None:
    odd = random_weight(256, 96, generator)
    reason = fused_refusal(4, odd, DEVICE)
    assert reason is not None
    assert "K = 96" in reason
    assert "64" in reason
    with pytest.raises(ValueError, match="K = 96 is not a multiple of 64"):
        fused_linear(inputs(4, 96, generator), odd)
    weight = random_weight(256, 128, generator)
    assert fused_refusal(4, weight, DEVICE) is None
    assert fused_refusal(4, weight, torch.device("cpu")) is not None
    x = inputs(4, 128, generator)
    for wrong in (x.float(), x.half(), x[:, :64], inputs(4, 256, generator)[:, ::2]):
        with pytest.raises(ValueError, match="needed contiguous BF16"):
            fused_linear(wrong, weight)
    with pytest.raises(ValueError, match=r"lora\.b"):
        fused_linear(x, weight, FusedLora(inputs(4, 32, generator), inputs(255, 32, generator)))
