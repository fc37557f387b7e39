from __future__ import annotations

from pathlib import Path

import pytest

from megatron_qerl.config.loader import load_config
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.experiment.published import published

CONFIGS = Path(__file__).parents[2] / "configs"
FOUR = ["aime24/test", "aime25/test", "amc23/test", "math500/test"]


def config(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides=overrides)


def test_the_papers_figures_stand_beside_the_papers_settings() -> None:
    found = published("nvfp4_lora_aqn", config("qwen2.5-7b-gsm8k"), ["gsm8k/test"])
    assert found is not None
    assert (found.percent, found.differs) == (90.8, ())
    found = published("bf16_lora", config("qwen2.5-3b-gsm8k"), ["gsm8k/test"])
    assert found is not None
    assert (found.percent, found.differs) == (76.1, ("learning rate 5e-06 in the paper",))
    found = published("nvfp4_lora", config("qwen2.5-32b-bigmath"), FOUR)
    assert found is not None
    assert found.percent == 41.4


@pytest.mark.parametrize(
    ("arm", "name", "sources", "overrides"),
    [
        (None, "qwen2.5-7b-gsm8k", ["gsm8k/test"], ()),
        ("bf16_lora", "demo", ["arithmetic"], ()),
        ("bf16_lora", "qwen2.5-32b-gsm8k", ["gsm8k/test"], ()),  # the paper has no such pair
        ("bf16_lora", "qwen2.5-32b-bigmath", ["math500/test"], ()),  # one of the four is not their mean
        ("bf16_lora", "qwen2.5-7b-gsm8k", ["math500/test"], ()),
        ("bf16_lora", "qwen2.5-7b-gsm8k", ["gsm8k/test"], ("data.train.kind=jsonl",)),
        ("bf16_lora", "qwen2.5-7b-gsm8k", ["gsm8k/test"], ("model.path=models/qwen2.5-7b",)),  # not the instruct model
    ],
)  # fmt: skip
def test_another_setting_has_no_figure(arm, name, sources, overrides) -> None:
    assert published(arm, config(name, *overrides), sources) is None
