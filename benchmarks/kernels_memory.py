"""Prove and measure the kernels that memory bounds: python -m benchmarks.kernels_memory [--tiles] [--cpu]

Dequantisation, the noise norm and the chunked log-probabilities. Each case is checked first, and a wrong one raises (a
wrong dequantisation says exact = false): there is no time of a wrong result. Times are medians over rotating buffers
(``kernels_timing``). ``--tiles`` measures tile sizes of the dequantisation instead; ``--cpu`` runs everything small on
a CPU, which proves this file and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_timing import ROTATED_BYTES, measure_us
from te_extensions.dequantize import nvfp4_dequantize, nvfp4_dequantize_stack
from te_extensions.logprob import HeadShard, linear_logprob
from te_extensions.norm import rms_norm_noise
from te_extensions.weight import NVFP4Weight

Row = dict[str, Any]
# (name, N, K, columns of the tensor that W is a slice of, or 0).
MATRICES = (
    ("7B.qkv", 4608, 3584, 0),
    ("7B.down tp8", 3584, 2368, 0),
    ("7B.gate_up", 37888, 3584, 0),
    ("32B.qkv", 7168, 5120, 0),
    ("32B.o", 5120, 5120, 0),
    ("32B.gate_up", 55296, 5120, 0),
    ("32B.down", 5120, 27648, 0),
    ("32B.down tp2, a view", 5120, 13824, 27648),
)
EXPERTS = ("30B-A3B.gate_up", 128, 1536, 2048)
# (rows, H, with backward).
NORMS = (
    (1, 5120, False),
    (64, 5120, False),
    (2048, 5120, False),
    (16384, 5120, False),
    (16384, 5120, True),
    (16384 * 40, 128, False),
    (16384, 8192, True),
)
# (tokens, vocabulary, H).
HEADS = ((16384, 151936, 5120), (2048, 151936, 3584), (16384, 18992, 5120))
EPS = 1e-6
# Enough for measure_us to time single calls with events instead of graphs.
_BY_EVENTS = math.inf


def _random_packed(shape: tuple[int, ...], seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random codes [..., K/2] and finite positive block scales [..., K/16]."""
    generator = torch.Generator(device).manual_seed(seed)
    *lead, k = shape
    packed = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8, device=device, generator=generator)
    scales = torch.randint(1, 0x7F, (*lead, k // 16), dtype=torch.uint8, device=device, generator=generator)
    return packed, scales.view(torch.float8_e4m3fn)


def _same_bits(found: Tensor, weight: NVFP4Weight) -> bool:
    """Whether ``found`` [N, K] BF16 is the table's float64 result, signs of zeros included."""
    rows = 4096
    for begin in range(0, found.shape[0], rows):
        part = slice(begin, begin + rows)
        piece = NVFP4Weight(weight.packed[part], weight.block_scale[part], weight.tensor_scale)
        exact = nvfp4_dequantize(piece, torch.float64).bfloat16()
        if not torch.equal(exact.view(torch.int16), found[part].view(torch.int16)):
            return False
    return True


def _speed(call: Callable[[int], Tensor], copies: int, moved_bytes: int, device: torch.device) -> Row:
    """Bytes per second of ``call``, and of a plain copy that moves as many bytes, in turns."""
    source = torch.empty(copies, moved_bytes // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    calls = {"own": call, "copy": lambda i: target[i % copies].copy_(source[i % copies])}
    for contender in calls.values():
        contender(0)
    us = measure_us(calls, dict.fromkeys(calls, copies), 0, device)["us"]
    return {
        "us": us["own"],
        "bytes_per_s": moved_bytes / us["own"] * 1e6,
        "copy_bytes_per_s": moved_bytes / us["copy"] * 1e6,
    }


def _matrix_case(
    n: int, k: int, whole_k: int, device: torch.device
) -> tuple[list[NVFP4Weight], list[Tensor], int, bool]:
    """Weights and outputs to rotate through, bytes moved by one call, and whether the result is exact."""
    moved = n * k * 41 // 16  # 9/16 byte read and 2 bytes written for each weight
    copies = max(2, math.ceil(ROTATED_BYTES / moved))
    weights = []
    for i in range(copies):
        packed, scales = _random_packed((n, whole_k or k), i, device)
        weights.append(NVFP4Weight(packed[:, : k // 2], scales[:, : k // 16], 0.5**10))
    outs = [torch.full((n, k), float("nan"), dtype=torch.bfloat16, device=device) for _ in weights]
    return weights, outs, moved, _same_bits(nvfp4_dequantize(weights[0], torch.bfloat16, out=outs[0]), weights[0])


def dequantize_rows(device: str = "cuda", shrink: int = 1) -> list[Row]:
    """One row a matrix: name, shape, exact, us, bytes_per_s and copy_bytes_per_s (None where it is not exact)."""
    rows: list[Row] = []
    where = torch.device(device)
    for name, n, k, whole_k in MATRICES:
        n = n // shrink  # noqa: PLW2901
        weights, outs, moved, exact = _matrix_case(n, k, whole_k, where)

        def call(i: int, weights: list[NVFP4Weight] = weights, outs: list[Tensor] = outs) -> Tensor:
            return nvfp4_dequantize(weights[i % len(weights)], torch.bfloat16, out=outs[i % len(outs)])

        speed = _speed(call, len(weights), moved, where) if exact else {"bytes_per_s": None}
        rows.append({"name": name, "shape": [n, k], "exact": exact, **speed})
    rows.append(_stack_row(where, shrink))
    return rows


def _stack_row(device: torch.device, shrink: int) -> Row:
    name, experts, n, k = EXPERTS
    experts //= shrink
    scales = 0.5 ** (torch.arange(experts, device=device) % 7).float()
    moved = experts * n * k * 41 // 16
    cases = [_random_packed((experts, n, k), i, device) for i in range(2)]
    out = torch.empty(2, experts, n, k, dtype=torch.bfloat16, device=device)

    def call(i: int) -> Tensor:
        return nvfp4_dequantize_stack(*cases[i % 2], scales, torch.bfloat16, out=out[i % 2])

    call(0)
    exact = all(
        _same_bits(out[0, e], NVFP4Weight(cases[0][0][e], cases[0][1][e], float(scales[e]))) for e in range(experts)
    )
    speed = _speed(call, 2, moved, device) if exact else {"bytes_per_s": None}
    return {"name": name, "shape": [experts, n, k], "exact": exact, **speed}


def tile_rows(device: str = "cuda") -> list[Row]:
    """Speed of the dequantisation kernel over tile sizes and warps, for choosing its constants."""
    from te_extensions.dequantize_triton import launch_matrix

    rows = []
    where = torch.device(device)
    for name, n, k, _ in (MATRICES[0], MATRICES[5]):
        weights, outs, moved, _ = _matrix_case(n, k, 0, where)
        for tile, warps in itertools.product((128, 256, 512, 1024, 2048), (2, 4, 8)):

            def call(
                i: int,
                tile: int = tile,
                warps: int = warps,
                weights: list[NVFP4Weight] = weights,
                outs: list[Tensor] = outs,
            ) -> Tensor:
                w, out = weights[i % len(weights)], outs[i % len(outs)]
                launch_matrix(w.packed, w.block_scale, w.tensor_scale, out, tile=tile, warps=warps)
                return out

            rows.append({"name": name, "tile": tile, "warps": warps, **_speed(call, len(weights), moved, where)})
    return rows


def _torch_norm(x: Tensor, gamma: Tensor, z: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), gamma + z, EPS).to(x.dtype)


def _check_norm(x: Tensor, gamma: Tensor, z: Tensor, grad: Tensor) -> float:
    """Relative error of the noise norm and of its gradient against float64, on at most 512 rows."""
    leaf, wide = x[:512].clone().requires_grad_(True), x[:512].double().requires_grad_(True)
    y = rms_norm_noise(leaf, gamma, z, EPS)
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * (gamma + z).double()
    y.backward(grad[:512])
    exact.backward(grad[:512].double())
    pairs = ((y.detach(), exact.detach()), (leaf.grad, wide.grad))
    error = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
    if not error <= 2.0**-8:
        raise RuntimeError(f"noise norm {tuple(x.shape)}: relative error {error:.2e} exceeds one BF16 rounding, 2^-8")
    return error


def norm_rows(device: str = "cuda", shrink: int = 1) -> list[Row]:
    """One row a shape: rows, hidden, pass, us, ratio_torch (torch's operations over ours), bytes_per_s, rel_err."""
    rows: list[Row] = []
    where = torch.device(device)
    for count, hidden, backward in NORMS:
        count = max(1, count // shrink)  # noqa: PLW2901
        generator = torch.Generator(where).manual_seed(count)
        copies = min(64, max(2, math.ceil(ROTATED_BYTES / (4 * count * hidden))))
        shape = (copies, count, hidden)
        xs = torch.randn(shape, dtype=torch.bfloat16, device=where, generator=generator).unbind()
        gamma = 1.0 + 0.1 * torch.randn(hidden, device=where, generator=generator)
        z = 1e-2 * torch.randn(hidden, device=where, generator=generator)
        grad = torch.randn(count, hidden, device=where, generator=generator).bfloat16()
        error = _check_norm(xs[0], gamma, z, grad)
        calls = {
            name: _norm_call(function, list(xs), grad if backward else None)
            for name, function in (
                ("own", lambda x, gamma=gamma, z=z: rms_norm_noise(x, gamma, z, EPS)),
                ("torch", lambda x, gamma=gamma, z=z: _torch_norm(x, gamma, z)),
            )
        }
        for call in calls.values():
            call(0)
        us = measure_us(calls, dict.fromkeys(calls, copies), _BY_EVENTS if backward else 0, where)["us"]
        # Forward reads x and writes y; backward reads x and the gradient and writes one.
        moved = 2 * count * hidden * (5 if backward else 2)
        rows.append(
            {
                "rows": count,
                "hidden": hidden,
                "pass": "forward+backward" if backward else "forward",
                "us": us["own"],
                "ratio_torch": us["torch"] / us["own"],
                "bytes_per_s": moved / us["own"] * 1e6,
                "rel_err": error,
            }
        )
    return rows


def _norm_call(function: Callable[[Tensor], Tensor], xs: list[Tensor], grad: Tensor | None) -> Callable[[int], Tensor]:
    if grad is None:
        return lambda i: function(xs[i % len(xs)])
    leaves = [x.detach().requires_grad_(True) for x in xs]

    def call(i: int) -> Tensor:
        leaf = leaves[i % len(leaves)]
        (gradient,) = torch.autograd.grad(function(leaf), leaf, grad)
        return gradient

    return call


def _logprob_errors(
    states: Tensor, targets: Tensor, head: HeadShard, found: tuple[Tensor, ...]
) -> tuple[float, float, float]:
    """Relative errors of log-probabilities, entropies and gradient against float64, on the first and last 128 rows."""
    pick = torch.cat((torch.arange(128), torch.arange(len(states) - 128, len(states)))).to(states.device)
    leaf = states[pick].double().requires_grad_(True)
    full = torch.log_softmax(leaf @ head.weight.double().t(), dim=-1)
    picked = full.gather(1, targets[pick, None]).squeeze(1)
    picked.sum().backward()
    full = full.detach()
    exact = (picked.detach(), -(full.exp() * full).sum(1), leaf.grad)
    a, b, c = (
        float((ours[pick].double() - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, exact, strict=True)
    )
    if not (max(a, b) <= 1e-4 and c <= 1e-2):
        raise RuntimeError(
            f"log-probabilities of {tuple(head.weight.shape)}: relative errors {a:.1e}, {b:.1e} and {c:.1e} (gradient) "
            "exceed 1e-4 (FP32 sums) and 1e-2 (logit gradient rounded to BF16)"
        )
    return a, b, c


def _peak_extra(step: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes that ``step`` had beyond what was there before it, its results included; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _logprob_row(tokens: int, vocab: int, hidden: int, device: torch.device) -> Row:
    generator = torch.Generator(device).manual_seed(tokens + vocab)
    weight = torch.randn(vocab, hidden, dtype=torch.bfloat16, device=device, generator=generator)
    head = HeadShard(weight.mul_(3.0 / math.sqrt(hidden)), 0, vocab, None)
    leaf = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device, generator=generator).requires_grad_(True)
    targets = torch.randint(0, vocab, (tokens,), device=device, generator=generator)

    def step(_: int = 0) -> Tensor:
        leaf.grad = None
        logprobs, entropy = linear_logprob(leaf, targets, head)
        logprobs.sum().backward()
        step.found = logprobs.detach(), entropy, leaf.grad  # type: ignore[attr-defined]
        return logprobs.detach()

    def forward(_: int = 0) -> Tensor:
        with torch.no_grad():
            return linear_logprob(leaf, targets, head)[0]

    step()
    errors = _logprob_errors(leaf.detach(), targets, head, step.found)  # type: ignore[attr-defined]
    step.found, leaf.grad = (), None  # type: ignore[attr-defined]
    peak = _peak_extra(step, device)
    us = measure_us({"step": step, "forward": forward}, {"step": 1, "forward": 1}, _BY_EVENTS, device)["us"]
    return {
        "tokens": tokens,
        "vocab": vocab,
        "hidden": hidden,
        "peak_ratio": None if peak is None else peak / (4 * tokens * vocab),
        "peak_extra_bytes": peak,
        "rel_err": errors[0],
        "entropy_rel_err": errors[1],
        "grad_rel_err": errors[2],
        "forward_ms": us["forward"] / 1e3,
        "forward_backward_ms": us["step"] / 1e3,
        # Three products of 2 T V H: logits, logits again, gradient.
        "tflop_per_s": 6e-6 * tokens * vocab * hidden / us["step"],
    }


def logprob_rows(device: str = "cuda", shrink: int = 1) -> list[Row]:
    """One row a head: tokens, vocab, hidden, peak_ratio (of FP32 logits), relative errors, milliseconds."""
    return [
        _logprob_row(max(256, tokens // shrink), vocab // shrink, hidden // shrink, torch.device(device))
        for tokens, vocab, hidden in HEADS
    ]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


def table(title: str, rows: list[Row]) -> list[str]:
    """Rows as aligned columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_text(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return [title, *("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells), ""]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels_memory")
    parser.add_argument("--tiles", action="store_true", help="tile sizes of the dequantisation, nothing else")
    parser.add_argument("--cpu", action="store_true", help="everything small on a CPU")
    options = parser.parse_args()
    if options.tiles:
        print("\n".join(table("dequantise: tiles", tile_rows())))
        return
    where = {"device": "cpu", "shrink": 128} if options.cpu else {}
    for title, function in (("dequantise", dequantize_rows), ("norm", norm_rows), ("logprob", logprob_rows)):
        print("\n".join(table(title, function(**where))), flush=True)


if __name__ == "__main__":
    main()
