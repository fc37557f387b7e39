"""What the sub-commands share: how the parser speaks, and who owns a run folder."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import uuid
import warnings
from pathlib import Path
from typing import NoReturn

from megatron_qerl.errors import FaultError, UserError

PROGRAM = "megatron-qerl"


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps line breaks of examples, and names defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS) or isinstance(action.default, list):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, like every other error. Options cannot be abbreviated."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        say_error(f"{message}. See {self.prog} --help.")
        sys.exit(UserError.exit_code)


def say_error(message: str) -> None:
    """One line on stderr; line breaks inside the message become spaces, and one of several ranks says which it is."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    who = f"{PROGRAM} (rank {os.environ.get('RANK', '0')})" if several else PROGRAM
    print(f"{who}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def quiet_megatron() -> None:
    """Hide megatron-core's import-time remarks on optional packages, unless Python was told how to treat warnings."""
    if not sys.warnoptions:
        for category in (UserWarning, SyntaxWarning):
            warnings.filterwarnings("ignore", category=category, module=r"megatron\.|.*/megatron/core/")


def is_first_process() -> bool:
    """Whether this process may print and touch folders: rank 0 of a torchrun launch, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def claim_run_folder(run_dir: Path, *, marker: str, resume: bool, overwrite: bool) -> None:
    """See to it that a run never mixes with an older one.

    A folder with content is refused, unless it is to be resumed or overwritten. Overwriting deletes it, and only when
    it holds ``marker``, the file that every run writes first: a wrong ``output_dir`` must not cost anyone their files.

    Args:
        run_dir: the run's folder; need not exist.
        marker: name of a file that shows the folder to be a run's.
        resume: go on in the folder.
        overwrite: delete what is there.

    Raises:
        UserError: the folder has content and neither was asked for, or it is not a run's folder.
    """
    if resume or not run_dir.exists():
        return
    if not run_dir.is_dir():
        raise UserError("run folder", run_dir, "is not a folder", "Choose another run.name or run.output_dir")
    if not any(run_dir.iterdir()):
        return
    if not overwrite:
        rule = "holds an earlier run"
        remedy = "Use --resume to go on with it, --overwrite to delete it, or another run.name"
        raise UserError("run folder", run_dir, rule, remedy)
    if not (run_dir / marker).is_file():
        rule = f"has no {marker}, so it was not written by a run and --overwrite leaves it alone"
        raise UserError("run folder", run_dir, rule, "Choose another run.name, or remove the folder yourself")
    # Renamed first: an interrupted deletion must not leave half a run under the run's name.
    doomed = run_dir.with_name(f".{run_dir.name}.deleting-{uuid.uuid4().hex[:8]}")
    try:
        run_dir.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        what = f"deleting the old run folder {run_dir}"
        raise FaultError(what, f"{error.strerror}: {error.filename}", "Remove it yourself, then start again") from error
