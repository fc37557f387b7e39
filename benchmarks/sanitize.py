"""One small case of each kernel, for compute-sanitizer.

compute-sanitizer --tool memcheck python -m benchmarks.sanitize
compute-sanitizer --tool racecheck python -m benchmarks.sanitize

Exits 0 when every call returned; the sanitizer's own summary says whether it was clean.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from te_extensions import (
    HeadShard,
    NVFP4Weight,
    linear_logprob,
    nvfp4_dequantize,
    nvfp4_grouped_linear,
    nvfp4_linear,
    rms_norm_noise,
)
from te_extensions.fused import MOST_PROJECTED_TOKENS, FusedAdapter, FusedLora, fused_linear

DEVICE = torch.device("cuda")


def weight(n: int, k: int) -> NVFP4Weight:
    """A random packed matrix."""
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    scale = torch.randint(1, 0x7F, (n, k // 16), dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    return NVFP4Weight(packed, scale, 2.0**-10)


def tokens(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def fused() -> None:
    """Every tile shape, whole and ragged, with pieces that are shared between CTAs and with LoRA."""
    for n, k in ((300, 576), (18688, 3840)):
        w = weight(n, k)
        for m in (3, 60, 90, 120, 180, 300):
            x = tokens(m, k)
            fused_linear(x, w)
            fused_linear(x, w, FusedLora(tokens(m, 32), tokens(n, 32)))
            if m <= MOST_PROJECTED_TOKENS:
                fused_linear(x, w, FusedAdapter(tokens(48, k), tokens(n, 48), 0.5))
            torch.cuda.synchronize()


def memory_bound() -> None:
    """Dequantisation, norm and log-probability, forward and backward."""
    w = weight(100, 448)
    nvfp4_dequantize(w, torch.bfloat16)
    nvfp4_dequantize(w, torch.float32)
    x = tokens(33, 448).requires_grad_()
    gamma, noise = torch.rand(448, device=DEVICE), torch.randn(448, device=DEVICE)
    rms_norm_noise(x, gamma, noise, 1e-6).float().sum().backward()
    slots = torch.arange(33, dtype=torch.int32, device=DEVICE) % 4 - 1
    rms_norm_noise(x, gamma, torch.randn(3, 448, device=DEVICE), 1e-6, slot=slots)
    head = HeadShard(tokens(1000, 448), 0, 990, None)
    linear_logprob(x, torch.arange(33, device=DEVICE), head)[0].sum().backward()
    torch.cuda.synchronize()


def linears() -> None:
    """The paths that end in cuBLAS."""
    w = weight(256, 512)
    x = tokens(40, 512).requires_grad_()
    nvfp4_linear(x, w, path="dequantize").float().sum().backward()
    packed = torch.stack([weight(128, 256).packed for _ in range(3)])
    scales = torch.stack([weight(128, 256).block_scale.view(torch.uint8) for _ in range(3)]).view(torch.float8_e4m3fn)
    y = tokens(30, 256).requires_grad_()
    nvfp4_grouped_linear(y, torch.tensor([10, 0, 20]), packed, scales, [2.0**-9] * 3).float().sum().backward()
    torch.cuda.synchronize()


def main() -> None:
    """Run the parts named on the command line, or all."""
    parts = {"fused": fused, "memory_bound": memory_bound, "linears": linears}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="default: all")
    for name in parser.parse_args().parts or parts:
        parts[name]()
        print(f"{name}: done", flush=True)


if __name__ == "__main__":
    main()
