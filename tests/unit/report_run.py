"""Writes a made-up but realistic run folder, so that the report can be rendered without training anything.

The numbers follow the shape of a small arithmetic run: a reward that rises and saturates, ten noise stages, a ratio
near one with rare spikes, an evaluation before and after. All come from one seed.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from megatron_qerl.metrics.names import METRICS
from megatron_qerl.metrics.sinks import JsonlSink
from megatron_qerl.report.summary import (
    Accuracy,
    EvalProblem,
    EvalRecord,
    SampleRecord,
    Summary,
    append_samples,
    write_eval,
    write_summary,
)
from megatron_qerl.types import Outcome, StepMetrics

STAGES = 10
MODULES = 60
CONFIG = """\
run:
  name: smollm2-arithmetic
  output_dir: runs
  seed: 3
model:
  path: models/SmolLM2-135M-Instruct-NVFP4
  dtype: bfloat16
  device: cpu
noise:
  enabled: true
  schedule: exponential
  sigma_start: 0.01
  sigma_end: 0.0005
  stages: 10
  roles: [input, post_attention]
rollout:
  engine: embedded
  prompts_per_step: 8
  group_size: 8
  temperature: 1.0
  parity_bound: 0.08
algorithm:
  name: dapo
  likelihood: clean
"""


def step_metrics(step: int, steps: int, rng: random.Random) -> StepMetrics:
    """One plausible line; evaluations every quarter of the run."""
    progress = step / max(steps, 1)
    correct = min(0.97, max(0.02, 0.15 + 0.6 * (1 - math.exp(-3 * progress)) + rng.gauss(0, 0.05)))
    left = 1.0 - correct
    stage = min(STAGES - 1, STAGES * (step - 1) // max(steps, 1))
    sigma = 0.0 if stage == 0 else 1e-2 * (5e-4 / 1e-2) ** ((stage - 1) / (STAGES - 2))
    spike = 4.0 if rng.random() < 0.02 else 1.0
    mean_tokens = 14 + 5 * progress + rng.gauss(0, 0.8)
    times = {
        "rollout": 5.2 + rng.gauss(0, 0.3),
        "reward": 0.4,
        "logprob": 0.9,
        "train": 2.6 + rng.gauss(0, 0.15),
        "sync": 0.05,
        "eval": 0.0,
        "checkpoint": 0.7 if step % 10 == 0 else 0.0,
        "noise": 0.08,
        "other": 0.02,
    }
    kept, all_correct, all_wrong = 5 + rng.randrange(4), rng.randrange(3), rng.randrange(2)
    values: dict[str, float] = {
        "reward/mean": correct,
        "reward/std": math.sqrt(correct * (1 - correct)),
        "reward/score_mean": correct,
        "outcome/correct_fraction": correct,
        "outcome/wrong_fraction": left * 0.7,
        "outcome/unparsable_fraction": left * 0.15,
        "outcome/truncated_fraction": left * 0.14,
        "outcome/timeout_fraction": left * 0.01,
        "groups/mixed_fraction": min(1.0, max(0.0, 0.8 - 0.5 * progress + rng.gauss(0, 0.06))),
        "groups/generated": kept + all_correct + all_wrong,
        "groups/kept": kept,
        "groups/dropped_all_correct": all_correct,
        "groups/dropped_all_wrong": all_wrong,
        "groups/refill_rounds": rng.randrange(3),
        "groups/shortfall": 8 - kept,
        "length/mean_tokens": mean_tokens,
        "length/max_tokens": 24,
        "length/min_tokens": max(2, round(mean_tokens / 4)),
        "length/truncated_fraction": left * 0.2,
        "entropy/sampling_mean_nats": 1.3 - 0.5 * progress + 8 * sigma + rng.gauss(0, 0.03),
        "ratio/mean": 1.0 + rng.gauss(0, 0.004),
        "ratio/max": 1.0 + abs(rng.gauss(0.4, 0.1)) * spike,
        "ratio/min": max(0.02, 0.6 - abs(rng.gauss(0, 0.1)) * spike),
        "ratio/std": 0.03 + 2 * sigma + abs(rng.gauss(0, 0.005)),
        "ratio/clip_low_fraction": abs(rng.gauss(0.004, 0.002)),
        "ratio/clip_high_fraction": abs(rng.gauss(0.006, 0.002)),
        "kl/k1_nats": rng.gauss(0.0003, 0.0006),
        "kl/k3_nats": abs(rng.gauss(0.0008, 0.0003)),
        "correction/effective_sample_fraction": 0.99 - 6 * sigma - 0.01 * spike,
        "correction/truncated_fraction": 0.001 * spike,
        "correction/weight_mean": 1.0 + rng.gauss(0, 0.002),
        "correction/weight_max": 1.2 + 20 * sigma * spike,
        "noise/stage": stage,
        "noise/sigma_nominal": sigma,
        "noise/sigma_effective": sigma * (1 + rng.gauss(0, 0.004)),
        "noise/modules_expected": MODULES,
        "noise/modules_touched": MODULES if stage else 0,
        "noise/logprob_change_mean": 9 * sigma,
        "noise/logprob_change_max": 70 * sigma,
        "parity/logprob_max_abs": 0.03 * spike**0.3 * (1 + abs(rng.gauss(0, 0.1))),
        "parity/logprob_mean_abs": 0.004 * (1 + abs(rng.gauss(0, 0.05))),
        "loss/policy": rng.gauss(0, 0.02),
        "optimizer/learning_rate": 1e-5 * min(1.0, step / 5),
        "optimizer/gradient_norm": 0.4 * spike * (1 + abs(rng.gauss(0, 0.2))),
        "optimizer/update_norm": 0.02 * (1 + abs(rng.gauss(0, 0.1))),
        "optimizer/clipped": float(spike > 1.0),
        "optimizer/updates": step,
        "policy/adapter_version": step - 1,
        "tokens/prompt": 64 * 38,
        "tokens/completion": round(64 * mean_tokens),
        "tokens/trained": round(8 * kept * mean_tokens),
        **{f"time/{phase}_s": seconds for phase, seconds in times.items()},
        "time/step_s": sum(times.values()),
        "memory/peak_rss_bytes": 2.1e9 + 2e8 * min(1.0, step / 3),
        "memory/weights_packed_bytes": 1.31e8,
        "memory/weights_cache_bytes": 2.7e8,
        "memory/adapter_bytes": 3.9e7,
        "memory/optimizer_bytes": 7.8e7,
        "memory/kv_cache_bytes": 4.4e7,
    }
    if step % max(1, steps // 4) == 0:
        values["eval/greedy_accuracy"] = min(0.95, 0.2 + 0.6 * progress)
        values["eval/greedy_accuracy_low"] = values["eval/greedy_accuracy"] - 0.06
        values["eval/greedy_accuracy_high"] = min(1.0, values["eval/greedy_accuracy"] + 0.06)
    assert values.keys() <= METRICS.keys()
    return StepMetrics(step, values)


def _evaluation(label: str, step: int, share: float, rng: random.Random) -> EvalRecord:
    others = (Outcome.WRONG, Outcome.WRONG, Outcome.WRONG, Outcome.UNPARSABLE, Outcome.TRUNCATED)
    problems = []
    for index in range(120):
        outcome = Outcome.CORRECT if rng.random() < share else rng.choice(others)
        source = "sums" if index % 2 else "products"
        score = float(outcome is Outcome.CORRECT)
        problems.append(
            EvalProblem(uid=f"p{index}", cluster=f"c{index // 2}", source=source, outcome=outcome, score=score)
        )
    mean = sum(problem.score for problem in problems) / len(problems)
    accuracy = Accuracy(
        mean=mean,
        low=max(0.0, mean - 0.08),
        high=min(1.0, mean + 0.08),
        count=len(problems),
        clusters=60,
        method="cluster_bootstrap",
    )
    return EvalRecord(label=label, step=step, mode="greedy", accuracy=accuracy, problems=tuple(problems))


def write_run(run_dir: Path, steps: int, *, seed: int = 0) -> Path:
    """A complete run folder with ``steps`` steps; returns it."""
    rng = random.Random(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(CONFIG, encoding="utf-8")
    sink = JsonlSink(run_dir / "metrics.jsonl")
    sink.start()
    for step in range(1, steps + 1):
        sink.log(step_metrics(step, steps, rng))
    sink.close()
    before, after = _evaluation("before", 0, 0.2, rng), _evaluation("after", steps, 0.7, rng)
    write_eval(run_dir, before)
    write_eval(run_dir, after)
    append_samples(run_dir, (_sample(step, rng) for step in range(1, steps + 1, max(1, steps // 20))))
    write_summary(
        run_dir,
        Summary(
            run_name="smollm2-arithmetic",
            model="models/SmolLM2-135M-Instruct-NVFP4",
            accuracy_before=before.accuracy,
            accuracy_after=after.accuracy,
            noise_modules_expected=MODULES,
            noise_modules_touched=MODULES,
            logprob_parity_max=0.041,
            wall_s={"rollout": 5.2 * steps, "train": 2.6 * steps, "eval": 31.0, "other": 4.0, "run": 8.6 * steps + 35},
            steps=steps,
            updates=steps,
            seed=3,
            versions={"megatron-qerl": "0.1.0", "torch": "2.11.0", "megatron-core": "0.19.2"},
            base_hash="9f2c" * 16,
            likelihood="clean",
            noise={"schedule": "exponential", "sigma_start": 0.01, "sigma_end": 0.0005, "roles": ["input"]},
            tokens={"prompt": 2432 * steps, "completion": 1088 * steps, "trained": 800 * steps},
            hardware={"device": "cpu", "threads": "2"},
            config_path="runs/smollm2-arithmetic/config.yaml",
            started_at="2026-03-02T10:00:00+00:00",
            finished_at="2026-03-02T10:31:20+00:00",
        ),
    )
    return run_dir


def _sample(step: int, rng: random.Random) -> SampleRecord:
    first, second = rng.randint(2, 12), rng.randint(2, 12)
    guess = first * second if rng.random() < 0.6 else first * second + 1
    correct = guess == first * second
    return SampleRecord(
        step=step,
        uid=f"mul-{first}-{second}",
        question=f"What is {first} * {second}? Put the answer in \\boxed{{}}.",
        answer=str(first * second),
        outcome=Outcome.CORRECT if correct else Outcome.WRONG,
        score=float(correct),
        reward=float(correct),
        extracted=str(guess),
        tokens=17,
        text=f"Since {first} < {first + second}, we multiply:\n{first} * {second} = \\boxed{{{guess}}}<|im_end|>",
    )
