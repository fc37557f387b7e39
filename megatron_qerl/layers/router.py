"""A frozen router: softmax over all experts in FP32, the k best, no token dropped and no auxiliary loss.

Logits are computed in the model's dtype, as Hugging Face's models and the engines compute them. The chosen experts are
put in ascending order before their weights are formed, so that a replayed choice gives the weights of a free one bit
for bit, whatever order ``topk`` returned.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_qerl.errors import FaultError
from megatron_qerl.layers.kernels import rows_linear
from megatron_qerl.layers.routing import RoutingContext, RoutingRecord


class FrozenRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's top-k router without anything that learns, and with a memory.

    Args:
        context: shared by the routers of a model.
        Others as in Megatron's ``TopKRouter``.
    """

    def __init__(self, config: TransformerConfig, *, context: RoutingContext, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.weight.requires_grad_(False)
        self.context = context
        self.carried: RoutingRecord | None = None

    @property
    def block(self) -> int:
        """Index of the decoder block; two hybrid layers make one."""
        assert self.layer_number is not None, "the layer was numbered"
        return int(self.layer_number - 1) // 2

    def gating(self, input: Tensor) -> Tensor:
        """[S, B, H] -> logits [S, B, experts] in the model's dtype."""
        return rows_linear(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [S, B, E] -> (weights [S * B, E], zero for experts not chosen; bool [S * B, E])."""
        assert padding_mask is None, "packs have no padding"
        rows = logits.reshape(-1, self.num_experts)
        experts = self._chosen(rows.detach())
        weights, _ = topk_routing_with_score_function(
            rows,
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            score_function="softmax",
            dense_output=True,
            precomputed_indices=experts,
        )
        chosen = torch.zeros_like(rows, dtype=torch.bool).scatter(1, experts, True)
        return torch.zeros_like(rows).scatter(1, experts, weights), chosen

    def _chosen(self, logits: Tensor) -> Tensor:
        """int64 [T, k], ascending: the experts in force."""
        forced = self.context.forced(self.block, self.carried)
        experts = logits.topk(self.topk, dim=1).indices.sort(dim=1).values if forced is None else self._mine(forced)
        if experts.shape[0] != logits.shape[0]:
            raise FaultError(
                f"routing record, block {self.block}",
                f"is of {experts.shape[0]} tokens, this forward has {logits.shape[0]}",
                "replay a record of the same batch",
            )
        if self.context.records:
            self.context.observe(self.block, self._everyone(experts))
        return experts.to(logits.device)

    @property
    def _split(self) -> bool:
        return bool(self.config.sequence_parallel and self.tp_group.size() > 1)

    def _mine(self, experts: Tensor) -> Tensor:
        """This rank's tokens of all; sequence parallelism gives each rank a run of rows."""
        if self._split:
            experts = experts.tensor_split(self.tp_group.size())[self.tp_group.rank()]
        return experts.long()

    def _everyone(self, experts: Tensor) -> Tensor:
        """All tokens from this rank's."""
        if not self._split:
            return experts
        parts = [torch.empty_like(experts) for _ in range(self.tp_group.size())]
        dist.all_gather(parts, experts.contiguous(), group=self.tp_group)
        return torch.cat(parts)
