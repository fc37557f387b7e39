"""The paper's accuracies (QeRL, arXiv 2510.11696v1), each with the setting that it was measured in.

A figure stands beside ours only where model, training data, objective, evaluation and arm are the paper's. A number
next to one from another setting would invite a comparison that says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_qerl.config.schema import RunConfig
from megatron_qerl.experiment.config import PaperArm

_LEARNING_RATE: dict[PaperArm, float] = {"bf16_lora": 5e-6, "nvfp4_lora": 1e-5, "nvfp4_lora_aqn": 1e-5}
_GSM8K: dict[str, dict[PaperArm, float]] = {
    "3b": {"bf16_lora": 76.1, "nvfp4_lora": 83.3, "nvfp4_lora_aqn": 83.7},
    "7b": {"bf16_lora": 88.1, "nvfp4_lora": 88.5, "nvfp4_lora_aqn": 90.8},
}
_FOUR_MEAN: dict[str, dict[PaperArm, float]] = {
    "7b": {"bf16_lora": 35.7, "nvfp4_lora": 37.0, "nvfp4_lora_aqn": 36.4},
    "14b": {"bf16_lora": 40.2, "nvfp4_lora": 40.5, "nvfp4_lora_aqn": 42.0},
    "32b": {"bf16_lora": 42.2, "nvfp4_lora": 41.4, "nvfp4_lora_aqn": 45.6},
}
_FOUR = ("aime24", "aime25", "amc23", "math500")
NO_MATCH = "no published figure matches"


@dataclass(frozen=True)
class Published:
    """A figure of the paper in per cent, and in which respects its run differs from ours nevertheless."""

    percent: float
    table: str
    differs: tuple[str, ...]


def published(arm: PaperArm | None, config: RunConfig, sources: Iterable[str]) -> Published | None:
    """The paper's figure for the setting of ``config``, or None.

    Args:
        arm: which of the paper's arms this is; None for an arm that the paper does not have.
        config: of the final run.
        sources: the benchmarks that were evaluated.
    """
    model = re.search(r"qwen2\.5-(3b|7b|14b|32b)-instruct", config.model.path.name.lower())
    if arm is None or model is None:
        return None
    size, kind, objective = model[1], config.data.train.kind, config.algorithm.name
    folders = sorted(source.split("/")[0].lower().replace("-", "") for source in sources)
    rate = _LEARNING_RATE[arm]
    differs = () if config.optimizer.learning_rate == rate else (f"learning rate {rate:g} in the paper",)
    if (kind, objective, folders) == ("gsm8k", "grpo", ["gsm8k"]) and size in _GSM8K:
        return Published(_GSM8K[size][arm], "Table 1, GSM8K", differs)
    trained_on = (config.data.train.path.parent.name.lower() if config.data.train.path else "").replace("-", "")
    if (trained_on, objective, tuple(folders)) == ("bigmath", "dapo", _FOUR) and size in _FOUR_MEAN:
        return Published(_FOUR_MEAN[size][arm], "Table 2, mean of four benchmarks", differs)
    return None
