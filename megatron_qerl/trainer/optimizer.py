"""Megatron's optimizer over the adapter parameters, and its learning-rate schedule.

The model is wrapped in Megatron's DistributedDataParallel, whose gradient buffers hold only parameters that require a
gradient: the adapters. In BF16 the optimizer keeps FP32 master copies; their values, the two Adam moments and the step
count are what a checkpoint needs to go on bit for bit (``optimizer_state``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_qerl.config.schema import OptimizerSection
from megatron_qerl.models.policy import PolicyChunks
from megatron_qerl.parallel.cpu import megatron_calls
from megatron_qerl.trainer.optimizer_state import ParameterState


@dataclass(frozen=True)
class UpdateReport:
    """One optimizer update.

    Attributes:
        gradient_norm: global norm before clipping.
        clipped: whether the norm exceeded the clip.
        learning_rate: rate used.
        update_norm: L2 norm of the change of all adapter parameters.
    """

    gradient_norm: float
    clipped: bool
    learning_rate: float
    update_norm: float


class AdapterOptimizer:
    """AdamW on a model's adapters.

    Args:
        model: built, loaded and initialised; only adapters require gradients.
        config: optimizer settings.
        total_updates: length of the schedule.
        distributed: spread masters and moments over the data-parallel ranks (Megatron's distributed optimizer).
    """

    def __init__(
        self, model: PolicyChunks, config: OptimizerSection, total_updates: int, *, distributed: bool = False
    ) -> None:
        self.config, self.policy = config, model
        bf16 = model.config.params_dtype == torch.bfloat16
        # Gradients are summed over tokens and divided once by the global token count, which Megatron counts for us.
        model.config.calculate_per_token_loss = True
        model.config.finalize_model_grads_func = finalize_model_grads
        with megatron_calls():
            self.ddp = [
                DistributedDataParallel(
                    model.config,
                    DistributedDataParallelConfig(
                        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed
                    ),
                    chunk,
                )
                for chunk in model.models
            ]
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=config.learning_rate,
                    min_lr=config.min_learning_rate,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.adam_beta1,
                    adam_beta2=config.adam_beta2,
                    adam_eps=config.adam_epsilon,
                    clip_grad=config.gradient_clip,
                    bf16=bf16,
                    params_dtype=model.config.params_dtype,
                    use_distributed_optimizer=distributed,
                ),
                self.ddp,
            )
            self.scheduler = OptimizerParamScheduler(
                self.optimizer,
                init_lr=0.0,
                max_lr=config.learning_rate,
                min_lr=min(config.min_learning_rate, config.learning_rate),
                lr_warmup_steps=config.warmup_steps,
                lr_decay_steps=total_updates,
                lr_decay_style=config.schedule,
                start_wd=config.weight_decay,
                end_wd=config.weight_decay,
                wd_incr_steps=total_updates,
                wd_incr_style="constant",
            )
        self.state = ParameterState(self.optimizer, [p for _, p in self.parameters()])

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return int(self.scheduler.num_steps)

    def zero_grad(self) -> None:
        """Clear the gradient buffers before a batch."""
        with megatron_calls():
            for chunk in self.ddp:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Adapter parameters on this rank, in the model's order."""
        return [(n, p) for n, p in self.policy.named_parameters() if p.requires_grad]

    def non_finite_gradients(self) -> list[str]:
        """Names of parameters whose accumulated gradient holds inf or nan on this rank."""
        return [n for n, p in self.parameters() if not bool(torch.isfinite(p.main_grad).all())]  # type: ignore[attr-defined]

    def step(self) -> UpdateReport:
        """One update with the accumulated gradients. The first update of a warm-up has rate max / warmup_steps."""
        before = [None if m is None else m.detach().clone() for m in self.state.masters()]
        with megatron_calls():
            self.scheduler.step(increment=1)
            _, gradient_norm, _ = self.optimizer.step()
        norm = float(gradient_norm)
        change = self.state.norm_of_change(before)
        return UpdateReport(norm, norm > self.config.gradient_clip, self.learning_rate, change)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def master(self, parameter: torch.nn.Parameter) -> Tensor:
        """FP32 value that the optimizer updates, whole."""
        return self.state.whole(parameter, "master")

    def set_updates(self, updates: int) -> None:
        """Continue after ``updates`` updates: schedule position and Adam's step counts."""
        self.scheduler.num_steps = 0
        with megatron_calls():
            self.scheduler.step(increment=updates)
        self.state.set_steps(updates)

    @property
    def state_bytes(self) -> int:
        """Masters (if apart), moments and gradient buffers of this rank."""
        return self.state.nbytes()
