"""launch/env.sh, with a stand-in for uv that writes down what it is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = """\
#!/bin/sh
[ "$1" = --version ] && exit 0
echo "$@" >>"$UV_LOG"
echo "default=$UV_DEFAULT_INDEX extra=$UV_EXTRA_INDEX_URL" >>"$UV_LOG"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch/env.sh", tmp_path / "launch/env.sh")
    (tmp_path / ".python-version").write_text(f"{sys.version_info.major}.{sys.version_info.minor}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(UV)
    (tmp_path / "bin/uv").chmod(0o755)
    return tmp_path


def call(checkout: Path, *argv: str, **extra: str) -> tuple[subprocess.CompletedProcess[str], str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_", "PYTHON"))}
    env = {**kept, "PATH": f"{checkout}/bin:/usr/bin:/bin", "UV_LOG": f"{checkout}/log", "HOME": str(checkout), **extra}
    env.pop("PYENV_ROOT", None)
    command = ["bash", str(checkout / "launch/env.sh"), *argv]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    log = checkout / "log"
    return done, log.read_text() if log.exists() else ""


def test_setup_makes_the_environment_on_the_wanted_python_with_pinned_versions(checkout: Path) -> None:
    done, log = call(checkout, "setup", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert f"venv --quiet --clear --python {sys.executable} {checkout}/.venv" in log
    assert "--constraints constraints.txt" in log
    assert "--editable .[demo,dev,wandb]" in log


def test_an_environment_of_the_wanted_python_is_kept(checkout: Path) -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").symlink_to(sys.executable)
    done, log = call(checkout, "setup")
    assert done.returncode == 0, done.stderr
    assert "venv --quiet" not in log
    assert "--editable" in log


def test_a_python_of_another_version_is_refused(checkout: Path) -> None:
    (checkout / ".python-version").write_text("3.99\n")
    done, log = call(checkout, "setup", PYTHON=sys.executable)
    assert done.returncode == 2
    assert f"PYTHON={sys.executable} is not a Python 3.99" in done.stderr
    done, log = call(checkout, "setup")
    assert done.returncode == 2
    assert "no Python 3.99 on PATH or under pyenv. Install one" in done.stderr
    assert log == ""


def test_pips_index_is_handed_on_unless_uv_has_its_own(checkout: Path) -> None:
    _, log = call(checkout, "uv", "pip", "list", PIP_INDEX_URL="https://mirror.example/simple")
    assert log.splitlines() == ["pip list", "default=https://mirror.example/simple extra="]
    (checkout / "log").unlink()
    own = {"PIP_INDEX_URL": "https://mirror.example/simple", "UV_DEFAULT_INDEX": "https://own.example/simple"}
    _, log = call(checkout, "uv", "pip", "list", **own)
    assert log.splitlines()[1] == "default=https://own.example/simple extra="


def test_a_failing_uv_fails_the_setup(checkout: Path) -> None:
    (checkout / "bin/uv").write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexit 7\n')
    done, _ = call(checkout, "setup", PYTHON=sys.executable)
    assert done.returncode == 7


def test_an_unknown_word_prints_the_usage(checkout: Path) -> None:
    done, log = call(checkout, "setpu")
    assert done.returncode == 2
    assert "bash launch/env.sh setup" in done.stderr
    assert log == ""


def test_every_dependency_is_pinned_to_one_version() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    names = [line.split("==")[0].lower() for line in lines]
    assert all(line.count("==") == 1 and "/" not in line and "@" not in line for line in lines)
    assert len(set(names)) == len(names)
    for name in (
        "torch",
        "transformers",
        "megatron-core",
        "nvidia-modelopt",
        "gguf",
        "wandb",
        "ruff",
        "mypy",
        "pytest",
    ):
        assert name in names
