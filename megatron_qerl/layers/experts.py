"""Frozen experts with adapters: what Megatron's MoE layer calls with the tokens that were dispatched to this rank.

Rows arrive sorted by local expert. One stack holds every local expert's gate and up, fused as in a dense linear_fc1,
and one every down. Under expert tensor parallelism each rank of the group has the same tokens and a part of every
expert's width; the parts of the output are summed by the dispatcher when it sends tokens back.

Router weights are applied to the activation between the two products, where a row is narrowest. With y = [gate | up],
act = p silu(gate) up; only y and p are kept for backward.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_qerl.layers.expert_lora import ExpertAdapter
from megatron_qerl.layers.grouped import ExpertStack
from megatron_qerl.layers.layout import FusedLayout
from megatron_qerl.layers.linear import gate_up_layout
from megatron_qerl.layers.lora import LoraSpec


class _WeightedGate(torch.autograd.Function):
    """([T, 2 F], [T]) -> p silu(gate) up, [T, F]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, probs: Tensor) -> Tensor:
        ctx.save_for_backward(y, probs)
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate).mul_(up).mul_(probs.to(y.dtype).unsqueeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, probs = ctx.saved_tensors
        gate, up = y.chunk(2, dim=-1)
        silu = F.silu(gate)
        grad_probs = (grad * silu * up).sum(dim=1, dtype=torch.float32).to(probs.dtype)
        weighted = grad * probs.to(y.dtype).unsqueeze(1)
        grad_gate = torch.ops.aten.silu_backward(weighted * up, gate)
        return torch.cat((grad_gate, weighted * silu), dim=-1), grad_probs


class ExpertLinear(nn.Module):
    """One (fused) linear of every local expert: a frozen stack and an adapter.

    Args:
        layout: rows of one expert's matrix on this rank.
        in_features: K on this rank.
        first: index of the first local expert among all.
        mode: how expert tensor parallelism splits it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layout: FusedLayout,
        in_features: int,
        num_local: int,
        first: int,
        mode: Literal["column", "row"],
        groups: ProcessGroupCollection,
        lora: LoraSpec | None,
    ) -> None:
        super().__init__()
        self.layout, self.in_features, self.mode = layout, in_features, mode
        self.num_local, self.first, self.groups = num_local, first, groups
        self._frozen: ExpertStack | None = None
        self.adapter: ExpertAdapter | None = None
        if lora is not None and lora.expert_mode != "none" and set(layout.names) & set(lora.targets):
            self.adapter = ExpertAdapter(
                lora,
                layout,
                in_features,
                num_local,
                mode,
                groups.expt_tp,
                config.sequence_parallel,
                config.params_dtype,
                torch.device(torch.cuda.current_device()),
            )

    @property
    def frozen(self) -> ExpertStack:
        assert self._frozen is not None, "the base weights were not loaded"
        return self._frozen

    def install(self, stack: ExpertStack) -> None:
        """Put the frozen base in place, rows in fused order."""
        expected = (self.num_local, self.layout.rows, self.in_features)
        assert stack.shape == expected, f"the stack is {stack.shape}, the layer needs {expected}"
        self._frozen = stack

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """[T, K] -> [T, N], rows sorted by local expert; in row mode a part of the sum over the group."""
        y = self.frozen.multiply(x, counts)
        return y if self.adapter is None else y + self.adapter(x, counts)


class FrozenExperts(MegatronModule):  # type: ignore[misc]
    """The local experts of one block.

    Args:
        num_local_experts: experts on this rank.
        config: Megatron's.
        lora: adapter settings, or None for bare frozen experts.
        pg_collection: process groups.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        lora: LoraSpec | None,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        assert config.gated_linear_unit, "an expert is silu(gate) * up"
        assert config.activation_func is F.silu, "an expert is silu(gate) * up"
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        first = pg_collection.ep.rank() * num_local_experts
        hidden = config.hidden_size
        gate_up, down = gate_up_layout(2 * width), FusedLayout((("down_proj", hidden),), groups=1)
        self.fc1 = ExpertLinear(config, gate_up, hidden, num_local_experts, first, "column", pg_collection, lora)
        self.fc2 = ExpertLinear(config, down, width, num_local_experts, first, "row", pg_collection, lora)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Rows [T, H] sorted by local expert, their counts [E] and router weights [T] -> ([T, H], None)."""
        counts = tokens_per_expert.cpu()
        act: Tensor = _WeightedGate.apply(self.fc1(tokens, counts), probs)
        return self.fc2(act, counts), None

    def backward_dw(self) -> None:
        """Megatron's split backward has nothing to do here: the base has no weight gradient."""
