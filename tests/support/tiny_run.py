"""A complete run of a few seconds: tiny model, one-digit problems, two noise stages."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.tiny_model import write_model

TEMPLATE = """
run: {{name: tiny, output_dir: {folder}/runs, seed: 3}}
model: {{path: {folder}/model, dtype: float32, max_sequence_length: 64}}
lora: {{rank: 4, alpha: 8.0}}
noise: {{stages: 3, sigma_start: 0.05, sigma_end: 0.01}}
data:
  train: {{kind: jsonl, path: {folder}/train.jsonl}}
  eval: {{kind: jsonl, path: {folder}/eval.jsonl}}
rollout: {{prompts_per_step: 4, group_size: 16, max_new_tokens: 3, max_prompt_tokens: 16}}
algorithm: {{name: dapo, likelihood: replay, dynamic_sampling: {{enabled: true}}}}
optimizer: {{learning_rate: 1.0e-2, warmup_steps: 2}}
train: {{steps: 6}}
checkpoint: {{interval_steps: 2}}
metrics: {{console: false}}
"""


def write_run(folder: Path) -> Path:
    """Model, data and config in ``folder``; returns the config's path."""
    write_model(folder / "model")
    rows = [{"question": f"{a}+{b}", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = [{"question": f"{a}*{b}", "answer": str(a * b)} for a in range(3) for b in range(4)]
    (folder / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = folder / "tiny.yaml"
    config.write_text(TEMPLATE.format(folder=folder))
    return config
