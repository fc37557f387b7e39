"""Which policy is trained from samples that noise shaped: the three likelihood modes.

A response was drawn from pi(. | z) with some recorded noise z on the norm scales. Three different estimation problems
can follow, and a run must name one of them:

=============  ====================  ======================  ==========  ==============================================
mode           trainer's forward     ratio's denominator     weights     what it estimates
=============  ====================  ======================  ==========  ==============================================
replay         under the recorded z  recorded rollout        none        gradient of the noise-conditioned policy
clean          without noise         trainer, clean, before  truncated   gradient of the clean policy; bias measurable
                                     the update
uncorrected    without noise         trainer, clean, before  none        neither; what the published code does
                                     the update
=============  ====================  ======================  ==========  ==============================================
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
        importance_weights: whether each token carries min(cap, exp(clean old - rollout)).
        bias: of the first update's gradient as an estimate of the named policy's: "none"; "reduced" (weights correct
            each token, but truncation and the uncorrected prefix distribution remain); "uncorrected".
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
        statement="Trains the clean policy from noisy samples: truncated importance weights correct each token for the "
        "noise; truncation and prefixes drawn under noise leave a bias, against which the effective sample size and "
        "the truncated share are logged.",
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
