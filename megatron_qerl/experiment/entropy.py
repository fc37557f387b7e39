"""The temperature at which one arm's token entropy equals another's, noise and all.

Noise on the norm scales changes the entropy of what is sampled. To tell what noise does from what any change of entropy
would do, an arm without noise samples at another temperature. How the temperature is found:

1. The other arm's untrained policy answers the probe prompts under noise draws of every stage of its schedule, all
   stages alike. These responses are the contexts.
2. Its entropy: the mean over those responses' tokens of the entropy of its sampling distribution under the same noise,
   then over the draws.
3. On the same contexts, the matched arm's entropy as a function of the temperature is smooth and rising, so the
   temperature is found by false position.

The entropies are equal at the start of training and on average over the schedule. They part as both arms learn; what
each run's entropy then was is in its metrics.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megatron_qerl.config.loader import load_config
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.data.dataset import EVALUATION_SHUFFLE_SEED, load_dataset
from megatron_qerl.data.prompts import PromptRenderer
from megatron_qerl.errors import FaultError
from megatron_qerl.experiment.config import EntropySection
from megatron_qerl.noise.budget import calibrate_sigma
from megatron_qerl.parallel import setup
from megatron_qerl.report.summary import write_text
from megatron_qerl.rollout.engine import GenerationRequest
from megatron_qerl.session import Session, open_session
from megatron_qerl.trainer.batch import TrainingGroup, TrainingResponse, build_microbatch, plan_microbatches
from megatron_qerl.trainer.step import Trainer
from megatron_qerl.types import Completion, NoiseState, Prompt

if TYPE_CHECKING:
    from torch import Tensor

#: Added to the stream numbers of the check's rollouts, so that they are other draws than the contexts.
_CHECK_STREAM = 1 << 20


@dataclass(frozen=True)
class MatchedTemperature:
    """A temperature and how it was found; entropies in nats a token.

    Attributes:
        temperature: of the matched arm.
        target_nats: the other arm's entropy, mean over its noise draws.
        reached_nats: the matched arm's at ``temperature`` on the same contexts.
        recipe_temperature, recipe_nats: the matched arm's entropy there before matching.
        stages: stage, sigma and entropy of each draw.
        target_rollout_nats, matched_rollout_nats: mean of -log p over the tokens that each policy itself drew: the
            entropy along its own responses, which the matching does not force to be equal.
        responses, tokens: of the contexts.
        evaluations: passes over the contexts that the search took.
        method: in words.
    """

    temperature: float
    target_nats: float
    reached_nats: float
    recipe_temperature: float
    recipe_nats: float
    stages: tuple[dict[str, float], ...]
    target_rollout_nats: float
    matched_rollout_nats: float
    responses: int
    tokens: int
    evaluations: int
    method: str


@dataclass(frozen=True)
class _Draw:
    """The contexts of one noise draw, and the other arm's entropy on them."""

    noise: NoiseState
    groups: tuple[TrainingGroup, ...]
    nats: float


def match_temperature(target: RunConfig, arm: RunConfig, section: EntropySection) -> MatchedTemperature:
    """Find ``arm``'s temperature; opens one policy after the other.

    Raises:
        FaultError: no temperature within the section's bounds has the entropy.
    """
    with _opened(target) as probe:
        draws = probe.contexts(section.prompts, section.draws)
    wanted = fmean(draw.nats for draw in draws)
    with _opened(arm) as probe:

        def entropy_at(temperature: float) -> float:
            return fmean(probe.entropy(draw.groups, None, temperature) for draw in draws)

        temperature, reached, evaluations = _solve(entropy_at, wanted, section)
        own = [
            completion
            for number in range(len(draws))
            for completion in probe.rollout(section.prompts, _CHECK_STREAM + number, None, temperature)
        ]
        recipe = arm.rollout.temperature
        recipe_nats = entropy_at(recipe)
    responses = [r for draw in draws for g in draw.groups for r in g.responses]
    surprisal = [-lp for r in responses for lp in r.rollout_logprobs]
    return MatchedTemperature(
        temperature=temperature,
        target_nats=wanted,
        reached_nats=reached,
        recipe_temperature=recipe,
        recipe_nats=recipe_nats,
        stages=tuple({"stage": d.noise.stage, "sigma": d.noise.sigma, "nats": d.nats} for d in draws),
        target_rollout_nats=fmean(surprisal),
        matched_rollout_nats=fmean(-lp for c in own for lp in c.logprobs),
        responses=len(responses),
        tokens=len(surprisal),
        evaluations=evaluations,
        method="token entropy of the sampling distribution over the tokens of the target arm's own responses to "
        f"{section.prompts} training problems, {section.draws} noise draws a stage, all stages alike, untrained "
        "adapters; temperature by false position on the same tokens",
    )


def _solve(entropy_at: Callable[[float], float], wanted: float, section: EntropySection) -> tuple[float, float, int]:
    """(temperature, its entropy, measurements): the search for a sigma serves any rising positive curve."""
    low, high, tolerance = section.temperature_low, section.temperature_high, section.relative_tolerance
    try:
        found = calibrate_sigma(entropy_at, wanted, low, high, relative_tolerance=tolerance)
    except FaultError as error:
        raise FaultError(
            f"temperature for a token entropy of {wanted:.4g} nats",
            error.rule.replace("sigma", "temperature"),
            "widen entropy.temperature_low and entropy.temperature_high, or give the probe more prompts",
        ) from error
    return found.sigma, found.kl_nats, found.evaluations


class _Probe:
    """A policy that can be sampled from and asked for entropies."""

    def __init__(self, session: Session) -> None:
        self.session, self.config = session, session.config
        self.engine = session.engine()
        self.trainer = Trainer(session.model, session.registry, session.optimizer(), session.config)
        self.renderer = PromptRenderer(session.tokenizer, self.config.data, self.config.rollout.max_prompt_tokens)

    def prompts(self, count: int) -> list[Prompt]:
        """Training problems, the same for every seed; held-out ones stay unseen."""
        problems = load_dataset(self.config.data.train, EVALUATION_SHUFFLE_SEED)[:count]
        return [self.renderer.render(p) for p in problems]

    def rollout(self, prompts: int, stream: int, noise: NoiseState | None, temperature: float) -> list[Completion]:
        """One response a prompt."""
        self.engine.publish(self.session.policy(0, noise))
        sampling = self.session.sampling(self.config.run.seed, temperature)
        requests = [GenerationRequest(prompt, 1, stream) for prompt in self.prompts(prompts)]
        return [completion for (completion,) in self.engine.generate(requests, sampling)]

    def contexts(self, prompts: int, draws: int) -> list[_Draw]:
        """Responses and entropy under ``draws`` noise draws of each stage; under one if the arm has no noise."""
        section, temperature = self.config.noise, self.config.rollout.temperature
        total = section.stages * draws if section.enabled else 1
        found = []
        for step in range(total):
            noise = self.session.registry.state(step, total)
            completions = self.rollout(prompts, step, noise, temperature)
            groups = tuple(
                TrainingGroup(prompt.token_ids, (TrainingResponse(c.token_ids, c.logprobs, 0.0, number),))
                for number, (prompt, c) in enumerate(zip(self.prompts(prompts), completions, strict=True))
            )
            found.append(_Draw(noise, groups, self.entropy(groups, noise, temperature)))
        return found

    def entropy(self, groups: Sequence[TrainingGroup], noise: NoiseState | None, temperature: float) -> float:
        """Mean entropy over the responses' tokens, nats."""
        import torch

        share, budget = self.config.train.share_prompt_prefix, self.config.train.microbatch_tokens
        bins = plan_microbatches(groups, budget, share_prefix=share)
        batches = [build_microbatch(b, self.trainer.device, share_prefix=share) for b in bins]
        self.trainer.temperature = temperature
        entropies: list[Tensor] = [entropy for _, entropy in self.trainer.logprobs(batches, noise)]
        return float(torch.cat(entropies).double().mean())


@contextmanager
def _opened(config: RunConfig) -> Iterator[_Probe]:
    try:
        with setup.reported():
            yield _Probe(open_session(config))
    finally:
        setup.shutdown()


def write_match(match: MatchedTemperature, path: Path) -> None:
    """Write it as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(asdict(match), indent=2) + "\n")


def read_match(path: Path) -> MatchedTemperature:
    """What ``write_match`` wrote."""
    data: dict[str, Any] = json.loads(path.read_text())
    return MatchedTemperature(**data | {"stages": tuple(data["stages"])})


def main() -> None:
    """Body of a launched probe: ``python -m megatron_qerl.experiment.entropy TASK.json``."""
    import os

    task = json.loads(Path(sys.argv[1]).read_text())
    section = EntropySection.model_validate(task["section"])
    match = match_temperature(load_config(task["target"]), load_config(task["arm"]), section)
    if int(os.environ.get("RANK", "0")) == 0:
        write_match(match, Path(task["output"]))


if __name__ == "__main__":
    main()
