"""Is a product right? A float64 reference that shares no code with the kernels, and what may differ from it.

The matrix is decoded here from ModelOpt's bytes with a 16-entry table, in float64, and multiplied in float64. x and W
are exact in both computations (BF16 values, and E2M1 * E4M3 * FP32 products), so the only differences are:

* the output's rounding to BF16: half a step of 2^-7, so at most 2^-8 of an element, and 1.7e-3 in norm for magnitudes
  spread evenly over a binade;
* a second rounding where a path scales a BF16 product (a tensor scale that is not a power of two, a LoRA term added
  afterwards): sqrt(2) * 1.7e-3 = 2.4e-3;
* FP32 accumulation of K products, about sqrt(K) * 2^-24, or 1e-5 for the longest K here; tensor cores truncate, which
  costs a few 1e-4 at worst.

``NORM_BOUND`` = 4e-3 leaves those room and nothing else: the mildest wrong answer of the negative controls is 6e-2.
A norm cannot see one wrong element in a million, so every element is bounded too: ``ELEMENT_BOUND`` = 2^-4 of its row's
root mean square, twice 2^-8 for an element eight times the root mean square. A wrong element is off by about 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from te_extensions.weight import BLOCK_SIZE, NVFP4Weight

NORM_BOUND = 4e-3
ELEMENT_BOUND = 2.0**-4
#: Multiply-adds of a float64 product above which only some output columns are checked (all rows of them).
FULL_CHECK_PRODUCTS = 4e10
CHECKED_COLUMNS = 512
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def random_weight(
    n: int, k: int, generator: torch.Generator, *, tensor_scale: float = 2.0**-9, octaves: float = 3.0
) -> NVFP4Weight:
    """Every code equally likely, block scales log-uniform over ``octaves`` octaves either side of 1."""
    device = generator.device
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device, generator=generator)
    spread = torch.rand((n, k // BLOCK_SIZE), device=device, generator=generator)
    scale = torch.exp2((2.0 * spread - 1.0) * octaves).to(torch.float8_e4m3fn)
    return NVFP4Weight(packed, scale, tensor_scale)


def decode(weight: NVFP4Weight, dtype: torch.dtype = torch.float64) -> Tensor:
    """[N, K] in ``dtype``, from the format's definition."""
    n, k = weight.shape
    table = torch.tensor(_E2M1, dtype=dtype, device=weight.packed.device)
    matrix = torch.empty((n, k), dtype=dtype, device=weight.packed.device)
    matrix[:, 0::2] = table[(weight.packed & 15).int()]
    matrix[:, 1::2] = table[(weight.packed >> 4).int()]
    # float8 -> float32 is exact, and so is float32 -> float64 or, for six significant bits, -> bfloat16.
    scale = (weight.block_scale.float() * (weight.tensor_scale if weight.power_of_two else 1.0)).to(dtype)
    matrix.view(n, k // BLOCK_SIZE, BLOCK_SIZE).mul_(scale.unsqueeze(-1))
    return matrix if weight.power_of_two else matrix.mul_(weight.tensor_scale)


@dataclass(frozen=True)
class Difference:
    """How far an output is from the reference.

    Attributes:
        rel_err: ||y - ref|| / ||ref||, NaN if any element is.
        max_err: largest |y - ref| of an element over the root mean square of its row of ref.
        columns: output columns compared, or None for all.
    """

    rel_err: float
    max_err: float
    columns: int | None

    @property
    def fault(self) -> str | None:
        """Why this is not an answer, or None."""
        if math.isnan(self.rel_err) or math.isnan(self.max_err):
            return "NaN in the output: an element was computed from poison or never written"
        if not self.rel_err <= NORM_BOUND:
            return f"rel_err {self.rel_err:.2e} is above {NORM_BOUND:.0e}"
        if not self.max_err <= ELEMENT_BOUND:
            return f"an element is off by {self.max_err:.2e} of its row's scale, above {ELEMENT_BOUND:.2e}"
        return None


def difference(y: Tensor, reference: Tensor, columns: int | None = None) -> Difference:
    """Compare [M, C] with a float64 [M, C]."""
    error = y.double() - reference
    row_scale = reference.square().mean(dim=1, keepdim=True).sqrt()
    rel_err = float(torch.linalg.vector_norm(error) / torch.linalg.vector_norm(reference))
    # A NaN is lost in some maxima: it must come out of both numbers.
    max_err = float("nan") if math.isnan(rel_err) else float((error.abs() / row_scale).amax())
    return Difference(rel_err, max_err, columns)


class Reference:
    """ref = inputs @ matrix.T in float64, for any number of leading rows of one input.

    Args:
        inputs: BF16 [M_max, I]; a problem of M rows uses the first M.
        matrix: float64 [O, I]: W for forward, W^T for the input gradient.
    """

    def __init__(self, inputs: Tensor, matrix: Tensor, generator: torch.Generator) -> None:
        outputs = matrix.shape[0]
        self.inputs, self.matrix = inputs, matrix
        edge = torch.arange(64, device=matrix.device) % outputs
        chosen = torch.randperm(outputs, generator=generator, device=matrix.device)[: CHECKED_COLUMNS - 128]
        # The first and the last columns always belong to the check: that is where tiles overhang.
        self.columns = torch.cat((chosen, edge, outputs - 1 - edge)).unique()
        self._partial: Tensor | None = None

    def product(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """The reference of the first ``rows`` rows: float64 [rows, C], and which output columns (None: all)."""
        outputs = self.matrix.shape[0]
        if rows * self.matrix.numel() <= FULL_CHECK_PRODUCTS or outputs <= self.columns.numel():
            return self.inputs[:rows].double() @ self.matrix.t(), None
        if self._partial is None:
            self._partial = self.inputs.double() @ self.matrix[self.columns].t()
        return self._partial[:rows], self.columns

    def check(self, y: Tensor) -> Difference:
        """Compare a product of the first ``len(y)`` rows.

        Raises:
            ValueError: the product has another width.
        """
        if y.shape[1] != self.matrix.shape[0]:
            raise ValueError(f"the product has {y.shape[1]} columns, expected {self.matrix.shape[0]}")
        reference, columns = self.product(y.shape[0])
        return difference(y, reference) if columns is None else difference(y[:, columns], reference, columns.numel())


class Poison:
    """Fills the memory that the next outputs will get with NaN, and tells whether they got it.

    The bytes 0xFF are a NaN in BF16 and in FP32. Blocks are allocated, filled and freed; torch's caching allocator
    then hands the same blocks out. On a CPU, where freed memory goes back to the system, it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[tuple[int, int]] = []

    def spread(self, output_bytes: int) -> None:
        """Before a call whose output has ``output_bytes``: also covers FP32 partial sums and smaller scratch."""
        if self.device.type != "cuda":
            return
        # Below 1 MiB blocks share a segment and any free one may be taken, so more of them are poisoned.
        repeat = 2 if output_bytes > 1 << 20 else 16
        sizes = [output_bytes] * repeat + [2 * output_bytes, 1 << 20, 8 << 20, 1 << 16, 1 << 9]
        held = [torch.empty(size, dtype=torch.uint8, device=self.device).fill_(0xFF) for size in sizes]
        self._blocks = [(block.data_ptr(), block.data_ptr() + block.numel()) for block in held]

    def reached(self, y: Tensor) -> bool:
        """Whether ``y`` lies in poisoned memory."""
        return any(low <= y.data_ptr() < high for low, high in self._blocks)


def corrupted(weight: NVFP4Weight) -> dict[str, NVFP4Weight]:
    """Wrong weights that a wrong kernel would see; a check that lets one pass proves nothing."""
    swapped = ((weight.packed >> 4) | (weight.packed << 4)).to(torch.uint8)
    shifted = weight.block_scale.view(torch.uint8).roll(1, dims=1).view(torch.float8_e4m3fn)
    return {
        "swapped_nibbles": replace(weight, packed=swapped),
        "shifted_block_scales": replace(weight, block_scale=shifted),
        "wrong_tensor_scale": replace(weight, tensor_scale=weight.tensor_scale * 1.0625),
    }
