"""What every destination of metrics does.

A sink gets one ``StepMetrics`` for each finished step and owns the file, screen or service behind it. The controller
holds one ``SinkGroup``: it checks the names once, then feeds metrics.jsonl first, so that a failing optional sink never
costs the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

from megatron_qerl.metrics.names import check_names
from megatron_qerl.metrics.sinks.jsonl import JsonlSink
from megatron_qerl.types import StepMetrics


class MetricsSink(Protocol):
    """A destination of metrics. ``log`` is called once a finished step, ``close`` once, also after an error."""

    def log(self, metrics: StepMetrics) -> None: ...

    def close(self) -> None: ...


class SinkGroup:
    """metrics.jsonl and the other sinks as one; a context manager that closes all of them.

    Args:
        record: the sink of metrics.jsonl.
        others: further sinks, fed after it in this order.
    """

    def __init__(self, record: JsonlSink, others: Sequence[MetricsSink] = ()) -> None:
        self.record = record
        self._sinks: tuple[MetricsSink, ...] = (record, *others)

    def log(self, metrics: StepMetrics) -> None:
        """Check names and values (see ``check_names`` for the errors), then hand the line to every sink."""
        check_names(metrics)
        for sink in self._sinks:
            sink.log(metrics)

    def close(self) -> None:
        """Close every sink, also when closing one of them fails; the error is raised afterwards."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
