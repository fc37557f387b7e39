from __future__ import annotations

from pathlib import Path

import pytest

from megatron_qerl.config import strict_yaml
from megatron_qerl.config.cluster import ClusterConfig
from megatron_qerl.config.loader import load_config
from megatron_qerl.config.schema import QuantizeConfig, RunConfig
from megatron_qerl.experiment.config import ExperimentConfig
from megatron_qerl.experiment.plan import Experiment, RunSpec

CONFIGS = Path(__file__).parents[2] / "configs"
QUANTIZE = sorted(CONFIGS.glob("quantize_*.yaml"))
RUNS = sorted(set(CONFIGS.glob("*.yaml")) - set(QUANTIZE))
OVERLAYS = sorted((CONFIGS / "overlays").glob("*.yaml"))
EXPERIMENTS = sorted((CONFIGS / "experiments").glob("*.yaml"))
CLUSTERS = sorted((CONFIGS / "cluster").glob("*.yaml"))
BASES = sorted((CONFIGS / "base").glob("*.yaml"))
PAPER = [
    CONFIGS / f"qwen2.5-{size}-{data}.yaml" for size in ("3b", "7b", "14b", "32b") for data in ("gsm8k", "bigmath")
]


def bases_of(path: Path) -> set[Path]:
    found = set()
    while (base := strict_yaml.read_mapping(path, "config").get("base")) is not None:
        path = (path.parent / base).resolve()
        found.add(path)
    return found


def test_every_yaml_file_is_of_a_known_kind() -> None:
    assert set(CONFIGS.rglob("*.y*ml")) == {*QUANTIZE, *RUNS, *OVERLAYS, *EXPERIMENTS, *BASES, *CLUSTERS}
    assert set(PAPER) < set(RUNS)
    assert OVERLAYS
    assert QUANTIZE


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_config_is_valid(path: Path) -> None:
    assert load_config(path).run.name == path.stem


@pytest.mark.parametrize("path", QUANTIZE, ids=lambda path: path.stem)
def test_a_quantize_config_is_valid(path: Path) -> None:
    load_config(path, model=QuantizeConfig)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_is_valid_and_every_arm_fits_its_recipe(path: Path) -> None:
    config = load_config(path, model=ExperimentConfig)
    experiment = Experiment.open(config, path)
    assert config.experiment.name == path.stem
    arms = {a.name: experiment.run_config(RunSpec("final", a.name, 1e-5, 1), 1.0) for a in config.arms}
    quantised = experiment.recipe.model.path
    for name, run in arms.items():
        assert (run.model.path == quantised) == name.startswith("nvfp4")
        assert run.noise.enabled == name.endswith("noise")
    assert set(arms) == {"bf16", "bf16_noise", "nvfp4", "nvfp4_noise", "bf16_entropy"}
    assert experiment.arm("bf16_entropy").match_entropy_of == "nvfp4_noise"


def test_the_demos_experiment_has_problems_to_choose_by_and_to_report() -> None:
    path = CONFIGS / "experiments/five_arms.yaml"
    Experiment.open(load_config(path, model=ExperimentConfig), path).check_split()


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_config_is_valid(path: Path) -> None:
    load_config(path, model=ClusterConfig)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_an_overlay_is_valid_on_every_run_config_and_changes_it(path: Path, overlay: Path) -> None:
    assert load_config(path, [overlay]) != load_config(path)


def test_no_base_is_left_over() -> None:
    used = {base for path in RUNS for base in bases_of(path)}
    assert used == {base.resolve() for base in BASES}


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_the_paper_configs_have_the_papers_settings(path: Path) -> None:
    config: RunConfig = load_config(path)
    assert config.lora.rank == 32
    assert len(config.lora.targets) == 7
    assert config.optimizer.learning_rate == 1e-5
    assert config.rollout.temperature == 1.0
    assert (config.noise.sigma_start, config.noise.sigma_end, config.noise.stages) == (1e-2, 5e-4, 10)
    assert config.noise.roles == ("input", "post_attention")
    dapo = path.stem.endswith("bigmath")
    assert config.algorithm.name == ("dapo" if dapo else "grpo")
    assert config.algorithm.dynamic_sampling.enabled is dapo
    if dapo:
        assert (config.algorithm.ratio_clip_low, config.algorithm.ratio_clip_high) == (0.2, 0.28)
        assert config.algorithm.loss_aggregation == "token_mean"


def test_the_demo_trains_and_evaluates_on_different_operand_pairs() -> None:
    config = load_config(CONFIGS / "demo.yaml")
    quantize = load_config(CONFIGS / "quantize_demo.yaml", model=QuantizeConfig)
    assert (config.data.train.split, config.data.eval.split) == ("train", "heldout")
    assert config.data.train.heldout_fraction == config.data.eval.heldout_fraction
    assert config.model.path == quantize.output
