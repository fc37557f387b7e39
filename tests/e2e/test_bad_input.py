"""Every wrong input is one line with key, value, rule and remedy, the right exit code, and nothing half-written."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_qerl.cli.main import main
from tests.support.tiny_model import write_model
from tests.support.tiny_run import write_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("bad"))


def missing_model(folder: Path) -> list[str]:
    return [f"model.path={folder}/nowhere"]


def half_written(folder: Path) -> list[str]:
    shutil.copytree(folder / "model", folder / "half", dirs_exist_ok=True)
    data = (folder / "model/model.safetensors").read_bytes()
    (folder / "half/model.safetensors").write_bytes(data[: len(data) // 2])
    return [f"model.path={folder}/half"]


def unknown_family(folder: Path) -> list[str]:
    return [f"model.path={edited(folder, 'mamba', model_type='mamba')}"]


def wrong_tokenizer(folder: Path) -> list[str]:
    path = edited(folder, "vocabulary")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"word{i}": i for i in range(len(tokenizer["model"]["vocab"]), 200)}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return [f"model.path={path}"]


def wrong_shape(folder: Path) -> list[str]:
    return [f"model.path={edited(folder, 'shape', intermediate_size=112)}"]


def edited(folder: Path, name: str, **changes: object) -> Path:
    path = folder / name
    shutil.copytree(folder / "model", path, dirs_exist_ok=True)
    data = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(data))
    return path


def empty_dataset(folder: Path) -> list[str]:
    (folder / "empty.jsonl").write_text("")
    return [f"data.train.path={folder}/empty.jsonl"]


def no_answer(folder: Path) -> list[str]:
    (folder / "none.jsonl").write_text('{"question": "1+1", "answer": "2"}\n{"question": "1+2"}\n')
    return [f"data.train.path={folder}/none.jsonl"]


def literal(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda _: list(arguments)


CASES: dict[str, tuple[Callable[[Path], list[str]], tuple[str, ...]]] = {
    "missing model": (missing_model, ("nowhere",)),
    "half-written safetensors": (half_written, ("half/model.safetensors",)),
    "unknown family": (unknown_family, ("mamba", "llama", "qwen2")),
    "wrong tokenizer": (wrong_tokenizer, ("tokenizer",)),
    "config and weights disagree": (wrong_shape, ("mlp.", "112")),
    "unknown key": (literal("rollout.temprature=1"), ("rollout.temprature", "rollout.temperature")),
    "negative sigma": (literal("noise.sigma_start=-0.01"), ("noise.sigma_start", "-0.01")),
    "top-p with clean": (literal("algorithm.likelihood=clean", "rollout.top_p=0.9"), ("top_p", "0.9", "clean")),
    "no likelihood": (literal("algorithm.likelihood=null"), ("algorithm.likelihood", "replay")),
    "empty dataset": (empty_dataset, ("empty.jsonl",)),
    "problem without an answer": (no_answer, ("none.jsonl:2", "answer")),
    "overlapping evaluation": (lambda f: [f"data.eval.path={f}/train.jsonl"], ("data.eval",)),
    "role the model lacks": (literal("noise.roles=[q_norm]"), ("noise.roles", "q_norm")),
    "more layers in the files than in the config": (
        lambda f: [f"model.path={edited(f, 'shallow', num_hidden_layers=1)}"],
        ("model.layers.1.", "unused"),
    ),
    "longer than the model": (literal("model.max_sequence_length=4096"), ("max_position_embeddings", "256")),
    "budget below one response": (literal("train.microbatch_tokens=8"), ("train.microbatch_tokens", "18")),
    "noise that never acts": (literal("noise.stages=1"), ("noise", "never add noise")),
    "sequence parallel alone": (
        literal("parallel.sequence_parallel=true"),
        ("sequence_parallel", "tensor_model_parallel_size"),
    ),
    "run name that leaves the folder": (literal("run.name=../x"), ("run.name", "../x")),
    "engine not built": (literal("rollout.engine=vllm"), ("rollout.engine", "vllm")),
    "prompt too long": (literal("rollout.max_prompt_tokens=2"), ("max_prompt_tokens",)),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_clear_line(name: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, fragments = CASES[name]
    run = "run.name=" + name.replace(" ", "_")
    capsys.readouterr()
    code = main(["train", str(config), run, *make(config.parent)])
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("megatron-qerl: error:")]
    assert code == 2
    assert len(lines) == 1, lines
    assert all(f in lines[0] for f in fragments), lines[0]
    written = config.parent / "runs" / name.replace(" ", "_")
    assert not list(written.glob("checkpoints/*"))
    assert not (written / "summary.json").exists()


def test_k_not_a_multiple_of_sixteen_is_refused_by_quantize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_model(tmp_path / "odd", intermediate_size=100)
    code = main(["quantize", "--model", str(source), "--output", str(tmp_path / "out")])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2
    assert "down_proj" in error
    assert "100" in error
    assert "16" in error
    assert not (tmp_path / "out").exists()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 800 kB."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(mount)], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small file system here: {made.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_on_save_keeps_the_earlier_checkpoint(
    config: Path, full_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(config), f"run.output_dir={full_disk}", "checkpoint.interval_steps=1", "lora.rank=16"]
    # Room for one checkpoint (four files of about 120 kB), not for two.
    code = main([*arguments, "checkpoint.keep=5"])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 1
    assert "the disk is full" in error
    assert "--resume" in error
    kept = sorted(p.name for p in (full_disk / "tiny/checkpoints").iterdir())
    assert kept == ["step_000001"]
