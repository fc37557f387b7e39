"""``megatron-qerl diagnose`` on a trained tiny run: what follows from no noise, from much, and from its own numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_qerl.cli.main import main
from megatron_qerl.config.schema import AlgorithmSection
from megatron_qerl.diagnosis import algorithm_of_mode
from megatron_qerl.report.html import _number
from tests.support.tiny_run import write_run

PLAN = ["--problems", "8", "--states", "3", "--responses", "16"]
PAIRS = ["replay/clean", "replay/uncorrected", "clean/uncorrected"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = write_run(tmp_path_factory.mktemp("diagnose"))
    assert main(["train", str(config), "train.steps=3"]) == 0
    return config.parent / "runs" / "tiny"


def diagnose(run: Path, *arguments: str) -> dict[str, Any]:
    assert main(["diagnose", "--run", str(run), *PLAN, *arguments]) == 0
    document: dict[str, Any] = json.loads((run / "diagnosis_step_000003.json").read_text())
    return document


def test_the_terms_add_up_and_the_runs_records_stay(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and not p.name.startswith("diagnosis")}
    found = diagnose(run)
    assert all(path.read_bytes() == content for path, content in before.items())
    printed = json.loads(capsys.readouterr().out)
    assert printed["entropy"] == found["entropy"]
    assert found["sigma"] == 0.01  # of the last stage
    assert len({s["step"] for s in found["states"]}) == 3
    assert min(s["step"] for s in found["states"]) == 3  # the run's own noise had steps 0 to 2
    assert len(found["entropy"]["problems"]) == 8
    for terms in found["entropy"]["problems"]:
        total, conditional, information = (terms[n]["value"] for n in ("total", "conditional", "information"))
        assert total == pytest.approx(conditional + information, abs=1e-9)
        assert information <= math.log(3) + 1e-9
        assert (terms["states"], terms["responses"]) == (3, 48)
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "What the noise did: step_000003, sigma 0.01, 3 noise states" in page
    assert found["definitions"]["information_upper"] in page
    assert f"{_number(found['entropy']['mean']['information']['value'])} (" in page
    used = {name for part in (found["modes"], found["entropy"]["problems"][0]) for name in part}
    assert set(found["definitions"]) <= used | {"modes", "mean", "interval"}


def test_without_much_noise_the_modes_agree_and_there_is_no_information(run: Path) -> None:
    found = diagnose(run, "--sigma", "1e-5", "--problems", "25")  # a tiny model is seldom right
    modes = found["modes"]
    assert modes["groups"] == 25
    assert modes["mixed_groups"] > 0
    for pair in PAIRS:
        assert modes["gradient_cosines"][pair] == pytest.approx(1.0, abs=1e-3)
        assert modes["coefficient_cosines"][pair] == pytest.approx(1.0, abs=1e-3)
    norms = modes["gradient_norms"]
    assert norms["clean"] == pytest.approx(norms["uncorrected"], rel=1e-2)
    assert all(f == pytest.approx(1.0, abs=1e-3) for f in modes["effective_token_fraction"].values())
    assert abs(found["entropy"]["mean"]["information"]["value"]) < 1e-3


def test_under_much_noise_they_differ_and_responses_tell_of_their_state(run: Path) -> None:
    # A guess is right once in about a hundred times: enough of them that some group is mixed.
    found = diagnose(run, "--sigma", "1.0", "--problems", "25", "--responses", "32")
    modes = found["modes"]
    assert modes["mixed_groups"] > 0
    assert modes["gradient_cosines"]["clean/uncorrected"] < 0.999
    assert modes["gradient_cosines"]["replay/clean"] < 0.9
    fractions = modes["effective_token_fraction"]
    assert fractions["uncorrected"] == pytest.approx(1.0)
    assert fractions["clean"] < 0.95
    assert fractions["replay"] == pytest.approx(1.0, abs=1e-3)  # the trainer replays what the engine did
    assert found["entropy"]["mean"]["information"]["value"] > 0.1


def test_a_plan_that_cannot_be_carried_out_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--run", str(run), "--states", "2"]) == 2
    assert "--states = 2: an interval over noise states needs three" in capsys.readouterr().err
    assert main(["diagnose", "--run", str(run), "--sigma", "0"]) == 2
    assert "without noise there is nothing to tell apart" in capsys.readouterr().err


def test_the_objective_under_another_mode_is_one_that_a_config_may_have() -> None:
    sequence = {"ratio_level": "sequence", "ratio_clip_low": 3e-4, "ratio_clip_high": 4e-4}
    gspo = AlgorithmSection(name="gspo", likelihood="replay", loss_aggregation="sequence_mean", **sequence)  # type: ignore[arg-type]
    assert algorithm_of_mode(gspo, "clean").importance_correction == "sequence_truncate"
    masked = AlgorithmSection(
        name="grpo", likelihood="clean", importance_correction="token_mask", kl_coefficient=0.1, advantage_epsilon=0.5
    )
    assert algorithm_of_mode(masked, "clean").importance_correction == "token_mask"
    replay = algorithm_of_mode(masked, "replay")
    assert (replay.likelihood, replay.importance_correction, replay.kl_coefficient) == ("replay", "token_truncate", 0.0)
    assert replay.advantage_epsilon == 0.5
