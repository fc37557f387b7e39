"""What an optimizer keeps of each parameter, as whole tensors whichever ranks hold them.

Without Megatron's distributed optimizer every data-parallel rank has all of it. With it, each rank owns a flat range of
each parameter, or none: the FP32 value and the moments exist only there, and after the reduction of the gradients only
that range of them is valid. Checkpoints want whole tensors, so that any layout can resume them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor

Kind = Literal["master", "exp_avg", "exp_avg_sq", "gradient"]


@dataclass(frozen=True)
class _Place:
    """Where one parameter's state lives.

    Attributes:
        member: the Megatron optimizer that updates it (experts have one of their own).
        master: the tensor that is updated, in FP32, or None if this rank owns nothing of the parameter.
        begin, end: this rank's range of the flat parameter.
        group: ranks that own it together, or None if each of them has all of it.
    """

    member: Any
    master: Tensor | None
    begin: int
    end: int
    group: dist.ProcessGroup | None

    @property
    def store(self) -> Any:
        """Parameter state of the torch optimizer inside."""
        return self.member.optimizer.state


class ParameterState:
    """Whole tensors out of, and into, a Megatron optimizer.

    Args:
        optimizer: as ``get_megatron_optimizer`` returns it.
        parameters: all that it updates, in an order that is the same on every rank of a data-parallel group.
    """

    def __init__(self, optimizer: Any, parameters: Iterable[torch.nn.Parameter]) -> None:
        members = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        self.members = [m for m in members if not getattr(m, "is_stub_optimizer", False)]
        self._places = {p: self._place(p) for p in parameters}

    def _place(self, parameter: torch.nn.Parameter) -> _Place:
        for member in self.members:
            if isinstance(member, DistributedOptimizer):
                if not any(parameter in buffer.param_index_map for buffer in member.buffers):
                    continue
                group = member.data_parallel_group
                if parameter not in member.model_param_group_index_map:
                    return _Place(member, None, 0, 0, group)
                index, order = member.model_param_group_index_map[parameter]
                owned = member._get_model_param_range_map(parameter)["param"]
                master = member.optimizer.param_groups[index]["params"][order]
                return _Place(member, master, owned.start, owned.end, group)
            main = getattr(parameter, "main_param", None)
            master = parameter if main is None else main
            if any(master is p for g in member.optimizer.param_groups for p in g["params"]):
                return _Place(member, master, 0, parameter.numel(), None)
        raise AssertionError("every adapter parameter is some optimizer's")

    def whole(self, parameter: torch.nn.Parameter, kind: Kind) -> Tensor:
        """FP32 tensor of the parameter's shape: its value, a moment (zero before the first update) or its gradient.

        A collective of the ranks that own it together. Reading must not create a moment: an optimizer whose state is
        there but incomplete skips its own initialisation and fails at the next update.
        """
        place = self._places[parameter]
        part = self._part(place, parameter, kind)
        if place.group is None:
            assert part is not None, "a rank that shares with nobody owns all"
            return part.detach().view(parameter.shape)
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if part is not None:
            flat[place.begin : place.end] = part.detach().reshape(-1)
        # Each element has one owner; added as integers its bits stay what they are, the sign of a zero too.
        dist.all_reduce(flat.view(torch.int32), group=place.group)
        return flat.view(parameter.shape)

    def _part(self, place: _Place, parameter: torch.nn.Parameter, kind: Kind) -> Tensor | None:
        if place.master is None:
            return None
        if kind == "master":
            return place.master
        if kind == "gradient":
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            return gradient.reshape(-1)[place.begin : place.end].float()
        found: Tensor | None = place.store[place.master].get(kind) if place.master in place.store else None
        return torch.zeros_like(place.master) if found is None else found

    def put(self, parameter: torch.nn.Parameter, kind: Kind, value: Tensor) -> None:
        """Set the value or a moment from a whole tensor; this rank takes what it owns. Creates moments."""
        assert kind != "gradient", "a gradient is computed, not restored"
        place = self._places[parameter]
        if place.master is None:
            return
        target = place.master.data
        if kind != "master":
            target = place.store[place.master].setdefault(kind, torch.zeros_like(place.master.data))
        target.copy_(value.reshape(-1)[place.begin : place.end].view(target.shape))

    def set_steps(self, updates: int) -> None:
        """Adam's step counts."""
        for member in self.members:
            for group in member.optimizer.param_groups:
                if "step" in group:  # fused optimizers count a group
                    group["step"] = updates
        for place in self._places.values():
            if place.master is not None:
                place.store[place.master]["step"] = torch.tensor(float(updates))

    def masters(self) -> list[Tensor | None]:
        """What this rank updates of each parameter, in the order given."""
        return [place.master for place in self._places.values()]

    def norm_of_change(self, before: list[Tensor | None]) -> float:
        """L2 norm over all ranks of the masters' change since ``before``, copies of ``masters``; a collective.

        Parameters that several ranks hold alike are counted once, by Megatron's rule for gradient norms.
        """
        squares = {id(m): torch.zeros((), dtype=torch.float64) for m in self.members}
        expert_group = parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
        for (parameter, place), old in zip(self._places.items(), before, strict=True):
            if place.master is None or old is None:
                continue
            if param_is_not_tensor_parallel_duplicate(parameter, expert_tp_group=expert_group):
                change = (place.master.detach() - old).double().square().sum()
                squares[id(place.member)] += change.cpu()
        total = 0.0
        for member in self.members:
            device = next(iter(self._places)).device
            part = squares[id(member)].to(device)
            dist.all_reduce(part, group=member.get_grad_stats_parallel_group())
            total += float(part)
        return total**0.5

    def nbytes(self) -> int:
        """Masters (if apart), moments and gradient buffers of this rank."""
        total = 0
        for parameter, place in self._places.items():
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            total += gradient.numel() * gradient.element_size()
            if place.master is not None:
                apart = place.master.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()
                total += (3 if apart else 2) * place.master.numel() * 4
        return total
