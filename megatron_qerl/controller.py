"""The QeRL loop.

noise state -> publish policy -> prove noise -> collect groups -> advantages -> train -> metrics -> checkpoint
(reading of arXiv 2510.11696, algorithm 2). ``train`` is the whole story; the class below it holds what a step needs.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from megatron_qerl import bookkeeping as book
from megatron_qerl.algorithms.advantage import advantages_for_update, with_zero_advantages
from megatron_qerl.config.loader import RESOLVED_CONFIG_FILENAME, load_resolved_config, resolved_yaml
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.data.dataset import load_dataset, require_disjoint
from megatron_qerl.data.prompts import PromptRenderer
from megatron_qerl.errors import CheckpointError, FaultError, NonFiniteError, ParityError
from megatron_qerl.evaluation import accuracies, evaluate_modes, evaluation_prompts, last_noise, metric_values
from megatron_qerl.identity import data_hash, first_difference, settings_hash
from megatron_qerl.metrics.memory import memory_values
from megatron_qerl.metrics.phases import PhaseClock
from megatron_qerl.metrics.sinks import SinkGroup, build_sinks
from megatron_qerl.noise.controller import Decision, FeedbackState, decide, start
from megatron_qerl.noise.proof import check_counts, check_engine, logprob_change, over_stages, read_back
from megatron_qerl.parallel import setup
from megatron_qerl.parallel.stop import StopRequest
from megatron_qerl.report.html import write_report
from megatron_qerl.report.summary import (
    Accuracy,
    EvalRecord,
    Summary,
    append_samples,
    discard_samples_after,
    write_summary,
)
from megatron_qerl.rewards.math import MathVerifier
from megatron_qerl.rollout.collect import CollectedStep, Collector
from megatron_qerl.rollout.replicas import Replicas, open_verifier
from megatron_qerl.session import Session, open_session
from megatron_qerl.trainer import checkpoint
from megatron_qerl.trainer.batch import TrainingGroup, TrainingResponse, first_piece, training_groups
from megatron_qerl.trainer.checkpoint import RunPosition
from megatron_qerl.trainer.step import StepStatistics, Trainer
from megatron_qerl.types import NoiseState, StepMetrics

SAMPLES_PER_STEP = 4
#: Largest |engine - trainer| log-probability that arithmetic alone explains, and how much smaller the mean must be.
#: Seen in runs of the demo: up to 5e-5 nats in float32 and 0.63 in bfloat16, with means of 3e-6 and 0.025.
PARITY_BOUND = {"float32": 1e-4, "bfloat16": 2.0}
PARITY_MEAN_SHARE = 0.05
#: Typical mean difference; a noise whose effect is not well above it cannot be told from rounding.
ROUNDING = {"float32": 3e-6, "bfloat16": 0.025}


def train(config: RunConfig, *, resume: bool, stop_file: Path | None = None) -> Path:
    """Run a config to its end and return the run folder.

    Args:
        config: validated.
        resume: continue from the newest checkpoint of this run folder, if there is one.
        stop_file: asks the run to stop once it exists, as SIGUSR1 does.

    Raises:
        UserError: the config, the model or the data cannot be used.
        FaultError: something failed on the way; the newest checkpoint stays usable.
        StoppedError: the run was asked to stop and has saved its last finished step.
    """
    stop = StopRequest(stop_file)
    try:
        with stop.listening(), setup.reported():
            session = open_session(config)
            with open_verifier(config.reward, session.ranks) as verifier:
                run = TrainingRun(session, verifier, resume=resume)
                with run.sinks or nullcontext():
                    if run.position.step == 0:
                        run.evaluate_policy("before")
                    while run.position.step < config.train.steps:
                        noise = run.noise_state()
                        run.clock.start_step()
                        run.save_when_due()
                        run.leave_when_asked(stop)
                        run.publish(noise)
                        proof = run.prove_noise(noise)
                        collected = run.collect()
                        run.leave_when_asked(stop)
                        proof |= run.prove_engine(collected, noise)
                        stats = run.update(collected, noise)
                        run.finish_step(collected, stats, noise, proof)
                    run.save()
                    run.evaluate_policy("after")
                if session.ranks.first:
                    run.write_results()
                return run.run_dir
    finally:
        setup.shutdown()


class TrainingRun:
    """What is alive during a run, and the stages of a step.

    Every rank takes every step: groups, statistics and decisions are the same on all. The first one writes.

    Args:
        session: the loaded policy.
        verifier: judges answers; None on ranks that do not.
        resume: start from the newest checkpoint if there is one.
    """

    def __init__(self, session: Session, verifier: MathVerifier | None, *, resume: bool) -> None:
        config = session.config
        self.session, self.config, self.ranks = session, config, session.ranks
        self.run_dir = config.run.output_dir / config.run.name
        if self.ranks.first:
            _make_run_folder(self.run_dir)
        synchronize = torch.cuda.synchronize if session.parallel.device.type == "cuda" else None
        self.clock = PhaseClock(synchronize=synchronize)
        self.engine = session.engine()
        self.replicas = Replicas(self.engine, verifier, session.tokenizer, self.ranks)
        self.optimizer = session.optimizer()
        self.trainer = Trainer(session.model, session.registry, self.optimizer, config)
        problems = load_dataset(config.data.train, config.run.seed)
        renderer = PromptRenderer(session.tokenizer, config.data, config.rollout.max_prompt_tokens)
        prompts = [renderer.render(p) for p in problems]
        self.eval_prompts = evaluation_prompts(session, config.eval.problems)
        self.data_hash = data_hash(prompts, self.eval_prompts)
        require_disjoint(problems, [p.problem for p in self.eval_prompts])
        self.ranks.same("the training and evaluation problems", self.data_hash)
        if verifier is not None:
            verifier.check_references([*problems, *(p.problem for p in self.eval_prompts)])
        # The clean policy has routes of its own; only the policy that generated shares the engine's.
        replays = config.rollout.routing_replay and config.algorithm.likelihood == "replay"
        routes = replays and session.shape.experts is not None
        self.collector = Collector(self.replicas, prompts, config, routes=routes)
        answer = session.tokenizer.encode(problems[0].answer, add_special_tokens=False)
        probe = TrainingResponse((*answer, session.stop_token_ids[0]), (0.0,) * (len(answer) + 1), 0.0, 0)
        self.probe = [TrainingGroup(prompts[0].token_ids, (probe,))]
        self.position = self._start_position(resume)
        self.saved_step = self.position.step
        self.near_zero: dict[str, int] = {}
        self.wall_before_s = dict(self.position.wall_s)
        self.sinks = self._sinks(resume) if self.ranks.first else None

    # -- start ------------------------------------------------------------------------------------------------------

    def _start_position(self, resume: bool) -> RunPosition:
        found = self.ranks.broadcast(checkpoint.list_checkpoints(self.run_dir) if resume else [])
        fresh = RunPosition(
            step=0, updates=0, data_position=0, stream=0, metrics_lines=0, wall_s={}, tokens={},
            config_hash=settings_hash(self.config), data_hash=self.data_hash,
            base_hash=self.session.base_hash, adapter_hash="",
            extra={"started_at": datetime.now(UTC).isoformat(timespec="seconds"), "parity_max": None, "evals": {},
                   "noise_modules": None, "feedback": None, "sigma": None, "decisions": {}},
        )  # fmt: skip
        if not found:
            if self.ranks.first:
                (self.run_dir / RESOLVED_CONFIG_FILENAME).write_text(resolved_yaml(self.config))
            return fresh
        folder = found[-1]
        stored = checkpoint.read_position(folder)
        changed = first_difference(load_resolved_config(self.run_dir), self.config)
        for name, have, want in (
            (f"config ({changed})", fresh.config_hash, stored.config_hash),
            ("base model", fresh.base_hash, stored.base_hash),
            ("set of problems or chat template", fresh.data_hash, stored.data_hash),
        ):
            if have != want:
                raise CheckpointError(
                    f"--resume {folder}",
                    have[:12],
                    f"the checkpoint was made with another {name}",
                    "resume with the same one, or start a run under a new run.name",
                )
        checkpoint.load(folder, stored, self.session.model, self.session.shape, self.optimizer)
        return stored

    def _sinks(self, resume: bool) -> SinkGroup:
        discard_samples_after(self.run_dir, self.position.step)
        return build_sinks(
            self.config.metrics,
            self.run_dir,
            self.config.train.steps,
            run_name=self.config.run.name,
            run_config=self.config.model_dump(mode="json"),
            completed_steps=self.position.step,
            resume_position_lines=self.position.metrics_lines if resume else None,
        )

    # -- stages of a step -------------------------------------------------------------------------------------------

    def noise_state(self) -> NoiseState:
        """The noise of the next step: by the schedule, or with the sigma that feedback has steered to."""
        feedback = self.position.extra.get("feedback")
        steered = None if feedback is None else feedback["sigma"]
        return self.session.registry.state(self.position.step, self.config.train.steps, steered)

    def publish(self, noise: NoiseState) -> None:
        """Tell the engine which policy to be. It is one policy: adapter, noise and base are compared between ranks."""
        with self.clock.phase("sync"):
            wanted = self.session.policy(self.position.updates, noise)
            self.ranks.same("the policy to be sampled from", wanted)
            echoed = self.engine.publish(wanted)
            assert echoed == wanted, "the engine echoed another policy version"

    def prove_noise(self, noise: NoiseState) -> dict[str, float]:
        """Read the noise back from the model and measure that it moves the probe; stops the run if it does not."""
        self.near_zero = {}
        if not noise.active:
            return book.noise_values(noise, None, None)
        with self.clock.phase("noise"):
            with self.session.registry.applied(noise):
                readback = over_stages(read_back(self.session.registry, noise), setup.pipeline_group())
            check_counts(readback.touched, len(self.session.registry.expected), noise)
            clean, noisy = self.trainer.probe(self.probe, None), self.trainer.probe(self.probe, noise)
            change = logprob_change(clean, noisy, noise)
        self.near_zero = readback.near_zero
        self.position.extra["noise_modules"] = [readback.expected, readback.touched]
        return book.noise_values(noise, readback, change)

    def collect(self) -> CollectedStep:
        """Generate, judge, filter and refill under the published policy."""
        sampling = self.session.sampling(self.config.run.seed)
        return self.collector.collect(sampling, self.position.data_position, self.position.stream, self.clock)

    def prove_engine(self, collected: CollectedStep, noise: NoiseState) -> dict[str, float]:
        """Score one group of each replica's engine with and without the noise; stop if it was drawn under another."""
        if not noise.active:
            return {}
        with self.clock.phase("noise"):
            # Replica r began with group r. One micro-batch on each: experts need all ranks to make the same passes.
            own = self.ranks.replica if self.ranks.replica < self.config.rollout.prompts_per_step else 0
            group = training_groups([with_zero_advantages(collected.generated[own])])[0]
            settings = self.config.train
            piece = first_piece(group, settings.microbatch_tokens, share_prefix=settings.share_prompt_prefix)
            measured = self.ranks.gather(self.trainer.measure_engine([piece], noise))
            routing = self._routing_values(piece, noise)
        for comparison in measured:
            check_engine(comparison, noise, ROUNDING[self.config.model.dtype])
            self._check_parity(comparison.max_abs, comparison.mean_abs)
        return book.engine_values(measured) | routing

    def _routing_values(self, piece: TrainingGroup, noise: NoiseState) -> dict[str, float]:
        """How many of the routers' choices the noise changed, and how many the engine made that the trainer would not:
        the largest share over the ranks, which have different layers and tokens."""
        if self.session.shape.experts is None:
            return {}
        shares = self.trainer.routing_flips([piece], noise)
        return self.ranks.largest({f"routing/{name}": share for name, share in shares.items()})

    def update(self, collected: CollectedStep, noise: NoiseState) -> StepStatistics:
        """Advantages, then all optimizer updates of this rollout. Without a trainable group nothing is updated."""
        groups = training_groups([advantages_for_update(g, self.config.algorithm) for g in collected.trainable])
        if not groups:
            return StepStatistics()
        try:
            with self.clock.phase("train"):
                stats = self.trainer.train_step(groups, noise)
        except NonFiniteError:
            self._keep_evidence(collected)
            raise
        if stats.parity_tokens:
            self._check_parity(stats.parity_max, stats.parity_sum / stats.parity_tokens)
        return stats

    def _keep_evidence(self, collected: CollectedStep) -> None:
        """Responses of a step that did not end in finite numbers, numbered as the error numbers them."""
        if not self.ranks.first:
            return
        responses = [
            {"response": i, "uid": g.prompt.problem.uid, "token_ids": r.completion.token_ids,
             "logprobs": r.completion.logprobs, "reward": r.reward, "text": r.text}
            for i, (g, r) in enumerate((g, r) for g in collected.trainable for r in g.responses)
        ]  # fmt: skip
        (self.run_dir / "non_finite.json").write_text(json.dumps(responses, indent=1))

    def _check_parity(self, largest: float, mean: float) -> None:
        bound = self.config.rollout.parity_bound or PARITY_BOUND[self.config.model.dtype]
        if largest > bound or mean > PARITY_MEAN_SHARE * bound:
            raise ParityError(
                f"step {self.position.step + 1}",
                f"engine and trainer differ by {largest:.3g} nats on a token, bound {bound:g}, and by {mean:.3g} on "
                f"average, bound {PARITY_MEAN_SHARE * bound:g}",
                "the ratio's denominator would be wrong; see rollout.parity_bound and megatron-qerl doctor",
            )

    def steer(
        self, collected: CollectedStep, stats: StepStatistics, noise: NoiseState, noise_metrics: dict[str, float]
    ) -> Decision | None:
        """Feedback's decision on sigma after a noisy step; kept with the position, so that a resumed run goes on."""
        section, extra = self.config.noise.feedback, self.position.extra
        if not (section.enabled and noise.active):
            return None
        before = start(noise.sigma) if extra["feedback"] is None else FeedbackState(**extra["feedback"])
        signals = book.feedback_signals(collected, stats, noise_metrics, self.config)
        after, decision = decide(section, before, signals)
        extra["feedback"] = asdict(after)
        extra["decisions"][decision.reason] = extra["decisions"].get(decision.reason, 0) + 1
        return decision

    def finish_step(
        self, collected: CollectedStep, stats: StepStatistics, noise: NoiseState, noise_metrics: dict[str, float]
    ) -> None:
        """Record the step, evaluate and checkpoint when due."""
        step = self.position.step + 1
        extra = self.position.extra
        filtered = self.config.algorithm.dynamic_sampling.enabled
        values = book.rollout_values(collected, filtered=filtered) | book.training_values(stats)
        values |= noise_metrics | book.parity_values(stats) | self._memory()
        decision = self.steer(collected, stats, noise, noise_metrics)
        extra["sigma"] = noise.sigma
        if "parity/logprob_max_abs" in values:
            extra["parity_max"] = max(extra["parity_max"] or 0.0, values["parity/logprob_max_abs"])
        values["policy/adapter_version"] = float(self.position.updates)
        values["optimizer/updates"] = float(self.optimizer.updates)
        self.position = replace(
            self.position,
            step=step,
            updates=self.optimizer.updates,
            data_position=collected.data_position,
            stream=collected.stream,
            tokens=book.add_counts(self.position.tokens, values),
        )
        due = self.config.eval.interval_steps
        if due and step % due == 0 and step < self.config.train.steps:
            for record in self.evaluate_policy(f"step_{step:06d}", noise):
                values |= metric_values(record)
        policy = collected.generated[0].responses[0].completion.policy
        info: dict[str, Any] = {"adapter_hash": policy.adapter_hash, "noise": asdict(noise)}
        if self.near_zero:
            info["near_zero_channels"] = self.near_zero
        if decision is not None:
            values |= book.feedback_values(decision)
            info["feedback"] = asdict(decision)
        times = self.clock.finish_step()
        if self.sinks is not None:
            append_samples(self.run_dir, book.sample_records(collected, step, SAMPLES_PER_STEP))
            self.sinks.log(StepMetrics(step, values | times, info))

    def _memory(self) -> dict[str, float]:
        """Memory metrics: of each the largest over the ranks."""
        own = self.session.memory() | memory_values()
        own["memory/optimizer_bytes"] = float(self.optimizer.state_bytes)
        own["memory/kv_cache_bytes"] = float(self.engine.kv_cache_peak_bytes)
        return self.ranks.largest(own)

    def save_when_due(self) -> None:
        """Checkpoint the steps recorded so far; called at the start of a step, so that its time is in the record."""
        if self.position.step % self.config.checkpoint.interval_steps == 0:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the position after the last recorded step, unless it is there already."""
        if self.position.step == self.saved_step:
            return
        with self.clock.phase("checkpoint"):
            self.position = replace(
                self.position,
                metrics_lines=0 if self.sinks is None else self.sinks.record.checkpoint_position(),
                wall_s=self._wall_s(),
                adapter_hash=self.session.policy(self.position.updates, None).adapter_hash,
            )
            checkpoint.save(
                self.run_dir,
                self.position,
                self.session.model,
                self.session.shape,
                self.optimizer,
                self.config.checkpoint.keep,
            )
        self.saved_step = self.position.step

    def leave_when_asked(self, stop: StopRequest) -> None:
        """Save and end, if the run was asked to. A step that was not trained on yet is dropped, and drawn again later.

        Raises:
            StoppedError: on every rank, once the checkpoint is written.
        """
        if stop.asked(self.ranks):
            self.save()
            raise stop.stop(self.ranks, self.position.step, self.run_dir)

    # -- evaluation and results -------------------------------------------------------------------------------------

    def evaluate_policy(self, label: str, noise: NoiseState | None = None) -> list[EvalRecord]:
        """Evaluate the clean policy in every configured mode, and the noisy one if asked for."""
        if noise is None and self.position.step > 0:
            noise = last_noise(self.session, self.position)
        noisy = self.config.eval.noisy and noise is not None and noise.active
        with self.clock.phase("eval"):
            records = evaluate_modes(
                self.session,
                self.replicas,
                self.eval_prompts,
                self.run_dir,
                label=label,
                step=self.position.step,
                updates=self.position.updates,
                modes=self.config.eval.modes,
                noise=noise if noisy else None,
            )
        self.position.extra["evals"].update(accuracies(records))
        return records

    def _wall_s(self) -> dict[str, float]:
        return {k: self.wall_before_s.get(k, 0.0) + v for k, v in self.clock.totals_s.items()}

    def _accuracy(self, label: str) -> Accuracy | None:
        found: dict[str, Any] | None = self.position.extra["evals"].get(f"{label}_{self.config.eval.modes[0]}")
        return None if found is None else Accuracy(**found)

    def write_results(self) -> None:
        """summary.json and report.html."""
        extra = self.position.extra
        expected, touched = extra["noise_modules"] or (None, None)
        summary = Summary(
            run_name=self.config.run.name,
            model=str(self.config.model.path),
            accuracy_before=self._accuracy("before"),
            accuracy_after=self._accuracy("after"),
            accuracy_mode=self.config.eval.modes[0],
            noise_modules_expected=expected,
            noise_modules_touched=touched,
            logprob_parity_max=extra["parity_max"],
            wall_s=self._wall_s(),
            steps=self.position.step,
            updates=self.position.updates,
            seed=self.config.run.seed,
            versions=book.versions(),
            base_hash=self.session.base_hash,
            likelihood=self.config.algorithm.likelihood,
            noise=self.config.noise.model_dump(mode="json"),
            feedback=extra.get("decisions", {}),
            tokens=self.position.tokens,
            hardware=book.hardware(),
            config_path=str(self.run_dir / RESOLVED_CONFIG_FILENAME),
            started_at=extra["started_at"],
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_summary(self.run_dir, summary)
        write_report(self.run_dir)


def _make_run_folder(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FaultError(
            f"run folder {run_dir}", f"cannot be made ({error})", "choose another run.output_dir"
        ) from error
