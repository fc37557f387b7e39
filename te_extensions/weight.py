"""The frozen NVFP4 weight as the kernels see it: ModelOpt's bytes, untouched.

A weight of N output and K input features is three tensors: 4-bit codes two to a byte (low nibble = even k), one FP8
E4M3 scale for each block of 16 consecutive k, one FP32 scale for the tensor. The matrix they stand for is
``e2m1(code) * block_scale * tensor_scale``. With a power-of-two tensor scale that product is exact in BF16 (at most six
significant bits); otherwise the tensor scale is left to the GEMM as its FP32 alpha.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZE = 16


@dataclass(frozen=True)
class NVFP4Weight:
    """One packed matrix.

    Attributes:
        packed: uint8 [N, K/2].
        block_scale: float8_e4m3fn [N, K/16], row-major.
        tensor_scale: FP32 value as a Python float (it is a launch argument, never read back from a device).
    """

    packed: Tensor
    block_scale: Tensor
    tensor_scale: float

    def __post_init__(self) -> None:
        rows, half = self.packed.shape
        if self.packed.dtype != torch.uint8 or self.block_scale.dtype != torch.float8_e4m3fn:
            raise TypeError(
                f"packed must be uint8 and block_scale float8_e4m3fn, got {self.packed.dtype} and "
                f"{self.block_scale.dtype}"
            )
        if 2 * half % BLOCK_SIZE or tuple(self.block_scale.shape) != (rows, 2 * half // BLOCK_SIZE):
            raise ValueError(
                f"block_scale {tuple(self.block_scale.shape)} does not fit packed {(rows, half)}: "
                f"K = {2 * half} must be a multiple of {BLOCK_SIZE} with one scale a block"
            )
        if not (math.isfinite(self.tensor_scale) and self.tensor_scale > 0.0):
            raise ValueError(f"tensor_scale = {self.tensor_scale} must be finite and positive")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def power_of_two(self) -> bool:
        """Whether the tensor scale can be folded into the matrix without rounding."""
        return math.frexp(self.tensor_scale)[0] == 0.5

    @property
    def nbytes(self) -> int:
        return self.packed.numel() + self.block_scale.numel() + 4
