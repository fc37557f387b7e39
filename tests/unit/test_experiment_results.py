"""From run folders with chosen numbers to the table: what is run, when it is read, and what is computed from it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_qerl.config.loader import load_config
from megatron_qerl.errors import FaultError, UserError
from megatron_qerl.experiment.config import ExperimentConfig
from megatron_qerl.experiment.plan import Experiment
from megatron_qerl.experiment.report import markdown, page, write_results
from megatron_qerl.experiment.results import build, over_seeds
from megatron_qerl.experiment.runner import Runner
from tests.support.fake_runs import MATCH, FakeLaunch, verdicts
from tests.unit.test_experiment_config import path  # noqa: F401  the two-arm experiment's file

NOISY, PLAIN = "final-noisy-lr0.0001-seed", "final-plain-lr0.0001-seed"


@pytest.fixture
def experiment(path: Path) -> Experiment:  # noqa: F811
    overrides = [f"experiment.output_dir={path.parent}", "tuning.selection_share=0.3"]
    config = load_config(path, overrides=overrides, model=ExperimentConfig)
    opened = Experiment.open(config, path)
    opened.claim()
    return opened


def changed(experiment: Experiment, **sections: dict[str, Any]) -> Experiment:
    """The same experiment with some keys of its sections replaced."""
    config = experiment.config
    update = {k: getattr(config, k).model_copy(update=v) for k, v in sections.items()}
    return Experiment(config.model_copy(update=update), experiment.recipe_path, experiment.recipe, experiment.folder)


def run(experiment: Experiment, launch: FakeLaunch) -> dict[str, Any]:
    runner = Runner(experiment, lambda _: None)
    runner.launch = launch  # type: ignore[assignment]
    return build(experiment, runner.run())


def test_the_whole_matrix_is_run_once_and_then_skipped(experiment: Experiment) -> None:
    launch = FakeLaunch()
    first = run(experiment, launch)
    # Two arms x (2 rates + 2 refinements) x 1 tuning seed, then two arms x two seeds.
    assert len(launch.trained) == 8 + 4
    assert launch.trained[:2] == ["tune-noisy-lr0.0001-seed1000", "tune-noisy-lr0.0004-seed1000"]
    assert launch.matched == 1
    again = FakeLaunch()
    assert run(experiment, again) == first
    assert (again.trained, again.evaluated, again.matched) == ([], [], 0)


def test_an_interrupted_experiment_goes_on_where_it_stopped(experiment: Experiment) -> None:
    plain, noisy = PLAIN.replace("0.0001", "5e-05"), NOISY.replace("0.0001", "5e-05")
    broken = FakeLaunch(fail_at=f"{plain}1")
    with pytest.raises(KeyboardInterrupt):
        run(experiment, broken)
    rest = FakeLaunch()
    run(experiment, rest)
    assert rest.trained == [f"{plain}1", f"{noisy}2", f"{plain}2"]
    assert not set(rest.trained) & set(broken.trained)


def test_the_best_rate_of_the_selecting_clusters_is_taken_and_of_equals_the_smallest(experiment: Experiment) -> None:
    # Right answers after the three steps of a trial: 20 of 20 at the refined rate 0.001 of the plain arm alone.
    launch = FakeLaunch(
        right={"tune-plain-lr0.0004-seed1000": (4, 4, 4, 10), "tune-plain-lr0.001-seed1000": (4, 4, 4, 20)}
    )
    results = run(experiment, launch)
    assert "tune-plain-lr0.001-seed1000" in launch.trained
    assert results["arms"]["plain"]["learning_rate"] == 1e-3
    assert results["arms"]["noisy"]["learning_rate"] == 5e-5
    trials = results["tuning"]["plain"]["trials"]
    assert [t["learning_rate"] for t in trials] == [1e-4, 4e-4, 2e-4, 1e-3]
    assert trials[3]["selection_accuracy"] == 1.0
    assert trials[0]["tokens"] == 300


def test_selecting_clusters_are_never_reported(experiment: Experiment) -> None:
    results = run(experiment, FakeLaunch())
    reported = [p for p in verdicts(4) if not experiment.selects(p.cluster)]
    assert 0 < len(reported) < 20
    before = results["arms"]["noisy"]["seeds"]["1"]["accuracy_before"]
    assert before["count"] == before["clusters"] == len(reported)
    assert before["mean"] == sum(p.score for p in reported) / len(reported)


def single_rate(experiment: Experiment, **budget: Any) -> Experiment:
    return changed(experiment, tuning={"learning_rates": (1e-4,), "refine_factors": ()}, budget=budget)


def test_runs_are_read_at_the_tokens_that_all_reached(experiment: Experiment) -> None:
    # The plain arm generates 100 tokens a step, 600 in all; the noisy one 170, so it passes 600 in its fourth step.
    launch = FakeLaunch(tokens={f"{NOISY}1": 170, f"{NOISY}2": 170})
    results = run(single_rate(experiment), launch)
    assert results["budget"]["completion_tokens"] == 600
    noisy, plain = (results["arms"][name]["seeds"]["1"] for name in ("noisy", "plain"))
    assert (noisy["step"], noisy["tokens"], noisy["steps_trained"]) == (3, 510, 6)
    assert (plain["step"], plain["tokens"]) == (6, 600)
    # Step 3 lies between two evaluations, so its checkpoint was evaluated; after that only it and the last are kept.
    assert launch.evaluated == [(f"{NOISY}1", 3), (f"{NOISY}2", 3)]
    assert noisy["accuracy_after"]["mean"] == 7 / 20
    assert plain["accuracy_after"]["mean"] == 10 / 20
    kept = sorted(p.name for p in (experiment.runs_dir / f"{NOISY}1/checkpoints").iterdir())
    assert kept == ["step_000003", "step_000006"]
    # 10 s a step of which 3 were evaluation and 1 a checkpoint; two CPU threads.
    assert noisy["wall_s"] == pytest.approx(18.0)
    assert noisy["device_hours"] == pytest.approx(18.0 * 2 / 3600)
    assert noisy["mixed_group_fraction"] == 0.5


def test_a_smaller_budget_is_kept_and_a_larger_one_is_said_not_to_be(experiment: Experiment) -> None:
    results = run(single_rate(experiment, completion_tokens=250), FakeLaunch())
    assert {s["tokens"] for a in results["arms"].values() for s in a["seeds"].values()} == {200}
    results = run(single_rate(experiment, completion_tokens=900), FakeLaunch())
    assert results["budget"] == {"completion_tokens_wanted": 900, "completion_tokens": 600, "steps": 6}
    assert "A run ended before 900 completion tokens, so all runs are read at 600" in markdown(results)


def test_a_budget_below_the_first_step_is_refused(experiment: Experiment) -> None:
    launch = FakeLaunch()
    with pytest.raises(UserError, match=r"budget\.completion_tokens = 90: .*100 tokens in its first step"):
        run(single_rate(experiment, completion_tokens=90), launch)
    assert len(launch.trained) == 1, "the first run shows it"


def test_a_budget_that_a_short_run_shrinks_below_anothers_first_step_is_refused(experiment: Experiment) -> None:
    with pytest.raises(UserError, match=rf"budget\.completion_tokens = 600: run {PLAIN}1 had generated 900"):
        run(single_rate(experiment), FakeLaunch(tokens={f"{PLAIN}1": 900}))


def test_a_base_model_that_changes_on_the_way_is_refused(experiment: Experiment) -> None:
    run(single_rate(experiment), FakeLaunch())
    stored = experiment.runs_dir / f"{NOISY}2/summary.json"
    stored.write_text(stored.read_text().replace("base of", "another base of"))
    with pytest.raises(FaultError, match=r"model models/packed: was changed"):
        run(single_rate(experiment), FakeLaunch())


def test_differences_are_of_pairs_with_intervals_over_problems_and_over_seeds(experiment: Experiment) -> None:
    right = {f"{NOISY}1": (4,) * 6 + (14,), f"{NOISY}2": (4,) * 6 + (12,), f"{PLAIN}1": (4,) * 6 + (10,)}
    results = run(single_rate(experiment), FakeLaunch(right=right | {f"{PLAIN}2": (4,) * 6 + (10,)}))
    (pair,) = results["comparisons"]
    assert (pair["first"], pair["second"]) == ("noisy", "plain")
    assert pair["after"]["per_seed"] == {"1": pytest.approx(0.2), "2": pytest.approx(0.1)}
    assert pair["after"]["mean"] == pytest.approx(0.15)
    assert pair["after"]["count"] == 40
    assert pair["after"]["clusters"] == 20
    # Two seeds: mean 0.15, standard error 0.05, t = 12.706.
    assert pair["after"]["over_seeds"]["low"] == pytest.approx(0.15 - 12.7062 * 0.05, abs=1e-4)
    assert pair["before"]["mean"] == 0.0
    # Problems 10 to 13 make the difference: benchmark 0 has 10 and 12, benchmark 1 has 11 and 13.
    assert {s: b["mean"] for s, b in pair["benchmarks_after"].items()} == {
        "bench0/test": pytest.approx(0.15), "bench1/test": pytest.approx(0.15),
    }  # fmt: skip
    after = results["arms"]["noisy"]["accuracy_after"]
    assert set(after["benchmarks"]) == {"bench0/test", "bench1/test"}
    assert after["benchmarks"]["bench0/test"]["count"] == 20


def test_time_to_quality_is_censored_where_the_quality_was_not_reached(experiment: Experiment) -> None:
    # Quality 0.5 is 10 of 20. Evaluations are after steps 2, 4 and 6.
    right = {f"{NOISY}1": (4, 4, 11, 11, 11, 11, 11), f"{NOISY}2": (4, 4, 4, 4, 4, 4, 10), f"{PLAIN}1": (4,) * 7}
    results = run(single_rate(experiment), FakeLaunch(right=right | {f"{PLAIN}2": (4, 4, 4, 4, 12, 4, 4)}))
    tokens = results["time_to_quality"]["tokens"]
    assert tokens["horizon"] == 600.0
    noisy, plain = tokens["arms"]["noisy"], tokens["arms"]["plain"]
    assert noisy["observations"] == [{"time": 200.0, "reached": True}, {"time": 600.0, "reached": True}]
    assert plain["observations"] == [{"time": 600.0, "reached": False}, {"time": 400.0, "reached": True}]
    assert noisy["restricted_mean"]["mean"] == pytest.approx(400.0)
    assert plain["restricted_mean"]["mean"] == pytest.approx(500.0)
    assert (plain["restricted_mean"]["reached"], plain["restricted_mean"]["censored"]) == (1, 1)
    assert results["time_to_quality"]["wall_s"]["arms"]["noisy"]["observations"][0]["time"] == pytest.approx(12.0)
    hours = results["time_to_quality"]["device_hours"]["arms"]["noisy"]["observations"][0]["time"]
    assert hours == pytest.approx(12.0 * 2 / 3600)


def test_a_success_after_the_reading_does_not_count(experiment: Experiment) -> None:
    right = {f"{NOISY}{seed}": (4, 4, 4, 4, 4, 4, 20) for seed in (1, 2)}
    results = run(single_rate(experiment, completion_tokens=450), FakeLaunch(right=right))
    for observation in results["time_to_quality"]["tokens"]["arms"]["noisy"]["observations"]:
        assert observation == {"time": 400.0, "reached": False}


def test_runs_that_are_no_pairs_are_refused(experiment: Experiment) -> None:
    with pytest.raises(FaultError, match=r"seed 2: had different prompts"):
        run(single_rate(experiment), FakeLaunch(data_hash={f"{PLAIN}2": "other"}))


def test_a_run_of_another_config_is_refused_with_what_differs(experiment: Experiment) -> None:
    run(single_rate(experiment), FakeLaunch())
    stored = experiment.runs_dir / f"{NOISY}1/config.yaml"
    stored.write_text(stored.read_text().replace("weight_decay: 0.0", "weight_decay: 0.5"))
    with pytest.raises(UserError, match=r"another config \(optimizer\.weight_decay: 0\.5 -> 0\.0\)"):
        run(single_rate(experiment), FakeLaunch())


def test_a_launch_of_several_ranks_is_refused(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"experiment\.launcher"):
        Runner(experiment, lambda _: None)


def test_one_seed_has_no_interval_over_seeds() -> None:
    assert over_seeds([0.5]) == {"mean": 0.5, "low": None, "high": None, "seeds": 1}
    # n = 3: mean 2, standard deviation 1, t = 4.302653.
    assert over_seeds([1.0, 2.0, 3.0])["low"] == pytest.approx(2 - 4.302653 / 3**0.5, abs=1e-5)


class Tags(HTMLParser):
    """Collects tags that load something, and checks that all are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "line"}:
            self.open.append(tag)
        self.loads += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass


def test_the_files_hold_what_was_asked_for(experiment: Experiment) -> None:
    results = run(experiment, FakeLaunch())
    write_results(experiment.folder, results)
    summary = json.loads((experiment.folder / "summary.json").read_text())
    assert set(summary) == {"noisy", "plain"}
    assert set(summary["noisy"]) == {"1", "2"}
    wanted = {"accuracy_before", "accuracy_after", "mixed_group_fraction", "tokens", "wall_s"}
    assert all(set(values) == wanted for seeds in summary.values() for values in seeds.values())
    assert {"mean", "low", "high"} <= set(summary["plain"]["2"]["accuracy_after"])
    assert json.loads((experiment.folder / "results.json").read_text()) == json.loads(json.dumps(results))
    assert results["matched_temperatures"]["plain"]["temperature"] == MATCH.temperature
    assert results["arms"]["plain"]["temperature"] == 1.25
    assert results["differing_settings"]["rollout.temperature"] == {"noisy": 1.0, "plain": 1.25}
    assert "optimizer.adam_beta1" not in results["differing_settings"]
    text = page(results)
    tags = Tags()
    tags.feed(text)
    assert (tags.open, tags.loads) == ([], [])
    assert "url(" not in text
    assert text.count("<svg") == 3
    for word in ("no published figure matches", "fewer than three seeds", "Matched entropy", "censored"):
        assert word in text
        assert word in markdown(results)


def test_every_row_of_the_markdown_has_its_tables_width(experiment: Experiment) -> None:
    for block in re.split(r"\n\n", markdown(run(experiment, FakeLaunch()))):
        widths = {line.replace("\\|", "").count("|") for line in block.splitlines() if line.startswith("|")}
        assert len(widths) <= 1, block
