"""Megatron's column- and row-parallel linears with a frozen base and a LoRA adapter inside.

They subclass Megatron's own classes, so that module specs, checkpoint code and isinstance checks see what they expect,
but hold no trainable weight: the base is a ``FrozenWeight`` that the loader puts in place, in whatever format the
checkpoint has. The backward through the base is one product with the same matrix and saves no activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_qerl.layers.frozen import FrozenWeight
from megatron_qerl.layers.kernels import rows_linear
from megatron_qerl.layers.layout import FusedLayout
from megatron_qerl.layers.lora import LoraAdapter, LoraSpec

# Megatron's name of a row-parallel linear's place -> Hugging Face's name of the projection in it.
ROW_PROJECTIONS = {"proj": "o_proj", "fc2": "down_proj"}


def qkv_layout(config: TransformerConfig, tp_size: int) -> FusedLayout:
    """Rows of linear_qkv on one rank: per attention group its queries, its key, its value."""
    head = config.kv_channels
    queries, groups = config.num_attention_heads // tp_size, config.num_query_groups // tp_size
    return FusedLayout(
        (("q_proj", queries * head), ("k_proj", groups * head), ("v_proj", groups * head)), groups=groups
    )


def gate_up_layout(rows: int) -> FusedLayout:
    """Rows of a gated linear_fc1 on one rank: this rank's gate, then this rank's up."""
    return FusedLayout((("gate_proj", rows // 2), ("up_proj", rows // 2)), groups=1)


class _FrozenBase:
    """What the two linears share: the base's place and the adapter's construction."""

    layout: FusedLayout
    adapter: LoraAdapter | None
    weight: None
    bias: torch.nn.Parameter | None
    _frozen: FrozenWeight | None

    def set_frozen(self, weight: FrozenWeight, expected: tuple[int, int]) -> None:
        """Put the base in place. ``expected`` is (N, K) on this rank."""
        assert weight.shape == expected, f"base is {weight.shape}, the layer needs {expected}"
        self._frozen = weight

    @property
    def frozen(self) -> FrozenWeight:
        assert self._frozen is not None, "the base weight was not loaded"
        return self._frozen


class FrozenColumnParallelLinear(ColumnParallelLinear, _FrozenBase):  # type: ignore[misc]
    """Y = X W^T + b with W split along its rows, W frozen, plus the adapter.

    Args:
        lora: adapter settings, or None for a bare frozen linear.
        Others as in Megatron's ``ColumnParallelLinear``; ``tp_comm_buffer_name`` ("qkv" or "fc1") names the layout.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], None],
        lora: LoraSpec | None = None,
        tp_comm_buffer_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            skip_weight_param_allocation=True,
            tp_comm_buffer_name=tp_comm_buffer_name,
            **kwargs,
        )
        tp_size = self.output_size // self.output_size_per_partition
        if tp_comm_buffer_name == "qkv":
            self.layout = qkv_layout(config, tp_size)
        else:
            self.layout = gate_up_layout(self.output_size_per_partition)
        assert self.layout.rows == self.output_size_per_partition
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self._frozen = None
        self.adapter = _adapter(self, lora, input_size, "column")

    def install(self, weight: FrozenWeight) -> None:
        """Put the frozen base in place, rows in fused order."""
        self.set_frozen(weight, (self.output_size_per_partition, self.input_size))

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, K] -> ([s, b, N / tp], bias if ``skip_bias_add``)."""
        assert weight is None, "the frozen base cannot be replaced for one call"
        if self.sequence_parallel:
            x = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        else:
            x = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        update = None if self.adapter is None else (self.adapter.low_rank(input_), self.adapter.expansion())
        y = self.frozen.multiply(x, update)
        if self.bias is not None and not self.skip_bias_add:
            y = y + self.bias
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            y = gather_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y, (self.bias if self.skip_bias_add else None)


class FrozenRowParallelLinear(RowParallelLinear, _FrozenBase):  # type: ignore[misc]
    """Y = X W^T + b with W split along its columns, W frozen, plus the adapter.

    Args:
        lora: adapter settings, or None for a bare frozen linear.
        tp_comm_buffer_name: Megatron's name of the place, "proj" or "fc2"; it says which projection this is.
        Others as in Megatron's ``RowParallelLinear``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], None],
        lora: LoraSpec | None = None,
        tp_comm_buffer_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        # Megatron's class has no switch for "no weight"; a meta tensor costs nothing and is dropped below.
        with torch.device("meta"):
            super().__init__(
                input_size,
                output_size,
                config=_uninitialised(config),
                init_method=init_method,
                tp_comm_buffer_name=tp_comm_buffer_name,
                **kwargs,
            )
        self.config = config
        del self.weight
        self.weight = None
        if self.bias is not None:
            bias = torch.zeros(output_size, dtype=config.params_dtype, device=torch.cuda.current_device())
            self.bias = torch.nn.Parameter(bias, requires_grad=False)
        assert tp_comm_buffer_name in ROW_PROJECTIONS, f"no row-parallel projection is called {tp_comm_buffer_name}"
        self.layout = FusedLayout(((ROW_PROJECTIONS[tp_comm_buffer_name], output_size),), groups=1)
        self._frozen = None
        self.adapter = _adapter(self, lora, self.input_size_per_partition, "row")

    def install(self, weight: FrozenWeight) -> None:
        """Put the frozen base in place."""
        self.set_frozen(weight, (self.output_size, self.input_size_per_partition))

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, K / tp] -> ([s, b, N], bias if ``skip_bias_add``)."""
        x = input_ if self.input_is_parallel else scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        if self.adapter is None:
            return self.finish(self.frozen.multiply(x), None)
        if self.tp_group.size() == 1:
            y = self.frozen.multiply(x, (self.adapter.low_rank(x), self.adapter.expansion()))
            return self.finish(y, None)
        return self.finish(self.frozen.multiply(x), rows_linear(x, self.adapter.lora_A))

    def finish(self, partial: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What follows the two products that read the input.

        Args:
            partial: W x on this rank, [s, b, N], to be summed over the ranks.
            u: A x on this rank, [s, b, r], likewise; None if there is no adapter or ``partial`` holds its term.

        Returns:
            As ``forward``.
        """
        if self.sequence_parallel:
            y = reduce_scatter_to_sequence_parallel_region(partial, group=self.tp_group)
        else:
            y = reduce_from_tensor_model_parallel_region(partial, group=self.tp_group)
        if u is not None:
            assert self.adapter is not None, "u is an adapter's"
            u = self.adapter.reduced(u if self.adapter.spec.scale == 1.0 else u * self.adapter.spec.scale)
            low = u.reshape(-1, u.shape[-1])
            y = torch.addmm(y.reshape(-1, y.shape[-1]), low, self.adapter.expansion().t()).view(y.shape)
        if self.bias is not None and not self.skip_bias_add:
            y = y + self.bias
        return y, (self.bias if self.skip_bias_add else None)


def _uninitialised(config: TransformerConfig) -> TransformerConfig:
    """A shallow copy of ``config`` under which Megatron allocates a weight but draws nothing into it."""
    from copy import copy

    clone = copy(config)
    clone.perform_initialization = False
    clone.use_cpu_initialization = True
    return clone


def _adapter(
    layer: FrozenColumnParallelLinear | FrozenRowParallelLinear, lora: LoraSpec | None, in_features: int, mode: Any
) -> LoraAdapter | None:
    if lora is None or not set(layer.layout.names) & set(lora.targets):
        return None
    return LoraAdapter(
        lora,
        layer.layout,
        in_features,
        mode,
        layer.tp_group,
        layer.sequence_parallel,
        layer.config.params_dtype,
        torch.device(torch.cuda.current_device()),
    )
