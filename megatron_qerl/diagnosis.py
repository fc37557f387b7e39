"""What the noise did to a run's policy, measured on its own model: ``megatron-qerl diagnose``.

Responses are drawn under several noise states of the size that was in force, and every response is scored under every
state. From that follow how diverse the responses are within one state and between states
(``metrics.noise_information``), and what the three likelihood modes would have made of one of the recorded batches:
gradients side by side (``algorithms.comparison``). Nothing is learnt, and the run's own records are not touched.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from megatron_qerl.algorithms.advantage import advantages_for_update
from megatron_qerl.algorithms.comparison import compare_modes
from megatron_qerl.config.loader import load_resolved_config
from megatron_qerl.config.schema import AlgorithmSection, ParallelSection
from megatron_qerl.data.dataset import load_dataset
from megatron_qerl.data.prompts import PromptRenderer
from megatron_qerl.errors import UserError
from megatron_qerl.evaluation import check_identity, last_noise
from megatron_qerl.metrics.noise_information import EntropyTerms, entropy_terms, over_prompts
from megatron_qerl.models.adapter_state import restore
from megatron_qerl.parallel import setup
from megatron_qerl.report.summary import write_text
from megatron_qerl.rollout.engine import GenerationRequest
from megatron_qerl.rollout.replicas import Replicas, open_verifier
from megatron_qerl.session import Session, open_session
from megatron_qerl.trainer.batch import training_groups
from megatron_qerl.trainer.checkpoint import RunPosition, adapter_tensors, find, read_position
from megatron_qerl.trainer.scoring import gradient, recorded_batch, response_logprobs
from megatron_qerl.trainer.step import Trainer
from megatron_qerl.types import Group, LikelihoodMode, NoiseState, Prompt

#: Diagnosis draws from its own random streams, apart from training's and evaluation's.
DIAGNOSIS_SEED_OFFSET = 1 << 41
MODES: tuple[LikelihoodMode, ...] = get_args(LikelihoodMode)

DEFINITIONS = {
    "modes": "One batch, drawn under the first noise state, at the first update under each likelihood mode, without "
    "regularizers.",
    "gradient_norms": "L2 norm of the gradient of all adapter parameters.",
    "gradient_cosines": "Cosine between the gradients of two modes over all adapter parameters, null where one is 0.",
    "coefficient_norms": "L2 norm over tokens of the derivative of a token's loss by its log-probability.",
    "coefficient_cosines": "Cosine over tokens between these derivatives; null where one is zero throughout.",
    "effective_token_fraction": "(sum w)^2 / (n sum w^2) over the n tokens: w the ratio to the engine's probability "
    "for replay, the importance weight for clean, 1 for uncorrected.",
    "total": "H(O | q), nats a response, noise states mixed. From sampled states: from below.",
    "conditional": "E_Z[H(O | Z, q)], nats a response: entropy within one noise state.",
    "information": "I(O; Z | q), nats: what a response tells about the noise state that drew it; the own state is in "
    "the mixture, so it is from below and at most log(states).",
    "information_upper": "The same with the own state left out of the mixture: from above.",
    "mean": "Mean over problems with an interval from their spread; the problems share the noise states, which the "
    "interval does not see.",
    "interval": "95 percent, from a jackknife over noise states for one problem.",
    "saturated": "The information is above 0.8 log(states): more states are needed to see how large it is.",
}


@dataclass(frozen=True)
class DiagnosisPlan:
    """How much is measured.

    Attributes:
        problems: training problems, the first ones.
        states: noise states, three or more.
        responses: of each problem under each state, two or more.
        sigma: of the noise; None for what was in force at the checkpoint.
    """

    problems: int
    states: int
    responses: int
    sigma: float | None = None

    def check(self) -> None:
        """Raises UserError for a plan that cannot give an interval or a group."""
        for name, value, least, why in (
            ("--states", self.states, 3, "an interval over noise states needs three"),
            ("--responses", self.responses, 2, "a group needs two responses"),
        ):
            if value < least:
                raise UserError(name, value, why, f"use {least} or more")
        if self.sigma is not None and not self.sigma > 0.0:
            raise UserError("--sigma", self.sigma, "without noise there is nothing to tell apart", "use a positive one")


def diagnose_run(run_dir: Path, *, checkpoint: str, plan: DiagnosisPlan) -> dict[str, Any]:
    """Measure a checkpoint; writes ``run_dir/diagnosis_{checkpoint}.json`` and returns what is in it.

    Raises:
        CheckpointError: no such checkpoint, or it does not belong to the base model found now.
        UserError: the plan cannot be carried out, or the run had no noise.
    """
    plan.check()
    config = load_resolved_config(run_dir)
    if not config.noise.enabled:
        raise UserError("noise.enabled", False, f"{run_dir} is a run without noise", "diagnose a run with noise")
    # Checkpoints know no layout: whatever the run's was, one process measures.
    config = config.model_copy(update={"parallel": ParallelSection()})
    folder = find(run_dir, checkpoint)
    position = read_position(folder)
    try:
        with setup.reported():
            session = open_session(config)
            if session.ranks.size > 1:
                raise UserError(
                    "processes", session.ranks.size, "diagnose measures in one", "start it without torchrun"
                )
            check_identity(session, position, folder)
            restore(session.model, session.shape, adapter_tensors(folder, position), folder)
            states = noise_states(session, position, plan)
            groups = _draw(session, position.updates, states, plan)
            trainers = _trainers(session)
            result = {
                "run": str(run_dir),
                "checkpoint": folder.name,
                "sigma": states[0].sigma,
                "states": [asdict(s) for s in states],
                "plan": asdict(plan),
                "modes": _modes(trainers, groups[0], states[0]),
                "entropy": _entropy(trainers["replay"], groups, states),
                "definitions": DEFINITIONS,
            }
    finally:
        setup.shutdown()
    write_text(run_dir / f"diagnosis_{folder.name}.json", json.dumps(result, indent=1) + "\n")
    return result


def noise_states(session: Session, position: RunPosition, plan: DiagnosisPlan) -> list[NoiseState]:
    """Independent draws of one size, numbered after the run's last step so that none was trained under.

    Raises:
        UserError: no noise was in force at the checkpoint and none is given.
    """
    base = last_noise(session, position)
    sigma = base.sigma if plan.sigma is None else plan.sigma
    if not sigma > 0.0:
        raise UserError(
            "--sigma", None, f"no noise was in force at step {position.step}", "give a sigma, or a later checkpoint"
        )
    first = session.config.train.steps
    return [replace(base, sigma=sigma, step=first + m) for m in range(plan.states)]


def _draw(session: Session, updates: int, states: Sequence[NoiseState], plan: DiagnosisPlan) -> list[list[Group]]:
    """State -> problem -> judged group, drawn by the run's engine."""
    config = session.config
    renderer = PromptRenderer(session.tokenizer, config.data, config.rollout.max_prompt_tokens)
    problems = load_dataset(config.data.train, config.run.seed)[: plan.problems]
    prompts: list[Prompt] = [renderer.render(p) for p in problems]
    sampling = session.sampling(config.run.seed + DIAGNOSIS_SEED_OFFSET)
    with open_verifier(config.reward, session.ranks) as verifier:
        if verifier is not None:
            verifier.check_references(problems)
        replicas = Replicas(session.engine(), verifier, session.tokenizer, session.ranks)
        drawn = []
        for m, state in enumerate(states):
            replicas.engine.publish(session.policy(updates, state))
            drawn.append(replicas.answer([GenerationRequest(p, plan.responses, m) for p in prompts], sampling))
    return drawn


def algorithm_of_mode(algorithm: AlgorithmSection, mode: LikelihoodMode) -> AlgorithmSection:
    """The run's objective under another likelihood mode, without regularizers.

    Where the run's correction does not fit, ``token_truncate`` stands in, or ``sequence_truncate`` with a ratio a
    response.
    """
    rule = algorithm.importance_correction
    if mode != "clean":
        rule = "token_truncate"
    elif algorithm.ratio_level == "sequence" and not rule.startswith("sequence"):
        rule = "sequence_truncate"
    changes = {"likelihood": mode, "importance_correction": rule, "kl_coefficient": 0.0, "entropy_coefficient": 0.0}
    return AlgorithmSection.model_validate(algorithm.model_dump() | changes)


def _trainers(session: Session) -> dict[LikelihoodMode, Trainer]:
    """One trainer a mode over the same model and gradient buffers."""
    optimizer, config = session.optimizer(), session.config
    return {
        mode: Trainer(
            session.model,
            session.registry,
            optimizer,
            config.model_copy(update={"algorithm": algorithm_of_mode(config.algorithm, mode)}),
        )
        for mode in MODES
    }


def _modes(trainers: dict[LikelihoodMode, Trainer], drawn: Sequence[Group], noise: NoiseState) -> dict[str, Any]:
    """The three modes on one batch."""
    algorithm = trainers["clean"].algorithm
    groups = training_groups([advantages_for_update(g, algorithm) for g in drawn])
    comparison = compare_modes(recorded_batch(trainers["clean"], groups, noise), algorithm)
    gradients = {mode: gradient(trainer, groups, noise).double() for mode, trainer in trainers.items()}
    norms = {mode: float(g.norm()) for mode, g in gradients.items()}
    pairs = [(a, b) for i, a in enumerate(MODES) for b in MODES[i + 1 :]]
    return {
        "groups": len(drawn),
        "mixed_groups": sum(g.mixed for g in drawn),
        "tokens": comparison.tokens,
        "correction": algorithm.importance_correction,
        "gradient_norms": norms,
        "gradient_cosines": {f"{a}/{b}": _cosine(gradients[a], gradients[b]) for a, b in pairs},
        "coefficient_norms": comparison.norms,
        "coefficient_cosines": {
            f"{a}/{b}": comparison.cosines[a, b] if comparison.norms[a] * comparison.norms[b] > 0.0 else None
            for a, b in pairs
        },
        "effective_token_fraction": {m: n / comparison.tokens for m, n in comparison.effective_tokens.items()},
    }


def _cosine(first: Tensor, second: Tensor) -> float | None:
    scale = float(first.norm() * second.norm())
    return float(first @ second) / scale if scale > 0.0 else None


def _entropy(trainer: Trainer, drawn: Sequence[Sequence[Group]], states: Sequence[NoiseState]) -> dict[str, Any]:
    """H(O|q), E_Z[H(O|Z,q)] and I(O;Z|q) of each problem and over them."""
    everything = [g for groups in drawn for g in groups]
    numbered = training_groups([replace(g, advantages=(0.0,) * len(g.responses)) for g in everything])
    logprobs_MR = torch.stack([response_logprobs(trainer, numbered, state) for state in states]).numpy()
    of_R = np.array([(m, p) for m, groups in enumerate(drawn) for p, g in enumerate(groups) for _ in g.responses])
    problems, terms = [], []
    for index, group in enumerate(drawn[0]):
        mine = of_R[:, 1] == index
        found = entropy_terms(logprobs_MR[:, mine], of_R[mine, 0], "sampled")
        terms.append(found)
        problems.append({"uid": group.prompt.problem.uid, **_as_json(found)})
    names = ("total", "conditional", "information", "information_upper")
    mean = {n: asdict(over_prompts([getattr(t, n) for t in terms])) for n in names} if len(terms) > 1 else None
    return {"problems": problems, "mean": mean}


def _as_json(terms: EntropyTerms) -> dict[str, Any]:
    return {**asdict(terms), "saturated": terms.saturated}
