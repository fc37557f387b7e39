"""A checkpoint's bytes -> the model. Each rank reads only its own slice of each tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_qerl.errors import CheckpointError
from megatron_qerl.layers.frozen import DenseFrozen, NVFP4Frozen
from megatron_qerl.layers.kernels import NVFP4Weight
from megatron_qerl.layers.linear import FrozenColumnParallelLinear, FrozenRowParallelLinear
from megatron_qerl.layers.lora import initial_a
from megatron_qerl.models.families import ExpertRule, LinearRule, NormRule, RouterRule, VocabRule
from megatron_qerl.models.load_experts import load_experts, tensor_names
from megatron_qerl.models.policy import PolicyChunks
from megatron_qerl.models.shape import ModelShape
from megatron_qerl.models.walk import factors, hf_name, modules
from megatron_qerl.nvfp4.checkpoint import ModelFolder, PackedWeight
from megatron_qerl.nvfp4.shared_scale import share_tensor_scale

Linear = FrozenColumnParallelLinear | FrozenRowParallelLinear


def _shard(size: int, rank: int, world: int) -> slice:
    return slice(rank * size // world, (rank + 1) * size // world)


class _Loader:
    """State of one load: where from, which rank, which dtype."""

    def __init__(self, folder: ModelFolder, dtype: torch.dtype, device: torch.device, *, resident: bool) -> None:
        self.folder, self.dtype, self.device, self.resident = folder, dtype, device, resident
        self.rank = parallel_state.get_tensor_model_parallel_rank()
        self.world = parallel_state.get_tensor_model_parallel_world_size()
        self.used: set[str] = set()

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """Read a slice and remember that the tensor was used."""
        self.used.add(name)
        return self.folder.read(name, rows=rows, cols=cols)

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        found = tuple(self.folder.shape(name))
        if found != shape:
            raise CheckpointError(
                f"{name} in {self.folder.path}", found, f"the model's config.json needs {shape}", "use matching files"
            )

    def norm(self, rule: NormRule, block: int | None, module: Any) -> None:
        name = hf_name(rule.hf, block)
        self._expect(name, tuple(module.weight.shape))
        module.weight.data.copy_(self.read(name).float())

    def router(self, rule: RouterRule, block: int | None, module: Any) -> None:
        name = hf_name(rule.hf, block)
        self._expect(name, tuple(module.weight.shape))
        module.weight.data.copy_(self.read(name).to(self.dtype))

    def vocab(self, rule: VocabRule, module: Any, vocab_size: int) -> None:
        if module.weight is None:
            return
        local, hidden = module.weight.shape
        self._expect(rule.hf, (vocab_size, hidden))
        begin = self.rank * local
        rows = self.read(rule.hf, rows=slice(begin, min(begin + local, vocab_size)))
        module.weight.data.zero_()
        module.weight.data[: rows.shape[0]].copy_(rows.to(self.dtype))

    def linear(self, rule: LinearRule, block: int | None, module: Linear) -> None:
        column = isinstance(module, FrozenColumnParallelLinear)
        parts = {projection: hf_name(path, block) for projection, path in rule.parts.items()}
        local_rows = dict(module.layout.parts)
        self._expect_linear(parts, local_rows, module, column)
        slices = {
            projection: _shard(local_rows[projection] * (self.world if column else 1), self.rank, self.world)
            if column
            else None
            for projection in parts
        }
        cols = None if column else _shard(module.input_size, self.rank, self.world)
        if self.folder.is_nvfp4(next(iter(parts.values()))):
            self.used.update(
                n for n in self.folder.names() if n.rpartition(".")[0] in parts.values() and not n.endswith(".bias")
            )
            packed = share_tensor_scale(
                {path: self.folder.read_nvfp4(path, rows=slices[p], cols=cols) for p, path in parts.items()}
            )
            module.install(self._fuse_nvfp4(module, {p: packed[path] for p, path in parts.items()}))
        else:
            dense = {p: self.read(f"{path}.weight", rows=slices[p], cols=cols) for p, path in parts.items()}
            fused = module.layout.fuse_rows({p: t.contiguous() for p, t in dense.items()})
            module.install(DenseFrozen(fused.to(self.device, self.dtype)))
        if module.bias is not None:
            biases = {p: self.read(f"{path}.bias", rows=slices[p]).contiguous() for p, path in parts.items()}
            module.bias.data.copy_(module.layout.fuse_rows(biases).to(self.dtype))

    def _expect_linear(self, parts: dict[str, str], rows: dict[str, int], module: Linear, column: bool) -> None:
        for projection, path in parts.items():
            n = rows[projection] * (self.world if column else 1)
            k = module.input_size
            if self.folder.is_nvfp4(path):
                found = self.folder.nvfp4_shape(path)
                if found != (n, k):
                    raise CheckpointError(
                        f"{path}.weight in {self.folder.path}",
                        found,
                        f"the model's config.json needs {(n, k)}",
                        "use matching files",
                    )
            else:
                self._expect(f"{path}.weight", (n, k))

    def _fuse_nvfp4(self, module: Linear, parts: dict[str, PackedWeight]) -> NVFP4Frozen:
        def fuse(tensors: dict[str, Tensor]) -> Tensor:
            return module.layout.fuse_rows({p: t.contiguous() for p, t in tensors.items()})

        packed = fuse({p: w.packed for p, w in parts.items()})
        # torch has no cat for FP8; the bytes are what moves.
        scales = fuse({p: w.block_scale.view(torch.uint8) for p, w in parts.items()}).view(torch.float8_e4m3fn)
        scale = float(next(iter(parts.values())).tensor_scale)
        weight = NVFP4Weight(packed.to(self.device), scales.to(self.device), scale)
        return NVFP4Frozen(weight, self.dtype, resident=self.resident)


def load_base(model: PolicyChunks, shape: ModelShape, folder: ModelFolder, *, resident: bool) -> None:
    """Fill the frozen base from ``folder`` (NVFP4 or dense, decided a tensor at a time).

    Args:
        resident: keep a dequantised copy of each packed matrix.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or cannot share a tensor scale with its group.
    """
    device = torch.device(torch.cuda.current_device())
    loader = _Loader(folder, model.config.params_dtype, device, resident=resident)
    for block, rule, module in modules(model, shape):
        if isinstance(rule, NormRule):
            loader.norm(rule, block, module)
        elif isinstance(rule, VocabRule):
            loader.vocab(rule, module, shape.vocab_size)
        elif isinstance(rule, RouterRule):
            loader.router(rule, block, module)
        elif isinstance(rule, ExpertRule):
            loader.used |= tensor_names(rule, block, module)
            load_experts(folder, rule, block, module, model.config.params_dtype, device, resident=resident)
        else:
            loader.linear(rule, block, module)
    last = model.models[-1]
    if shape.tied and last.post_process and not last.pre_process:
        # The head of a pipeline's last stage is a matrix of its own with the embedding's bytes.
        loader.vocab(_embedding_rule(shape), last.output_layer, shape.vocab_size)
    if resident:
        model.widen_head()
    used: list[set[str]] = [set()] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(used, loader.used, group=parallel_state.get_pipeline_model_parallel_group())
    _refuse_unused(folder, set().union(*used), tied=shape.tied)


def _embedding_rule(shape: ModelShape) -> VocabRule:
    rules = shape.family.rules(shape.num_blocks, tied=shape.tied)
    return next(rule for _, rule in rules if isinstance(rule, VocabRule))


def _refuse_unused(folder: ModelFolder, used: set[str], *, tied: bool) -> None:
    """A tensor that nobody read means that the config or the table describes another model."""
    ignorable = (".input_scale", "rotary_emb.inv_freq", *(("lm_head.weight",) if tied else ()))
    unused = [n for n in folder.names() if n not in used and not n.endswith(ignorable)]
    if unused:
        raise CheckpointError(
            f"{unused[0]} in {folder.path}",
            f"unused, with {len(unused) - 1} others",
            "every tensor of the folder must have a place in the model that its config.json describes",
            "use the config.json that belongs to these weights",
        )


def initialize_adapters(model: PolicyChunks, shape: ModelShape) -> None:
    """A from each projection's own stream, B zero: the policy starts as the base, on every layout alike."""
    for factor in factors(model, shape):
        local = factor.parameter.data[factor.index]
        if factor.kind == "lora_B":
            local.zero_()
            continue
        split = 1 if factor.sharded_dim is None else factor.group.size()
        full = initial_a(factor.spec, factor.path, local.shape[1] * split)
        local.copy_(full[:, _shard(full.shape[1], factor.group.rank(), split)] if split > 1 else full)
