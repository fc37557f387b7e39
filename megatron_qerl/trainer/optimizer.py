"""Megatron's optimizer over the adapter parameters, and its learning-rate schedule.

The model is wrapped in Megatron's DistributedDataParallel, whose gradient buffers hold only parameters that require a
gradient: the adapters. In BF16 the optimizer keeps FP32 master copies; their values, the two Adam moments and the step
count are what a checkpoint needs to go on bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_qerl.config.schema import OptimizerSection
from megatron_qerl.models.policy import PolicyModel
from megatron_qerl.parallel.cpu import megatron_calls


@dataclass(frozen=True)
class UpdateReport:
    """One optimizer update.

    Attributes:
        gradient_norm: global norm before clipping.
        clipped: whether the norm exceeded the clip.
        learning_rate: rate used.
        update_norm: L2 norm of the change of this rank's parameters.
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
    """

    def __init__(self, model: PolicyModel, config: OptimizerSection, total_updates: int) -> None:
        self.config, self.policy = config, model
        bf16 = model.config.params_dtype == torch.bfloat16
        # Gradients are summed over tokens and divided once by the global token count, which Megatron counts for us.
        model.config.calculate_per_token_loss = True
        model.config.finalize_model_grads_func = finalize_model_grads
        with megatron_calls():
            self.ddp = DistributedDataParallel(
                model.config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
                ),
                model,
            )
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
                    use_distributed_optimizer=False,
                ),
                [self.ddp],
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

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return int(self.scheduler.num_steps)

    def zero_grad(self) -> None:
        """Clear the gradient buffers before a batch."""
        with megatron_calls():
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Adapter parameters on this rank, in the model's order."""
        return [(n, p) for n, p in self.policy.named_parameters() if p.requires_grad]

    def non_finite_gradients(self) -> list[str]:
        """Names of parameters whose accumulated gradient holds inf or nan."""
        return [n for n, p in self.parameters() if not bool(torch.isfinite(p.main_grad).all())]  # type: ignore[attr-defined]

    def step(self) -> UpdateReport:
        """One update with the accumulated gradients. The first update of a warm-up has rate max / warmup_steps."""
        masters = [_master(p) for _, p in self.parameters()]
        before = [m.detach().clone() for m in masters]
        with megatron_calls():
            self.scheduler.step(increment=1)
            _, gradient_norm, _ = self.optimizer.step()
        change = sum(float((m.detach() - b).double().square().sum()) for m, b in zip(masters, before, strict=True))
        norm = float(gradient_norm)
        return UpdateReport(norm, norm > self.config.gradient_clip, self.learning_rate, change**0.5)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    # What a checkpoint holds: one view a kind of tensor, for models.adapter_state.

    def master(self, parameter: torch.nn.Parameter) -> Tensor:
        """FP32 value that the optimizer updates."""
        return _master(parameter).data

    def moment(self, name: str, *, create: bool) -> Any:
        """View of an Adam moment ("exp_avg" or "exp_avg_sq").

        Args:
            create: for restoring: make the state where there is none yet. Reading must not: an optimizer whose state is
                there but incomplete skips its own initialisation and fails at the next update.
        """

        def view(parameter: torch.nn.Parameter) -> Tensor:
            state = self._inner().state
            master = _master(parameter)
            if not create:
                found: Tensor | None = state[master].get(name) if master in state else None
                return torch.zeros_like(master.data) if found is None else found
            result: Tensor = state[master].setdefault(name, torch.zeros_like(master.data))
            return result

        return view

    def _inner(self) -> torch.optim.Optimizer:
        chain = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        assert len(chain) == 1, "dense adapters are one optimizer"
        inner: torch.optim.Optimizer = chain[0].optimizer
        return inner

    def set_updates(self, updates: int) -> None:
        """Continue after ``updates`` updates: schedule position and Adam's step counts."""
        self.scheduler.num_steps = 0
        with megatron_calls():
            self.scheduler.step(increment=updates)
        for group in self._inner().param_groups:
            if "step" in group:  # fused optimizers count a group
                group["step"] = updates
        for _, parameter in self.parameters():
            self._inner().state[_master(parameter)]["step"] = torch.tensor(float(updates))

    @property
    def state_bytes(self) -> int:
        """Masters (if apart), moments and gradient buffers of this rank."""
        total = 0
        for _, p in self.parameters():
            master = _master(p)
            total += 2 * master.numel() * 4 + p.main_grad.numel() * p.main_grad.element_size()  # type: ignore[attr-defined]
            if master is not p:
                total += master.numel() * 4
        return total


def _master(parameter: torch.nn.Parameter) -> Tensor:
    """The tensor that the optimizer updates: an FP32 copy in BF16 training, the parameter itself in FP32."""
    main = getattr(parameter, "main_param", None)
    return parameter if main is None else main
