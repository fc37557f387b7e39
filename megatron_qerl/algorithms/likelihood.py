"""Which policy is trained from samples that noise shaped: the three likelihood modes.

A response was drawn from pi(. | z) with some recorded noise z on the norm scales. Three different estimation problems
can follow, and a run must name one of them:

=============  ====================  ======================  ==========  ==============================================
mode           trainer's forward     ratio's denominator     weights     what it estimates
=============  ====================  ======================  ==========  ==============================================
replay         under the recorded z  recorded rollout        none        gradient of the noise-conditioned policy
clean          without noise         trainer, clean, before  bounded     gradient of the clean policy; bias measurable
                                     the update
uncorrected    without noise         trainer, clean, before  none        neither; what the published code does
                                     the update
=============  ====================  ======================  ==========  ==============================================

On a policy small enough to enumerate (tests/unit/test_toy_estimators.py) ``replay``, and ``clean`` with unbounded
weights by sequence, have no bias at all. ``uncorrected`` pulls the clean policy towards the noisy one even when no
response is better than another: with equal advantages its gradient is that of KL(behaviour || clean).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_qerl.types import LikelihoodMode

Denominator = Literal["rollout", "trainer_old"]
Bias = Literal["none", "reduced", "uncorrected"]


@dataclass(frozen=True)
class LikelihoodPlan:
    """What the trainer must do for one mode.

    Attributes:
        mode: the mode's name.
        replay_noise: whether the trainer's forward applies the noise that was recorded with each response.
        denominator: whose log-probabilities divide in the ratio: those recorded by the engine ("rollout"), or the
            trainer's own, computed before the first update from this rollout ("trainer_old").
        importance_weights: whether tokens carry the weights of ``correction.importance_weights``.
        bias: of the first update's gradient as an estimate of the named policy's: "none"; "reduced" (the bounds of the
            weights, and with weights by token the prefixes drawn under noise, remain); "uncorrected".
        statement: one sentence for logs and reports.
    """

    mode: LikelihoodMode
    replay_noise: bool
    denominator: Denominator
    importance_weights: bool
    bias: Bias
    statement: str

    @property
    def biased(self) -> bool:
        """Whether the gradient's expectation differs from that of the policy the mode names."""
        return self.bias != "none"


_PLANS: dict[LikelihoodMode, LikelihoodPlan] = {
    "replay": LikelihoodPlan(
        mode="replay",
        replay_noise=True,
        denominator="rollout",
        importance_weights=False,
        bias="none",
        statement="Trains the noise-conditioned policy: the forward replays the recorded noise and the ratio divides "
        "by the recorded log-probabilities; what is deployed without noise is another policy, evaluated apart.",
    ),
    "clean": LikelihoodPlan(
        mode="clean",
        replay_noise=False,
        denominator="trainer_old",
        importance_weights=True,
        bias="reduced",
        statement="Trains the clean policy from noisy samples: importance weights correct for the noise; their bounds, "
        "and with weights by token the prefixes drawn under noise, leave a bias, against which the effective sample "
        "size and the share of bounded weights are logged.",
    ),
    "uncorrected": LikelihoodPlan(
        mode="uncorrected",
        replay_noise=False,
        denominator="trainer_old",
        importance_weights=False,
        bias="uncorrected",
        statement="BIASED baseline: the samples came from a noisy policy, the ratio pretends that they came from the "
        "clean one, and nothing corrects for it.",
    ),
}


def plan(mode: LikelihoodMode) -> LikelihoodPlan:
    """The plan of a mode."""
    return _PLANS[mode]
