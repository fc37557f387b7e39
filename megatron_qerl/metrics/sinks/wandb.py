"""Weights & Biases, the only file that imports ``wandb``.

Offline (the default) nothing may wait for a network: the package's error reporter, which would resolve a host name, is
turned off, console capture and machine statistics are off, and every file goes under the run folder. ``wandb sync`` on
the folder uploads it later. The run id is drawn once and kept in the run folder, so that a resumed run continues the
same curve and two runs of one name never merge.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from megatron_qerl.config.schema import WandbSection
from megatron_qerl.errors import BackendUnavailableError
from megatron_qerl.metrics.names import METRICS
from megatron_qerl.types import StepMetrics

_STEP = "step"


class WandbSink:
    """Sends each step's values (``info`` stays in metrics.jsonl).

    Args:
        config: project, entity and mode.
        run_dir: existing run folder; files go to ``run_dir/wandb``.
        run_name: name shown.
        run_config: the resolved configuration, shown beside the curves.

    Raises:
        BackendUnavailableError: ``wandb`` is missing, or mode online has no login or no network.
    """

    def __init__(
        self, config: WandbSection, run_dir: Path, run_name: str, run_config: dict[str, Any] | None = None
    ) -> None:
        folder = run_dir / "wandb"
        folder.mkdir(exist_ok=True)
        # Read by wandb's service process when it starts; a user's own setting is left alone.
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))
        if config.mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb = _import_wandb()
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
        )
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=run_name,
                id=_run_id(folder),
                resume="allow",
                dir=str(run_dir),
                mode=config.mode,
                config=run_config,
                settings=settings,
            )
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            raise BackendUnavailableError(
                "metrics.wandb.mode",
                config.mode,
                f"wandb could not start the run ({error})",
                "Log in with `wandb login`, or set metrics.wandb.mode: offline and upload later with `wandb sync`",
            ) from error
        self._run.define_metric(_STEP, hidden=True)
        for name in METRICS:
            self._run.define_metric(name, step_metric=_STEP, summary="last")

    def log(self, metrics: StepMetrics) -> None:
        self._run.log({_STEP: metrics.step, **metrics.values})

    def close(self) -> None:
        self._run.finish()


def _import_wandb() -> Any:
    missing = BackendUnavailableError(
        "metrics.sinks",
        "wandb",
        "the package wandb is not installed",
        "Install it with: pip install 'megatron-qerl[wandb]', or remove wandb from metrics.sinks; "
        "metrics.jsonl is written in any case",
    )
    try:
        import wandb
    except ImportError as error:
        raise missing from error
    if not hasattr(wandb, "init"):  # a folder "wandb" that an earlier run left in the working directory
        raise missing
    return wandb


def _run_id(folder: Path) -> str:
    """The id of this run folder, drawn on first use. Not seeded: it must differ between equal runs."""
    path = folder / "run_id"
    if not path.exists():
        path.write_text(secrets.token_hex(8), encoding="ascii")
    return path.read_text(encoding="ascii").strip()
