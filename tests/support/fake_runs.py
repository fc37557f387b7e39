"""Run folders as ``train`` leaves them, with numbers that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_qerl.config.loader import RESOLVED_CONFIG_FILENAME, load_resolved_config, resolved_yaml
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.experiment.config import EntropySection
from megatron_qerl.experiment.entropy import MatchedTemperature, write_match
from megatron_qerl.report.summary import EvalProblem, EvalRecord, Summary, write_eval, write_summary
from megatron_qerl.trainer.checkpoint import RunPosition
from megatron_qerl.types import Outcome

CLUSTERS = tuple(f"c{n}" for n in range(20))
MATCH = MatchedTemperature(
    1.25, 0.5, 0.5, 1.0, 0.4, ({"stage": 0, "sigma": 0.0, "nats": 0.5},), 0.5, 0.5, 8, 64, 5, "m"
)


def verdicts(right: int) -> tuple[EvalProblem, ...]:
    """The first ``right`` of twenty problems, one a cluster and of two benchmarks, are answered correctly."""
    return tuple(
        EvalProblem(
            uid=f"u{n}", cluster=cluster, source=f"bench{n % 2}/test", score=float(n < right),
            outcome=Outcome.CORRECT if n < right else Outcome.WRONG,
        )
        for n, cluster in enumerate(CLUSTERS)
    )  # fmt: skip


@dataclass
class FakeLaunch:
    """In the place of ``Launch``: writes what a run with these numbers would have written.

    Attributes:
        tokens: run name -> tokens of a step; others have 100.
        right: run name -> right answers after each step from 0 on; others begin with 4 and gain 1 a step.
        fail_at: raise KeyboardInterrupt instead of training this run.
        trained, evaluated: what was asked for.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    right: dict[str, Sequence[int]] = field(default_factory=dict)
    fail_at: str = ""
    data_hash: dict[str, str] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    evaluated: list[tuple[str, int]] = field(default_factory=list)
    matched: int = 0

    def train(self, config: RunConfig) -> None:
        name, steps = config.run.name, config.train.steps
        if name == self.fail_at:
            raise KeyboardInterrupt
        self.trained.append(name)
        run_dir = config.run.output_dir / name
        for step in range(1, steps + 1):
            if step % config.checkpoint.interval_steps == 0 or step == steps:
                self._checkpoint(run_dir, name, step)
        (run_dir / RESOLVED_CONFIG_FILENAME).write_text(resolved_yaml(config))
        values = {
            "tokens/completion": float(self.tokens.get(name, 100)), "groups/generated": 4.0,
            "groups/mixed_fraction": 0.5, "time/step_s": 10.0, "time/eval_s": 3.0, "time/checkpoint_s": 1.0,
        }  # fmt: skip
        lines = [json.dumps({"step": s, "values": values}) for s in range(1, steps + 1)]
        (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        due = config.eval.interval_steps
        self._evaluation(run_dir, 0, "before_greedy")
        for step in range(1, steps):
            if due and step % due == 0:
                self._evaluation(run_dir, step, f"step_{step:06d}_greedy")
        self._evaluation(run_dir, steps, "after_greedy")
        summary = Summary(base_hash=f"base of {config.model.path}", hardware={"cpu_threads": "2"}, versions={})
        write_summary(run_dir, summary.model_copy(update={"finished_at": "2026-01-01T00:00:00+00:00"}))

    def evaluate(self, run_dir: Path, step: int, mode: str) -> None:
        assert (run_dir / f"checkpoints/step_{step:06d}").is_dir(), "an evaluation needs the checkpoint"
        self.evaluated.append((run_dir.name, step))
        self._evaluation(run_dir, step, f"cli_step_{step:06d}_n20_{mode}")

    def match_temperature(self, target: RunConfig, arm: RunConfig, section: EntropySection, output: Path) -> None:
        assert target.noise.enabled, "the target is the arm with noise"
        assert arm.rollout.temperature == 1.0
        self.matched += 1
        write_match(MATCH, output)

    def _evaluation(self, run_dir: Path, step: int, label: str) -> None:
        right = self.right.get(load_resolved_config(run_dir).run.name, range(4, 100))
        write_eval(run_dir, EvalRecord(label=label, step=step, mode="greedy", problems=verdicts(right[step])))

    def _checkpoint(self, run_dir: Path, name: str, step: int) -> None:
        folder = run_dir / f"checkpoints/step_{step:06d}"
        folder.mkdir(parents=True)
        position = RunPosition(
            step, step, 0, 0, 0, {}, {}, "c", self.data_hash.get(name, "same"), "b", "a", {}
        )  # fmt: skip
        (folder / "position.json").write_text(json.dumps(asdict(position)))
