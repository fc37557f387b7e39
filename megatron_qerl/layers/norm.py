"""RMSNorm with a place for noise.

The scale gamma is frozen and kept in FP32. Noise is a second FP32 vector z that is *set*, never added into gamma, so
the clean scale cannot drift and clearing the noise restores it bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_qerl.layers.kernels import rms_norm_noise


class NoiseRMSNorm(nn.Module):
    """y = x / rms(x) * (gamma + z), FP32 inside, output in x's dtype.

    Args:
        config: Megatron's; only ``sequence_parallel`` is read.
        hidden_size: H, the size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.device(torch.cuda.current_device())
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=torch.float32, device=device), requires_grad=False)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.noise: Tensor | None = None

    def set_noise(self, z: Tensor | None) -> None:
        """Replace the noise. ``z`` is FP32 [H]; None makes the norm clean again."""
        if z is not None:
            assert z.shape == self.weight.shape, "z has one value a channel"
            assert z.dtype == torch.float32, "z is FP32"
            z = z.to(self.weight.device)
        self.noise = z

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return rms_norm_noise(x, self.weight, self.noise, self.eps)
