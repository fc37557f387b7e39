"""An experiment that would compare what cannot be compared is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_qerl.cli.main import main
from megatron_qerl.config import strict_yaml
from megatron_qerl.config.loader import load_config
from megatron_qerl.errors import ConfigError, UserError
from megatron_qerl.experiment.config import ExperimentConfig
from megatron_qerl.experiment.plan import Experiment, RunSpec, describe, differences

RECIPE = """\
run: {name: recipe}
model: {path: models/packed}
data: {train: {kind: arithmetic}, eval: {kind: arithmetic, split: heldout}}
algorithm: {name: dapo, likelihood: replay}
noise: {stages: 3}
train: {steps: 9}
"""
EXPERIMENT = """\
experiment: {name: two, recipe: recipe.yaml}
arms:
  - {name: noisy, title: Noisy}
  - {name: plain, title: Plain, overrides: {noise.enabled: false, model.path: models/dense}, match_entropy_of: noisy}
seeds: [1, 2]
budget: {steps: 6, evaluate_every_steps: 2}
tuning: {learning_rates: [1.0e-4, 4.0e-4], refine_factors: [0.5, 2.5], steps: 3}
evaluation: {quality: 0.5, comparisons: [[noisy, plain]]}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    file = tmp_path / "two.yaml"
    file.write_text(EXPERIMENT)
    return file


def opened(path: Path, *overrides: str) -> Experiment:
    folder = f"experiment.output_dir={path.parent}"
    return Experiment.open(load_config(path, overrides=[folder, *overrides], model=ExperimentConfig), path)


def test_a_run_is_the_recipe_with_the_arms_keys_and_the_experiments(path: Path) -> None:
    experiment = opened(path, "experiment.overrides={eval.problems: 9, model.path: models/shared}")
    spec = RunSpec("final", "plain", 1e-4, 2)
    run = experiment.run_config(spec, 1.25)
    assert run.model.path == Path("models/dense")
    assert not run.noise.enabled
    assert (run.rollout.temperature, run.run.seed, run.optimizer.learning_rate) == (1.25, 2, 1e-4)
    assert (run.train.steps, run.eval.interval_steps, run.eval.modes) == (6, 2, ("greedy",))
    assert (run.checkpoint.interval_steps, run.checkpoint.keep) == (1, 6)
    assert run.run.output_dir / run.run.name == path.parent / "two/runs/final-plain-lr0.0001-seed2"
    noisy = experiment.run_config(RunSpec("tune", "noisy", 1e-4, 1000), 1.25)
    assert noisy.model.path == Path("models/shared")
    assert noisy.eval.problems == run.eval.problems == experiment.recipe.eval.problems == 9
    assert (noisy.rollout.temperature, noisy.train.steps, noisy.eval.interval_steps) == (1.0, 3, 0)


def test_every_arm_gets_the_same_number_of_trials(path: Path) -> None:
    experiment = opened(path)
    grid = experiment.grid("noisy")
    assert [s.learning_rate for s in grid] == [1e-4, 4e-4]
    for best in (1e-4, 4e-4):
        refined = experiment.refinement("plain", best)
        assert [s.learning_rate for s in refined] == pytest.approx([best * 0.5, best * 2.5])
        assert not {s.learning_rate for s in refined} & {s.learning_rate for s in grid}
    assert [(s.arm, s.seed) for s in experiment.finals({"noisy": 1e-4, "plain": 4e-4})] == [
        ("noisy", 1), ("plain", 1), ("noisy", 2), ("plain", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tuning.refine_factors=[4.0]", "meets 0.0004 again"),
        ("seeds=[1, 1]", "seeds: 1 is there twice"),
        ("seeds=[1000]", "seeds: 1000 is there twice"),
        ("evaluation.comparisons=[[noisy, other]]", "there is no arm other"),
        ("evaluation.comparisons=[[noisy, noisy]]", "compared with itself"),
        ("evaluation.mode=sampled", "would measure arm plain at its own temperature"),
        ("entropy.temperature_low=3.0", "must be below"),
        ("evaluation.quality=1.5", "evaluation.quality"),
        ("experiment.name=a/b", "must be letters"),
        ("arms=[{name: A, title: x}]", "lower-case"),
        ("arms=[{name: a, title: x, overrides: {run.seed: 3}}]", "run.seed is set by the experiment"),
        ("arms=[{name: a, title: x, overrides: {noise: {enabled: false}}}]", "must be a dotted key"),
        (
            "arms=[{name: noisy, title: x}, {name: plain, title: y, match_entropy_of: plain}]",
            "match_entropy_of = plain",
        ),
        ("arms=[{name: a, title: x, paper_arm: full}]", "paper_arm"),
        ("arms=[]", "arms"),
        ("experiment.overrides={train.steps: 3}", "train.steps is set by the experiment"),
        ("experiment.overrides={train.stepz: 3}", "train.stepz"),
        ("tuning.selection_share=0.0", "selection_share"),
        ("budget.steps=2", "noise.stages"),
        ("tuning.steps=2", "noise.stages"),
    ],
)
def test_a_wrong_experiment_is_one_clear_error(path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        opened(path, override)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("{optimizer.weight_decoy: 0.1}", r"arm plain .*optimizer.weight_decoy.*weight_decay"),
        ("{rollout.temperature: hot}", r"arm plain .*rollout.temperature = hot"),
        ("{rollout.engine: sglang}", r"rollout.engine = sglang"),
        ("{eval.problems: 5}", r"arms.plain.overrides = eval: arms noisy and plain differ"),
        ("{data.system_prompt: Hello}", r"arms.plain.overrides = data"),
        ("{rollout.group_size: 4}", r"arms.plain.overrides = rollout"),
    ],
)
def test_an_arm_that_does_not_fit_is_named(path: Path, overrides: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        opened(path, f"arms=[{{name: noisy, title: x}}, {{name: plain, title: y, overrides: {overrides}}}]")


def test_an_unknown_key_and_a_missing_recipe_are_explained(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"budget.step = 3 .*Did you mean budget.steps"):
        opened(path, "budget.step=3")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        opened(path, "experiment.recipe=nowhere.yaml")


def test_a_temperature_is_either_matched_or_set(path: Path) -> None:
    text = path.read_text().replace("overrides: {", "overrides: {rollout.temperature: 1.2, ")
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"Remove rollout\.temperature"):
        opened(path)


def test_clusters_are_split_by_name_alone_and_both_halves_are_needed(path: Path) -> None:
    experiment = opened(path)
    clusters = [f"add:{a},{b}" for a in range(1, 40) for b in range(a, 40)]
    share = sum(experiment.selects(c) for c in clusters) / len(clusters)
    # Of 780 hashed names 30 % are expected; four standard errors are 0.066.
    assert share == pytest.approx(0.3, abs=0.066)
    assert [opened(path, "seeds=[5]").selects(c) for c in clusters] == [experiment.selects(c) for c in clusters]
    experiment.check_split()
    with pytest.raises(ConfigError, match=r"tuning\.selection_share = 0\.001: of 29 evaluation clusters 0 would"):
        opened(path, "tuning.selection_share=0.001").check_split()


def test_without_a_search_every_problem_is_reported(path: Path) -> None:
    experiment = opened(path, "tuning.learning_rates=[1.0e-4]", "tuning.refine_factors=[]")
    assert not experiment.searches
    assert not any(experiment.selects(f"c{n}") for n in range(100))
    experiment.check_split()
    assert any("none, learning rate 0.0001" in line for line in describe(experiment))


def test_a_folder_belongs_to_one_experiment_and_what_differs_is_named(path: Path) -> None:
    opened(path).claim()
    opened(path).claim()
    opened(path, "experiment.launcher=[torchrun]", "experiment.devices=8").claim()
    with pytest.raises(UserError, match=r"another config \(budget\.steps: 6 -> 7\)"):
        opened(path, "budget.steps=7").claim()
    text = path.read_text()
    path.write_text(text.replace("title: Noisy", "title: Loud"))
    loud = opened(path)
    path.write_text(text)
    with pytest.raises(UserError, match=r"arms\.noisy\.title: Noisy -> Loud"):
        loud.claim()
    recipe = path.with_name("recipe.yaml")
    recipe.write_text(recipe.read_text().replace("stages: 3", "stages: 2, sigma_end: 1.0e-2"))
    with pytest.raises(UserError, match=r"recipe noise\.sigma_end: 0\.0005 -> 0\.01"):
        opened(path).claim()


def test_a_folder_with_other_content_is_left_alone(path: Path) -> None:
    (path.parent / "two").mkdir()
    (path.parent / "two/thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"has content and no experiment\.yaml"):
        opened(path).claim()
    assert (path.parent / "two/thesis.tex").exists()


def test_the_order_of_arms_is_no_difference(path: Path) -> None:
    config = load_config(path, model=ExperimentConfig)
    turned = config.model_copy(update={"arms": config.arms[::-1]})
    assert differences(config, turned) == []
    assert strict_yaml.dump(config.model_dump(mode="json")) != strict_yaml.dump(turned.model_dump(mode="json"))


def test_a_rehearsal_needs_neither_data_nor_models(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "configs/experiments/five_arms_32b.yaml"
    assert main(["experiment", str(path), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "# tuning: 5 trials of 40 steps an arm, 25 in all; rates 5e-06, 1e-05, 2e-05 for all," in printed
    assert "data/math500/test.jsonl (NOT FOUND here)" in printed
    assert main(["experiment", str(path), "experiment.name=unused"]) == 2
    assert "data/math500/test.jsonl" in capsys.readouterr().err
