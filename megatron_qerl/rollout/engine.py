"""What a rollout engine promises, whichever engine it is.

An engine owns its key-value cache and its copy (or share) of the policy. It is told which policy to be (`publish`),
and from then on every completion it returns carries exactly that policy version. It never mixes versions: after
`publish` nothing computed under an earlier policy may be reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_qerl.types import Completion, PolicyVersion, Prompt, SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be answered several times.

    Attributes:
        prompt: the prompt.
        group_size: how many responses.
        stream: number of this draw of the prompt; (seed, prompt uid, response index, stream) names the random stream,
            so a completion does not depend on what it was batched with.
        routes: whether completions shall carry the experts that their tokens went to.
    """

    prompt: Prompt
    group_size: int
    stream: int
    routes: bool = False


class RolloutEngine(Protocol):
    """Generates completions under one published policy at a time."""

    @property
    def kv_cache_peak_bytes(self) -> int:
        """Largest key-value cache since the last ``publish``."""
        ...

    def publish(self, policy: PolicyVersion) -> PolicyVersion:
        """Become ``policy``, drop every cache that depended on the old one, and echo the version now in force.

        Raises:
            FaultError: the engine cannot become that policy.
        """
        ...

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """Completions of each request, in order; each carries the published policy with ``sampling``'s transform.

        Raises:
            FaultError: nothing was published, or generation failed.
        """
        ...

    def close(self) -> None:
        """Release what the engine holds. Idempotent."""
        ...
