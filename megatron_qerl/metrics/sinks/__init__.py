"""Where metrics go: metrics.jsonl always, the terminal and further services by configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_qerl.config.schema import MetricsSection
from megatron_qerl.metrics.sinks.base import MetricsSink, SinkGroup
from megatron_qerl.metrics.sinks.console import ConsoleSink
from megatron_qerl.metrics.sinks.jsonl import FILE_NAME, JsonlSink

__all__ = ["ConsoleSink", "JsonlSink", "MetricsSink", "SinkGroup", "build_sinks"]


def build_sinks(
    config: MetricsSection,
    run_dir: Path,
    total_steps: int,
    *,
    run_name: str,
    run_config: dict[str, Any] | None = None,
    completed_steps: int = 0,
    resume_position_lines: int | None = None,
) -> SinkGroup:
    """The sinks that the config names. Call on one rank only.

    Args:
        config: section ``metrics``.
        run_dir: existing run folder.
        total_steps: planned steps.
        run_name: name shown by services.
        run_config: resolved configuration, shown by services.
        completed_steps: steps finished before this process.
        resume_position_lines: ``JsonlSink.checkpoint_position()`` as the checkpoint stored it; None for a new run.

    Raises:
        UserError: a new run meets the record of an older one, or the folder cannot be written.
        CheckpointError: the record is shorter than the checkpoint says.
        BackendUnavailableError: a sink's package is missing or its service refuses.
    """
    record = JsonlSink(run_dir / FILE_NAME)
    if resume_position_lines is None:
        record.start()
    else:
        record.resume(resume_position_lines)
    others: list[MetricsSink] = []
    if "wandb" in config.sinks:
        from megatron_qerl.metrics.sinks.wandb import WandbSink

        others.append(WandbSink(config.wandb, run_dir, run_name, run_config))
    if config.console:
        others.append(ConsoleSink(total_steps, completed_steps))
    return SinkGroup(record, others)
