"""Memory readings are this process's own."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from megatron_qerl.metrics.memory import device_peaks_bytes, memory_values, peak_rss_bytes
from megatron_qerl.metrics.names import check_names
from megatron_qerl.types import StepMetrics

MIB = 2**20


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_peak_holds_what_was_allocated_and_freed() -> None:
    output = _python(
        "from megatron_qerl.metrics.memory import peak_rss_bytes\n"
        "before = peak_rss_bytes()\n"
        "block = bytearray(b'x') * (200 * 2**20)\n"
        "del block\n"
        "print(before, peak_rss_bytes())"
    )
    before, after = map(int, output.split())
    assert 195 * MIB <= after - before <= 300 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="the inherited high-water mark is Linux's")
def test_a_child_does_not_inherit_its_parents_peak() -> None:
    child = "from megatron_qerl.metrics.memory import peak_rss_bytes; print(peak_rss_bytes())"
    output = _python(
        "import subprocess, sys\n"
        "block = bytearray(b'x') * (300 * 2**20)\n"
        f"print(subprocess.run([sys.executable, '-c', {child!r}], capture_output=True, text=True).stdout)"
    )
    assert 2 * MIB < int(output) < 200 * MIB


def test_the_module_neither_needs_nor_imports_torch() -> None:
    output = _python(
        "import sys\n"
        "sys.modules['torch'] = None  # any import of torch now fails\n"
        "import megatron_qerl.metrics.memory as memory, megatron_qerl.metrics.names, megatron_qerl.metrics.phases\n"
        "import megatron_qerl.metrics.sinks, megatron_qerl.report\n"
        "print(sorted(memory.memory_values()))"
    )
    assert output.strip() == "['memory/peak_rss_bytes']"


def test_device_peaks_are_reported_when_torch_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(
        is_available=lambda: True, max_memory_allocated=lambda: 5 * MIB, max_memory_reserved=lambda: 8 * MIB
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))  # type: ignore[misc]
    assert device_peaks_bytes() == (5 * MIB, 8 * MIB)
    values = memory_values()
    assert values["memory/device_peak_bytes"] == 5 * MIB
    assert values["memory/device_reserved_peak_bytes"] == 8 * MIB
    check_names(StepMetrics(1, values))


def test_no_device_is_not_zero_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))  # type: ignore[misc]
    assert device_peaks_bytes() is None
    assert set(memory_values()) == {"memory/peak_rss_bytes"}
    assert peak_rss_bytes() > MIB
