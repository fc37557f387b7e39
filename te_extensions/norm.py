"""RMSNorm whose scale carries noise: y = x / rms(x) * (gamma + z), all in FP32, rounded once at the end.

Adding z in FP32 is the point. Near gamma = 1 a BF16 step is 2^-7, so a sigma of 5e-4 added in BF16 changes almost no
channel. The source of the rule y = u * (w + z) is QeRL section 3.3 (noise merging).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_noise(x: Tensor, gamma: Tensor, noise: Tensor | None, eps: float) -> Tensor:
    """Normalise the last dimension.

    Args:
        x: [..., H].
        gamma: FP32 [H], the clean scale.
        noise: FP32 [H] added to gamma, or None for the clean norm (bit-equal to a zero vector).
        eps: added to the mean square.

    Returns:
        [..., H] in x's dtype.
    """
    scale = gamma if noise is None else gamma + noise
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), scale, eps).to(x.dtype)
