"""The mixture-of-experts layer: Megatron's, with our router and experts, and a say in what the router sees.

The norm before it carries noise, and feeds both the experts and the router. ``noise.router: clean`` lets the router see
the norm without noise, so that the noise acts inside the experts and does not decide which ones. ``noisy`` leaves the
router the input of the experts, as a stock engine with noisy norms has it.
"""

from __future__ import annotations

from typing import Any, Literal

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_qerl.layers.dispatch import AnyBackendAlltoAll, PaddedAllGather
from megatron_qerl.layers.kernels import rms_norm_noise
from megatron_qerl.layers.norm import NoiseRMSNorm

RouterInput = Literal["clean", "noisy"]


class FrozenMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's MoE layer; ``routing_input`` replaces what the router sees in the next forward."""

    def __init__(self, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(*args, pg_collection=groups, **kwargs)
        dispatcher = PaddedAllGather if self.config.moe_token_dispatcher_type == "allgather" else AnyBackendAlltoAll
        self.token_dispatcher = dispatcher(
            self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=groups
        )
        self.routing_input: Tensor | None = None

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(weights, choices), each [tokens, experts]."""
        seen = hidden_states if self.routing_input is None else self.routing_input
        result: tuple[Tensor, Tensor] = self.router(seen, padding_mask)
        return result


class RoutedLayer(TransformerLayer):  # type: ignore[misc]
    """The MoE half of a block: norm, route, experts, residual.

    Args:
        router_input: whether the router sees the norm with its noise.
        Others as in Megatron's ``TransformerLayer``.
    """

    def __init__(self, *args: Any, router_input: RouterInput = "noisy", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self.mlp, FrozenMoELayer), "an MoE layer stands where the MLP would"
        assert isinstance(self.pre_mlp_layernorm, NoiseRMSNorm), "the norm takes noise"
        self.router_input = router_input

    def _forward_mlp(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        padding_mask: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        norm, moe = self.pre_mlp_layernorm, self.mlp
        moe.router.carried = getattr(packed_seq_params, "routing", None)
        if self.router_input == "clean" and norm.noise is not None:
            moe.routing_input = rms_norm_noise(hidden_states, norm.weight, None, norm.eps)
        try:
            result: Tensor = super()._forward_mlp(hidden_states, inference_context, padding_mask, packed_seq_params)
        finally:
            moe.routing_input = moe.router.carried = None
        return result
