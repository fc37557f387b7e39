from __future__ import annotations

from pathlib import Path

import pytest

from megatron_qerl.cli.common import claim_run_folder, is_first_process
from megatron_qerl.errors import UserError


def claim(folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    claim_run_folder(folder, marker="config.yaml", resume=resume, overwrite=overwrite)


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs/old"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {}\n")
    (folder / "checkpoints/adapter").write_text("weights")
    return folder


def test_an_absent_or_empty_folder_is_free(tmp_path: Path) -> None:
    claim(tmp_path / "new")
    claim(tmp_path)
    claim(tmp_path, overwrite=True)


def test_an_earlier_run_is_refused_and_kept(old_run: Path) -> None:
    with pytest.raises(UserError, match="--resume to go on with it, --overwrite"):
        claim(old_run)
    assert (old_run / "checkpoints/adapter").read_text() == "weights"


def test_resuming_keeps_everything(old_run: Path) -> None:
    claim(old_run, resume=True)
    assert (old_run / "checkpoints/adapter").read_text() == "weights"


def test_overwriting_deletes_the_run_and_nothing_beside_it(old_run: Path) -> None:
    (old_run.parent / "other").mkdir()
    claim(old_run, overwrite=True)
    assert [path.name for path in old_run.parent.iterdir()] == ["other"]


def test_overwriting_spares_a_folder_that_no_run_wrote(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        claim(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        claim(tmp_path / "run", overwrite=True)


def test_only_rank_0_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_first_process()
    monkeypatch.setenv("RANK", "0")
    assert is_first_process()
    monkeypatch.setenv("RANK", "3")
    assert not is_first_process()
