"""The demo run in numbers: python -m benchmarks.demo_cpu [RUN_DIR]   (after make demo; default runs/demo)

Writes results/demo_cpu.json: accuracies with intervals, noise proof, parity, wall seconds by phase, and every step's
time with what it did, copied from the run's own records.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from benchmarks.environment import RESULTS, write

STEP_FIELDS = (
    "time/step_s", "time/rollout_s", "time/train_s", "groups/generated", "groups/kept", "tokens/completion",
    "reward/score_mean", "groups/mixed_fraction", "noise/sigma_nominal", "noise/sigma_effective", "noise/engine_slope",
    "parity/logprob_max_abs",
)  # fmt: skip


def main(run: Path) -> None:
    """Collect and write."""
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [{"step": x["step"], **{f: x["values"].get(f) for f in STEP_FIELDS}} for x in lines]
    # One round is 64 completions. Steps that refilled generated more, so time is given per 64.
    warm = [s["time/step_s"] * 8 / s["groups/generated"] for s in steps[1:]]
    evaluations = {p.stem: json.loads(p.read_text())["accuracy"] for p in sorted(run.glob("eval_*.json"))}
    kept = ("accuracy_before", "accuracy_after", "noise_modules_expected", "noise_modules_touched",
            "logprob_parity_max", "wall_s", "steps", "updates", "seed", "tokens", "hardware")  # fmt: skip
    write(
        RESULTS / "demo_cpu.json",
        {
            "summary": {k: summary[k] for k in kept},
            "evaluations": evaluations,
            "warm_step_s_per_64_completions_median": round(median(warm), 2),
            "steps": steps,
        },
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
