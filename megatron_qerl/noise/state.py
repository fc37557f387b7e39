"""From a NoiseState to its noise vectors, exactly, anywhere.

Element i of the vector for (block, role) is ``sigma * normal(Philox(seed; i // 4, step, block * 8 + role, slot))``. It
depends on no rank, layout, device or earlier draw, so an engine or a replay needs the state and nothing else. ``slot``
numbers the draws within a step for scopes narrower than the rollout; scope ``rollout`` uses slot 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from megatron_qerl.config.schema import NOISE_ROLES
from megatron_qerl.rng import Domain, standard_normal, stream, stream_key
from megatron_qerl.types import NoiseState

_ROLE_CODE = {role: code for code, role in enumerate(NOISE_ROLES)}


def modules_hash(
    channels: Mapping[tuple[int, str], int], folded: Mapping[tuple[int, str], NDArray[np.float32]] | None = None
) -> str:
    """SHA-256 over the sorted (block, role, channels) of the modules that get noise, and what was folded into them."""
    digest = hashlib.sha256()
    for (block, role), size in sorted(channels.items()):
        digest.update(f"{block} {role} {size}\n".encode())
        if folded and (block, role) in folded:
            digest.update(folded[(block, role)].tobytes())
    return digest.hexdigest()


def draw(
    state: NoiseState,
    block: int,
    role: str,
    channels: int,
    slot: int = 0,
    size: NDArray[np.float64] | None = None,
) -> NDArray[np.float32]:
    """FP32 [channels]: the noise vector of one norm.

    Args:
        block: index of the decoder block; the final norm has the index after the last block.
        role: logical role, one of ``NOISE_ROLES``.
        slot: draw within the step.
        size: [channels], the deviation of z where sigma is 1; None for 1 everywhere.
    """
    words = (state.step, block * 8 + _ROLE_CODE[role], slot)
    bits = stream(stream_key(state.seed, Domain.NOISE), words, channels)
    normal = standard_normal(bits)
    z = state.sigma * normal if size is None else state.sigma * size * normal
    return z.astype(np.float32)
