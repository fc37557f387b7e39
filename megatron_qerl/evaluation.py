"""Evaluating the policy that will be deployed: greedy or sampled, clean or under noise, every verdict kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from megatron_qerl.config.loader import load_resolved_config
from megatron_qerl.data.dataset import EVALUATION_SHUFFLE_SEED, load_dataset, require_disjoint
from megatron_qerl.data.prompts import PromptRenderer
from megatron_qerl.errors import CheckpointError, UserError
from megatron_qerl.metrics.intervals import accuracy_interval
from megatron_qerl.models.adapter_state import restore
from megatron_qerl.parallel import setup
from megatron_qerl.report.summary import Accuracy, EvalProblem, EvalRecord, write_eval
from megatron_qerl.rollout.engine import GenerationRequest
from megatron_qerl.rollout.replicas import Replicas, open_verifier
from megatron_qerl.session import Session, open_session
from megatron_qerl.trainer.checkpoint import RunPosition, adapter_tensors, find, read_position
from megatron_qerl.types import NoiseState, Outcome, Prompt

EvalMode = Literal["greedy", "sampled"]

#: Evaluation draws from its own random streams, so that it never sees a training completion again.
EVALUATION_SEED_OFFSET = 1 << 40


def evaluation_prompts(session: Session, limit: int | None) -> list[Prompt]:
    """Rendered evaluation problems, the same for every seed of a run."""
    config = session.config
    problems = load_dataset(config.data.eval, EVALUATION_SHUFFLE_SEED)
    renderer = PromptRenderer(session.tokenizer, config.data, config.rollout.max_prompt_tokens)
    return [renderer.render(p) for p in problems[:limit]]


def evaluate(
    session: Session,
    replicas: Replicas,
    prompts: Sequence[Prompt],
    *,
    label: str,
    step: int,
    updates: int,
    mode: EvalMode,
    noise: NoiseState | None = None,
) -> EvalRecord:
    """Answer every prompt and judge the answers; the same record on every rank.

    Args:
        label: name of the record.
        step: finished training steps.
        updates: optimizer updates, that is, the adapter's version.
        mode: greedy decoding, or sampling at the run's temperature.
        noise: evaluate under this noise; None is the deployed policy.
    """
    config = session.config
    samples = 1 if mode == "greedy" else config.eval.samples_per_problem
    sampling = session.sampling(config.run.seed + EVALUATION_SEED_OFFSET, 0.0 if mode == "greedy" else None)
    replicas.engine.publish(session.policy(updates, noise))
    groups = replicas.answer([GenerationRequest(p, samples, 0) for p in prompts], sampling)
    problems = tuple(
        EvalProblem(
            uid=g.prompt.problem.uid,
            cluster=g.prompt.problem.cluster,
            source=g.prompt.problem.source,
            outcome=r.judgement.outcome,
            score=r.judgement.score,
        )
        for g in groups
        for r in g.responses
    )
    interval = accuracy_interval(
        [p.outcome is Outcome.CORRECT for p in problems],
        [p.cluster for p in problems],
        config.eval.bootstrap_resamples,
        EVALUATION_SHUFFLE_SEED,
    )
    noisy = noise is not None and noise.active
    return EvalRecord(
        label=label, step=step, mode=mode, noisy=noisy, accuracy=Accuracy(**asdict(interval)), problems=problems
    )


def evaluate_modes(
    session: Session,
    replicas: Replicas,
    prompts: Sequence[Prompt],
    run_dir: Path,
    *,
    label: str,
    step: int,
    updates: int,
    modes: Sequence[EvalMode],
    noise: NoiseState | None,
) -> list[EvalRecord]:
    """Evaluate the clean policy in each mode, and the noisy one after it; writes one record each into ``run_dir``.

    Args:
        label: start of each record's name; ``noisy_`` and the mode are appended.
        noise: None leaves the noisy policy out.
    """
    records = []
    for mode in modes:
        for state in (None,) if noise is None else (None, noise):
            record = evaluate(
                session,
                replicas,
                prompts,
                label=f"{label}_{'noisy_' if state else ''}{mode}",
                step=step,
                updates=updates,
                mode=mode,
                noise=state,
            )
            if replicas.ranks.first:
                write_eval(run_dir, record)
            records.append(record)
    return records


def accuracies(records: Sequence[EvalRecord]) -> dict[str, dict[str, Any]]:
    """Label -> accuracy with its interval, as plain values."""
    return {r.label: r.accuracy.model_dump() for r in records if r.accuracy is not None}


def metric_values(record: EvalRecord) -> dict[str, float]:
    """An evaluation as metrics."""
    assert record.accuracy is not None
    name = f"eval/{'noisy_' if record.noisy else ''}{record.mode}_accuracy"
    accuracy = record.accuracy
    return {name: accuracy.mean, f"{name}_low": accuracy.low, f"{name}_high": accuracy.high}


def check_identity(session: Session, position: RunPosition, folder: Path) -> None:
    """Raises CheckpointError if the checkpoint was made on another base than the session's."""
    if session.base_hash != position.base_hash:
        raise CheckpointError(
            f"base model {session.folder.path}",
            session.base_hash[:12],
            f"checkpoint {folder} was trained on another base ({position.base_hash[:12]})",
            "put the model back that the run was trained on",
        )


def last_noise(session: Session, position: RunPosition) -> NoiseState:
    """The noise of the last step before ``position``."""
    step = max(position.step - 1, 0)
    return session.registry.state(step, session.config.train.steps, position.extra.get("sigma") or None)


def _noise_of(session: Session, position: RunPosition) -> NoiseState:
    """The noise of the checkpoint's last step.

    Raises:
        UserError: there was none, so a noisy evaluation would measure the clean policy again.
    """
    state = last_noise(session, position)
    if not state.active:
        raise UserError(
            "--noisy", f"step {position.step}", "no noise was in force at this checkpoint", "leave out --noisy"
        )
    return state


def evaluate_run(
    run_dir: Path, *, checkpoint: str, modes: Sequence[EvalMode], noisy: bool, problems: int | None
) -> dict[str, Any]:
    """``megatron-qerl eval``: evaluate a checkpoint of a finished or running run; writes one record a mode.

    Raises:
        CheckpointError: no such checkpoint, or it does not belong to the base model found now.
    """
    config = load_resolved_config(run_dir)
    folder = find(run_dir, checkpoint)
    position = read_position(folder)
    try:
        with setup.reported():
            session = open_session(config)
            check_identity(session, position, folder)
            restore(session.model, session.shape, adapter_tensors(folder, position), folder)
            prompts = evaluation_prompts(session, problems if problems is not None else config.eval.problems)
            require_disjoint(load_dataset(config.data.train, config.run.seed), [p.problem for p in prompts])
            noise = _noise_of(session, position) if noisy else None
            with open_verifier(config.reward, session.ranks) as verifier:
                if verifier is not None:
                    verifier.check_references(p.problem for p in prompts)
                records = evaluate_modes(
                    session,
                    Replicas(session.engine(), verifier, session.tokenizer, session.ranks),
                    prompts,
                    run_dir,
                    # Apart from the records that training wrote, which the report reads as they were.
                    label=f"cli_{folder.name}_n{len(prompts)}",
                    step=position.step,
                    updates=position.updates,
                    modes=modes,
                    noise=noise,
                )
    finally:
        setup.shutdown()
    return {"run": str(run_dir), "checkpoint": folder.name, **accuracies(records)}
