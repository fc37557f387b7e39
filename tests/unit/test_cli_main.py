from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_qerl.cli import main as cli
from megatron_qerl.cli.main import COMMANDS, main
from megatron_qerl.config.loader import load_config, resolved_yaml
from megatron_qerl.errors import FaultError

CONFIG = """\
run: {{name: test, output_dir: {folder}}}
model: {{path: some/model}}
data: {{train: {{kind: arithmetic}}, eval: {{kind: arithmetic, split: heldout}}}}
algorithm: {{name: grpo, likelihood: replay}}
train: {{steps: 20}}
eval: {{modes: [sampled], problems: 7}}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(folder=tmp_path / "runs"))
    return path


@pytest.fixture
def run_dir(config_file: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "runs/test"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(resolved_yaml(load_config(config_file)))
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Puts recorders in the place of what the commands call; returns what was called with which arguments."""
    seen: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def recorder(name: str, result: object) -> Callable[..., object]:
        def call(*args: Any, **kwargs: Any) -> object:
            seen[name] = (args, kwargs)
            return result

        return call

    report = types.SimpleNamespace(ok=False, render=lambda: "3 of 4 tensors differ")
    for module, name, result in (
        ("megatron_qerl.controller", "train", Path("runs/written")),
        ("megatron_qerl.evaluation", "evaluate_run", {"greedy": 0.5}),
        ("megatron_qerl.export", "export_adapter", Path("adapter")),
        ("megatron_qerl.nvfp4.quantize", "quantize", Path("quantised")),
        ("megatron_qerl.nvfp4.verify", "verify", report),
        ("megatron_qerl.report.html", "write_report", Path("report.html")),
    ):
        fake = types.ModuleType(module)
        setattr(fake, name, recorder(name, result))
        monkeypatch.setitem(sys.modules, module, fake)
    return seen


def run_expecting_exit(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_has_an_example_and_loads_nothing_heavy(command: str | None) -> None:
    argv = ["--help"] if command is None else [command, "--help"]
    code = (
        "import sys\nfrom megatron_qerl.cli.main import main\n"
        f"try: main({argv!r})\nexcept SystemExit as stop: assert stop.code == 0\n"
        "print([m for m in ('torch', 'transformers', 'megatron', 'pydantic', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text, _, loaded = done.stdout.rstrip().rpartition("\n")
    assert loaded == "[]"
    assert f"megatron-qerl {command or 'train'} " in text
    assert "example" in text


def test_no_command_and_a_wrong_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "commands" in capsys.readouterr().out
    assert run_expecting_exit(["trian"]) == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_expecting_exit(["--version"]) == 0
    assert capsys.readouterr().out.startswith("megatron-qerl 0.")


@pytest.mark.parametrize(
    "argv", [["train"], ["train", "x.yaml", "--resum"], ["eval"], ["eval", "--run", "x", "--problems", "0"], ["export"]]
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_expecting_exit(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-qerl: error: ")
    assert error.count("\n") == 1


def test_a_user_error_is_one_line_and_its_exit_code(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config_file), "optimizer.lr=1"]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "megatron-qerl: error: optimizer.lr = 1 (on the command line): unknown key. "
        "Did you mean optimizer.learning_rate.\n"
    )
    assert captured.out == ""


def raising(error: BaseException) -> Callable[..., None]:
    def run(*_: object, **__: object) -> None:
        raise error

    return run


def test_what_goes_wrong_underneath_has_its_own_exit_codes(
    config_file: Path,
    calls: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    controller = sys.modules["megatron_qerl.controller"]
    argv = ["train", str(config_file)]
    monkeypatch.setattr(controller, "train", raising(FaultError("saving", "the disk\nis full", "Free some space")))
    assert main(argv) == 1
    assert capsys.readouterr().err == "megatron-qerl: error: saving: the disk is full. Free some space.\n"
    monkeypatch.setattr(controller, "train", raising(KeyboardInterrupt()))
    assert main(argv) == 130
    assert capsys.readouterr().err == "megatron-qerl: error: interrupted\n"
    monkeypatch.setattr(controller, "train", raising(ZeroDivisionError("by zero")))
    assert main(argv) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert "ZeroDivisionError: by zero" in lines
    assert "this is a bug in megatron-qerl" in lines[-1]


def test_a_closed_pipe_is_no_bug(config_file: Path) -> None:
    command = f"{sys.executable} -m megatron_qerl.cli.main train {config_file} --dry-run | head -n 1; exit $PIPESTATUS"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "run:\n"
    assert done.stderr == ""


def test_overrides_are_taken_wherever_they_stand(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("lora: {rank: 4}\ntrain: {steps: 99}\n")
    argv = ["train", "--set", "optimizer.learning_rate=3e-4", str(config_file), "train.steps=30", "--dry-run"]
    assert main([*argv, "--overlay", str(overlay), "rollout.group_size=4", "rollout.group_size=6"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["train"]["steps"] == 30
    assert resolved["optimizer"]["learning_rate"] == 3e-4
    assert resolved["lora"]["rank"] == 4
    assert resolved["rollout"]["group_size"] == 6


def test_a_stray_word_is_refused(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_expecting_exit(["train", str(config_file), "--dry-run", "steps"]) == 2
    assert "unrecognized arguments: steps" in capsys.readouterr().err


def test_a_dry_run_prints_a_config_that_reads_back_and_the_plan(
    config_file: Path, tmp_path: Path, calls: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config_file), "--dry-run", "train.steps=20", "noise.stages=4"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(printed)
    expected = load_config(config_file, overrides=["train.steps=20", "noise.stages=4"])
    assert load_config(tmp_path / "printed.yaml") == expected
    assert "# steps: 20, each 8 prompts x 8 responses = 64" in printed
    assert "# sigma from step: 0: 0, 5: 0.01, 10: 0.0022, 15: 0.0005" in printed
    assert "some/model (NOT FOUND here)" in printed
    assert calls == {}
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_a_wrong_config_fails(config_file: Path) -> None:
    assert main(["train", str(config_file), "--dry-run", "train.steps=0"]) == 2


def test_train_hands_on_config_and_resume(
    config_file: Path, calls: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config_file), "--resume", "--stop-file", "stop"]) == 0
    assert calls["train"] == ((load_config(config_file),), {"resume": True, "stop_file": Path("stop")})
    assert main(["train", str(config_file)]) == 0
    assert calls["train"][1] == {"resume": False, "stop_file": None}
    assert "run folder: runs/written" in capsys.readouterr().out


def test_resume_and_overwrite_exclude_each_other(config_file: Path) -> None:
    assert run_expecting_exit(["train", str(config_file), "--resume", "--overwrite"]) == 2


def test_eval_takes_what_is_not_said_from_the_run(
    run_dir: Path, calls: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--run", str(run_dir)]) == 0
    wanted = {"checkpoint": "latest", "modes": ("sampled",), "noisy": False, "problems": 7}
    assert calls["evaluate_run"] == ((run_dir,), wanted)
    assert yaml.safe_load(capsys.readouterr().out) == {"greedy": 0.5}
    said = ["--checkpoint", "20", "--mode", "greedy", "--mode", "sampled", "--noisy", "--problems", "3"]
    assert main(["eval", "--run", str(run_dir), *said]) == 0
    wanted = {"checkpoint": "20", "modes": ("greedy", "sampled"), "noisy": True, "problems": 3}
    assert calls["evaluate_run"] == ((run_dir,), wanted)


def test_export_and_report_hand_on_their_folders(run_dir: Path, tmp_path: Path, calls: dict[str, Any]) -> None:
    assert main(["export", "--run", str(run_dir), "--output", str(tmp_path / "out"), "--checkpoint", "5"]) == 0
    assert calls["export_adapter"] == ((run_dir, tmp_path / "out", "5"), {})
    assert main(["report", str(run_dir)]) == 0
    assert calls["write_report"] == ((run_dir,), {})


def test_export_refuses_a_folder_with_content(run_dir: Path, calls: dict[str, Any]) -> None:
    assert main(["export", "--run", str(run_dir), "--output", str(run_dir)]) == 2
    assert calls == {}


@pytest.mark.parametrize("argv", [["eval", "--run"], ["report"], ["export", "--output", "x", "--run"]])
def test_commands_on_a_run_refuse_another_folder_and_can_be_rehearsed(
    argv: list[str], run_dir: Path, tmp_path: Path, calls: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, str(tmp_path)]) == 2
    assert "has no config.yaml" in capsys.readouterr().err
    assert main([*argv, str(run_dir), "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["run"]["name"] == "test"
    assert calls == {}


def test_quantize_takes_options_a_file_or_options_over_a_file(tmp_path: Path, calls: dict[str, Any]) -> None:
    assert main(["quantize", "--model", "a", "--output", "b", "--calibration", "awq", "--sequences", "5"]) == 0
    config = calls["quantize"][0][0]
    assert (str(config.source), str(config.output)) == ("a", "b")
    assert (config.calibration.method, config.calibration.sequences) == ("awq", 5)
    path = tmp_path / "q.yaml"
    path.write_text("source: c\noutput: d\ncalibration: {seed: 9}\n")
    assert main(["quantize", str(path), "calibration.seed=8", "--output", "e"]) == 0
    config = calls["quantize"][0][0]
    assert (str(config.source), str(config.output), config.calibration.seed) == ("c", "e", 8)
    assert main(["quantize", "--model", "a", "--output", "b", "calibration.seed=7"]) == 0
    assert calls["quantize"][0][0].calibration.seed == 7


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["quantize"], "--model"),
        (["quantize", "--model", "a"], "--output"),
        (["quantize", "--model", "a", "--output", "b", "--sequences", "0"], "calibration.sequences"),
        (["quantize", "--model", "a", "--output", "b", "--source", "c"], "--source"),
        (["quantize", "--verify-only", "a", "--model", "b"], "--model"),
        (["quantize", "--verify-only", "a", "--verify"], "--verify"),
        (["quantize", "--verify-only", "a", "x.yaml"], "x.yaml"),
    ],
)
def test_quantize_refuses_what_makes_no_sense(
    argv: list[str], word: str, calls: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert word in capsys.readouterr().err
    assert calls == {}


def test_a_failed_verification_is_shown_and_fails(calls: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "--model", "a", "--output", "b", "--verify"]) == 1
    assert calls["verify"][0][:2] == (Path("quantised"), Path("a"))
    assert "3 of 4 tensors differ" in capsys.readouterr().out
    assert main(["quantize", "--verify-only", "x", "--source", "y"]) == 1
    assert calls["verify"][0][:2] == (Path("x"), Path("y"))


def test_verification_multiplies_as_the_trainer_does(calls: dict[str, Any]) -> None:
    import torch

    from megatron_qerl.nvfp4.format import quantize_blocks

    main(["quantize", "--verify-only", "x"])
    matmul = calls["verify"][0][2]
    generator = torch.Generator().manual_seed(3)
    weight = quantize_blocks(torch.randn(8, 32, generator=generator), 2.0**-8)
    x = torch.randn(5, 32, generator=generator)
    reference = x.double() @ weight.decode(torch.float64).T
    torch.testing.assert_close(matmul(x, weight).double(), reference, rtol=1e-5, atol=1e-5)


def test_every_command_has_its_two_functions() -> None:
    for name in COMMANDS:
        _, module = cli.build_parser(name)
        assert module is not None
        assert callable(module.add_arguments)
        assert callable(module.run)
