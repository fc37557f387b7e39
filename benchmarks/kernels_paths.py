"""The paths of a frozen NVFP4 product as the harness calls them, and the yardsticks beside them.

``fused``: the CUDA kernel that multiplies by the packed weight. ``dequantize``: the whole matrix in BF16 in a reused
workspace, then cuBLAS. ``reference``: decode and multiply, which is what a CPU does. The input gradient has no fused
path: block scales vary along its reduction. Weights rotate, so that an input gradient never finds its matrix decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_journal import PATHS
from benchmarks.kernels_timing import copies_for, measure_us
from benchmarks.yardsticks import Cublas, Humming
from te_extensions.linear import nvfp4_linear
from te_extensions.lora import LoraPart, LoraWeights, nvfp4_lora_linear
from te_extensions.ops import LINEAR_DGRAD
from te_extensions.weight import NVFP4Weight

#: call(inputs, i): the product with weight copy i (modulo the copies).
ProductCall = Callable[[Tensor, int], Tensor]


def _never(_m: int) -> str | None:
    return None


def _nothing(_m: int) -> None:
    return None


@dataclass
class Contender:
    """One way to compute the product.

    Attributes:
        call: the product.
        copies: weight copies that it rotates through.
        refusal: why it cannot run M rows, or None.
        prepare: what it needs before its first call with M rows.
        search: schedules to try beside its own for M rows, or None; with ``select`` to put one in.
    """

    call: ProductCall
    copies: int
    refusal: Callable[[int], str | None] = _never
    prepare: Callable[[int], None] = _nothing
    search: Callable[[int], list[Any]] | None = None
    select: Callable[[int, Any], None] | None = None
    chosen: dict[int, Any] = field(default_factory=dict)

    def choose(self, inputs: Tensor, m: int, products: float, device: torch.device) -> None:
        """Time the neighbouring schedules and keep the fastest."""
        if self.search is None or self.select is None:
            return
        fastest, best = None, float("inf")
        for candidate in self.search(m):
            self.select(m, candidate)
            call = {"candidate": lambda i: self.call(inputs, i)}
            self.call(inputs, 0)
            us = measure_us(call, {"candidate": self.copies}, products, device)["us"].get("candidate", float("inf"))
            if us < best:
                fastest, best = candidate, us
        if fastest is not None:
            self.select(m, fastest)
            self.chosen[m] = fastest


def own_call(path: str, pass_name: str, weights: Sequence[NVFP4Weight]) -> ProductCall:
    """The call of one of our paths.

    Raises:
        ValueError: there is no such path for the pass.
    """
    if path not in PATHS or pass_name not in ("forward", "dgrad"):
        raise ValueError(f"there is no path {path!r} for pass {pass_name!r}")
    if pass_name == "dgrad":
        if path == "fused":
            raise ValueError("the fused path has no dgrad: block scales vary along its reduction")

        def dgrad(dy: Tensor, i: int) -> Tensor:
            weight = weights[i % len(weights)]
            return LINEAR_DGRAD(dy, weight.packed, weight.block_scale, weight.tensor_scale, path)

        return dgrad
    if path == "fused":
        from te_extensions.fused import fused_linear

        return lambda x, i: fused_linear(x, weights[i % len(weights)])
    return lambda x, i: nvfp4_linear(x, weights[i % len(weights)], path=path)


def own_contender(path: str, pass_name: str, weights: Sequence[NVFP4Weight]) -> Contender:
    """One of our paths."""
    refusal = _fused_refusal(weights[0]) if path == "fused" else _never
    return Contender(own_call(path, pass_name, weights), len(weights), refusal)


def cublas_contender(pass_name: str, weights: Sequence[NVFP4Weight]) -> Contender:
    """The BF16 yardstick; fewer copies of the larger matrices touch the same memory."""
    n, k = weights[0].shape
    copies = min(len(weights), copies_for(2 * n * k))
    return Contender(getattr(Cublas(weights, copies), pass_name), copies)


def humming_contender(weights: Sequence[NVFP4Weight], *, search: bool) -> Contender:
    """The published kernel, at its tuned schedules or the fastest near them."""
    yardstick = Humming(weights)
    return Contender(
        yardstick.forward,
        len(weights),
        prepare=lambda m: yardstick.prepare([m]),
        search=yardstick.neighbours if search else None,
        select=yardstick.schedules.__setitem__,
    )


def _fused_refusal(weight: NVFP4Weight) -> Callable[[int], str | None]:
    from te_extensions.fused import fused_refusal

    return lambda m: fused_refusal(m, weight, weight.packed.device)


class LoraCalls:
    """The fused product with an adapter of ``rank`` on each of the layer's fused parts.

    A is stacked over the parts, B is block-diagonal: part p's rows of B are zero outside its own ``rank`` columns, as
    ``LoraWeights.prepared`` makes it for an engine.
    """

    def __init__(
        self,
        weights: Sequence[NVFP4Weight],
        parts: Sequence[int],
        x: Tensor,
        rank: int,
        generator: torch.Generator,
    ) -> None:
        self.weights, self.x, self.width = weights, x, rank * len(parts)
        k = x.shape[1]
        a = torch.randn((self.width, k), generator=generator, device=x.device) / k**0.5
        self.a = a.to(x.dtype)
        b = torch.zeros((sum(parts), self.width), device=x.device)
        row = 0
        for index, rows in enumerate(parts):
            block = torch.randn((rows, rank), generator=generator, device=x.device) / rank**0.5
            b[row : row + rows, index * rank : (index + 1) * rank] = block
            row += rows
        self.b = b.to(x.dtype)
        self.parts = tuple(LoraPart(rows) for rows in parts)

    def scale_to(self, base: Tensor) -> None:
        """Make u B^T as large as the base product, so that an error in it shows."""
        self.b.mul_(float(base.square().mean().sqrt()))

    def u(self) -> Tensor:
        return torch.mm(self.x, self.a.t())

    def term(self, columns: Tensor | None) -> Tensor:
        """u B^T in float64, from the BF16 u that the kernel gets."""
        b = self.b if columns is None else self.b[columns]
        return self.u().double() @ b.double().t()

    def plain(self, i: int) -> Tensor:
        return nvfp4_linear(self.x, self.weights[i % len(self.weights)], path="fused")

    def fused(self, i: int) -> Tensor:
        adapters = LoraWeights(self.a, self.b, self.parts, scale=1.0, wide=self.b)
        return nvfp4_lora_linear(self.x, self.weights[i % len(self.weights)], adapters, path="fused")

    def separate(self, i: int) -> Tensor:
        return self.plain(i).addmm_(self.u(), self.b.t())
