"""Does a quantised folder hold what it claims? Read everything back and compare, worst tensor first.

Four questions, each with a bound that follows from the format rather than from taste:

* Are the files those that were written? Every SHA-256 of the manifest is recomputed.
* Will every engine read the same matrix? Tensor scales are powers of two, shared in fused groups, and no block scale is
  below 2^-6.
* Is it the source model? Rounding to E2M1 moves a value by at most half the widest spacing, which is one block scale;
  a wrong nibble, a shifted block or another model breaks that at once. AWQ's folding is undone first. Tensors that are
  not quantised must be equal, and folded norms must give back the original.
* Does the kernel compute with it? Fixed inputs go through the packed path and through decoding in float64, and may
  differ by float32 accumulation alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_qerl.nvfp4.awq import read_folding
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.format import BLOCK, MIN_BLOCK_SCALE, PackedWeight, is_power_of_two
from megatron_qerl.nvfp4.layout import DecoderShape, fused_groups
from megatron_qerl.nvfp4.manifest import manifest_problems
from megatron_qerl.nvfp4.unfold import SourceView

PackedMatmul = Callable[[Tensor, PackedWeight], Tensor]
"""x [M, K] and a packed weight [N, K] -> x W^T [M, N]."""

_INPUT_ROWS = 4
_CHUNK_ELEMENTS = 1 << 22
_FP32_ROUNDING = 2.0**-24
_SLACK = 1e-4  # AWQ factors are applied in float32 on one side and in float64 on the other


@dataclass(frozen=True)
class TensorCheck:
    """What was measured on one quantised weight.

    Attributes:
        name: module name.
        shape: (N, K).
        relative_error: |W - W_source| / |W_source|, Frobenius; None without a source.
        worst_step: largest |W - W_source| in units of the element's block scale, at most 1; None without a source.
        matmul_error: largest difference of packed and reference product over what float32 accumulation explains, at
            most 1; None when no packed path was given.
        tensor_scale: as stored.
        smallest_block_scale: as stored.
    """

    name: str
    shape: tuple[int, int]
    relative_error: float | None
    worst_step: float | None
    matmul_error: float | None
    tensor_scale: float
    smallest_block_scale: float


@dataclass(frozen=True)
class VerifyReport:
    """Result of :func:`verify`. ``tensors`` is sorted, largest relative error first; ``problems`` is empty when ok."""

    folder: Path
    source: Path | None
    tensors: tuple[TensorCheck, ...]
    plain_tensors: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def render(self, limit: int = 20) -> str:
        """A text table of the worst tensors, then the verdict."""
        lines = [f"{'tensor':<44}{'N x K':>15}{'relative':>10}{'step':>7}{'matmul':>8}{'min block':>11}{'scale':>8}"]
        for check in self.tensors[:limit]:
            lines.append(
                f"{check.name:<44}{check.shape[0]:>7} x {check.shape[1]:<5}{_cell(check.relative_error, 10, 4)}"
                f"{_cell(check.worst_step, 7, 2)}{_cell(check.matmul_error, 8, 3)}{check.smallest_block_scale:>11.5g}"
                f"{check.tensor_scale:>8.1e}"
            )
        if len(self.tensors) > limit:
            lines.append(f"... and {len(self.tensors) - limit} tensors with smaller errors")
        errors = [check.relative_error for check in self.tensors if check.relative_error is not None]
        if errors:
            lines.append(f"relative error: largest {max(errors):.4f}, mean {sum(errors) / len(errors):.4f}")
        against = f"against {self.source}" if self.source is not None else "no source given"
        lines.append(f"{len(self.tensors)} quantised and {self.plain_tensors} plain tensors, {against}")
        lines += [f"PROBLEM {problem}" for problem in self.problems[:limit]]
        if len(self.problems) > limit:
            lines.append(f"... and {len(self.problems) - limit} more problems")
        lines.append(f"{self.folder}: {'ok' if self.ok else f'{len(self.problems)} PROBLEMS'}")
        return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def verify(
    folder: Path,
    source: Path | None,
    packed_matmul: PackedMatmul | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> VerifyReport:
    """Check a folder that this project quantised.

    Args:
        folder: the NVFP4 folder, with its manifest.
        source: the folder it was made from; None skips the comparison of weights.
        packed_matmul: the product as the trainer computes it; None skips that comparison.
        progress: told after each tensor.
    Raises:
        CheckpointError: a folder cannot be opened at all, or has no manifest.
    """
    report = progress or (lambda stage, done, total: None)
    model = ModelFolder.open(folder)
    problems = list(manifest_problems(model, progress=lambda done, total: report("hash tensors", done, total)))
    original = SourceView(ModelFolder.open(source), read_folding(folder)) if source is not None else None
    checks = []
    for count, module in enumerate(model.nvfp4_modules, start=1):
        checks.append(_check_tensor(model, module, original, packed_matmul))
        report("compare weights", count, len(model.nvfp4_modules))
    problems += [problem for check in checks for problem in _tensor_problems(check)]
    problems += _group_problems(model, {check.name: check.tensor_scale for check in checks})
    plain = _plain_names(model)
    if original is not None:
        problems += _plain_problems(model, plain, original)
    checks.sort(key=lambda check: -(check.relative_error or 0.0))
    return VerifyReport(folder, source, tuple(checks), len(plain), tuple(problems))


def _check_tensor(
    model: ModelFolder, module: str, original: SourceView | None, packed_matmul: PackedMatmul | None
) -> TensorCheck:
    n, k = model.nvfp4_shape(module)
    x = _fixed_inputs(k)
    product = packed_matmul(x, model.read_nvfp4(module)) if packed_matmul is not None else None
    squared_error = squared_norm = worst_step = matmul_error = 0.0
    smallest = float("inf")
    rows = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, n, rows):
        part = slice(start, min(start + rows, n))
        packed = model.read_nvfp4(module, rows=part)
        smallest = min(smallest, float(packed.block_scale.float().min()))
        weight = packed.decode(torch.float64)
        if original is not None:
            wanted = original.weight(module, part)
            difference = (weight - wanted).abs()
            squared_error += float(difference.square().sum())
            squared_norm += float(wanted.square().sum())
            step = packed.block_scale.double() * float(packed.tensor_scale)
            worst_step = max(worst_step, float((difference.view(len(weight), -1, BLOCK) / step.unsqueeze(-1)).max()))
        if product is not None:
            matmul_error = max(matmul_error, _matmul_error(x, weight, product[:, part]))
    return TensorCheck(
        name=module,
        shape=(n, k),
        relative_error=(squared_error / squared_norm) ** 0.5 if squared_norm else (0.0 if original else None),
        worst_step=worst_step if original is not None else None,
        matmul_error=matmul_error if product is not None else None,
        tensor_scale=float(model.read_nvfp4(module, rows=slice(0, 1)).tensor_scale),
        smallest_block_scale=smallest,
    )


def _fixed_inputs(k: int) -> Tensor:
    """Inputs [4, K] in eighths, exact in every float dtype, the same on every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-16, 17, (_INPUT_ROWS, k), generator=generator).float() / 8


def _matmul_error(x: Tensor, weight: Tensor, product: Tensor) -> float:
    """Largest error of a product [M, N] over the bound for adding K terms in float32 and rounding to its dtype."""
    exact = x.double() @ weight.T
    terms = x.double().abs() @ weight.abs().T
    rounding = torch.finfo(product.dtype).eps / 2
    allowed = (x.shape[1] + 2) * _FP32_ROUNDING * terms + rounding * exact.abs()
    error = (product.double().cpu() - exact).abs()
    ratio = torch.where(error == 0, torch.zeros_like(error), error / allowed)
    return float(ratio.nan_to_num(nan=float("inf")).max())


def _tensor_problems(check: TensorCheck) -> list[str]:
    problems = []
    if not is_power_of_two(check.tensor_scale):
        problems.append(f"{check.name}: tensor scale {check.tensor_scale:.9g} is not a power of two")
    if check.smallest_block_scale < MIN_BLOCK_SCALE:
        problems.append(f"{check.name}: a block scale is {check.smallest_block_scale:.3g}, below 2^-6")
    if check.worst_step is not None and not check.worst_step <= 1.0 + _SLACK:
        problems.append(f"{check.name}: a weight is {check.worst_step:.3g} block scales from the source, more than 1")
    if check.matmul_error is not None and not check.matmul_error <= 1.0:
        problems.append(f"{check.name}: packed and reference product differ {check.matmul_error:.3g} times the bound")
    return problems


def _group_problems(model: ModelFolder, scales: dict[str, float]) -> list[str]:
    problems = []
    shape = DecoderShape.of(model.config, model.path)
    for group in fused_groups(shape.layers, shape.groups):
        missing = [member for member in group if member not in scales]
        problems += [f"{member}: not quantised" for member in missing]
        found = {scales[member] for member in group if member in scales}
        if len(found) > 1:
            problems.append(f"{group[0]}: its fused group has {len(found)} tensor scales: {sorted(found)}")
    return problems


def _plain_names(model: ModelFolder) -> list[str]:
    packed = set(model.nvfp4_modules)
    return [name for name in model.names() if name.rpartition(".")[0] not in packed or name.endswith(".bias")]


def _plain_problems(model: ModelFolder, plain: list[str], original: SourceView) -> list[str]:
    """Tensors that were not quantised must be those of the source, after undoing AWQ's folding."""
    expected = original.plain_names(set(model.nvfp4_modules))
    problems = [f"{name}: in the source, but missing here" for name in sorted(expected - set(plain))]
    problems += [f"{name}: not in the source" for name in sorted(set(plain) - expected)]
    for name in sorted(expected & set(plain)):
        if not original.same(name, model.read(name)):
            problems.append(f"{name}: differs from the source")
    return problems
