"""Experts' bytes -> the stacks of a block, each rank its own experts and its own part of their width."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_qerl.errors import CheckpointError
from megatron_qerl.layers.experts import ExpertLinear
from megatron_qerl.layers.grouped import DenseExperts, ExpertStack, NVFP4Experts
from megatron_qerl.models.families import ExpertRule
from megatron_qerl.models.walk import hf_name
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.shared_scale import share_tensor_scale

_SUFFIXES = ("weight", "weight_scale", "weight_scale_2", "weight_packed", "weight_global_scale", "input_global_scale")


def tensor_names(rule: ExpertRule, block: int | None, module: ExpertLinear) -> set[str]:
    """Names under which a checkpoint may hold the experts of one stack, of all ranks."""
    count = module.num_local * module.groups.ep.size()
    return {f"{hf_name(p, block, e)}.{s}" for p in rule.parts.values() for e in range(count) for s in _SUFFIXES}


def _part(size: int, module: ExpertLinear) -> slice:
    """This rank's run of ``size`` rows or columns under expert tensor parallelism."""
    rank, world = module.groups.expt_tp.rank(), module.groups.expt_tp.size()
    return slice(rank * size // world, (rank + 1) * size // world)


def _expect(folder: ModelFolder, path: str, found: tuple[int, ...], wanted: tuple[int, int]) -> None:
    if found != wanted:
        raise CheckpointError(
            f"{path}.weight in {folder.path}", found, f"the model's config.json needs {wanted}", "use matching files"
        )


def _fuse(module: ExpertLinear, parts: dict[str, Tensor]) -> Tensor:
    return module.layout.fuse_rows({name: tensor.contiguous() for name, tensor in parts.items()})


def load_experts(
    folder: ModelFolder,
    rule: ExpertRule,
    block: int | None,
    module: ExpertLinear,
    dtype: torch.dtype,
    device: torch.device,
    *,
    resident: bool,
) -> None:
    """Install the stack of one expert linear.

    Args:
        dtype: of dense matrices and of a dequantised copy.
        resident: keep such a copy.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or cannot share a tensor scale with its group; or some
            of the experts are packed and others are not.
    """
    width = module.groups.expt_tp.size()
    column = module.mode == "column"
    experts = [
        {name: hf_name(path, block, module.first + e) for name, path in rule.parts.items()}
        for e in range(module.num_local)
    ]
    rows = dict(module.layout.parts)
    n = {name: count * (width if column else 1) for name, count in rows.items()}
    k = module.in_features * (1 if column else width)
    packed = folder.is_nvfp4(next(iter(experts[0].values())))
    for paths in experts:
        for name, path in paths.items():
            if folder.is_nvfp4(path) != packed:
                raise CheckpointError(
                    f"{path} in {folder.path}",
                    "unquantised" if packed else "quantised",
                    "all experts of a block are stored alike",
                    "quantise the original model again",
                )
            found = folder.nvfp4_shape(path) if packed else folder.shape(f"{path}.weight")
            _expect(folder, path, found, (n[name], k))
    part_rows = {name: _part(n[name], module) if column else None for name in rows}
    part_cols = None if column else _part(k, module)
    stack = _packed if packed else _dense
    module.install(stack(folder, experts, module, part_rows, part_cols, dtype, device, resident=resident))


def _packed(
    folder: ModelFolder,
    experts: list[dict[str, str]],
    module: ExpertLinear,
    rows: dict[str, slice | None],
    cols: slice | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    resident: bool,
) -> ExpertStack:
    shape = (module.num_local, module.layout.rows)
    codes = torch.empty(*shape, module.in_features // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(*shape, module.in_features // 16, dtype=torch.uint8, device=device)
    tensor_scales = []
    for index, paths in enumerate(experts):
        read = {path: folder.read_nvfp4(path, rows=rows[name], cols=cols) for name, path in paths.items()}
        shared = share_tensor_scale(read)
        codes[index].copy_(_fuse(module, {name: shared[path].packed for name, path in paths.items()}))
        # torch has no cat for FP8; the bytes are what moves.
        blocks = {name: shared[path].block_scale.view(torch.uint8) for name, path in paths.items()}
        scales[index].copy_(_fuse(module, blocks))
        tensor_scales.append(float(next(iter(shared.values())).tensor_scale))
    return NVFP4Experts(codes, scales.view(torch.float8_e4m3fn), tensor_scales, dtype, resident=resident)


def _dense(
    folder: ModelFolder,
    experts: list[dict[str, str]],
    module: ExpertLinear,
    rows: dict[str, slice | None],
    cols: slice | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    resident: bool,
) -> ExpertStack:
    stack = torch.empty(module.num_local, module.layout.rows, module.in_features, dtype=dtype, device=device)
    for index, paths in enumerate(experts):
        parts = {name: folder.read(f"{path}.weight", rows=rows[name], cols=cols) for name, path in paths.items()}
        stack[index].copy_(_fuse(module, parts))
    return DenseExperts(stack)
