"""Peak memory of this process, on the host and on its device.

The host's figure is the kernel's high-water mark ``VmHWM``. ``getrusage`` reports a similar number, but on Linux that
one survives ``exec``: a small process started by a large one shows the parent's peak. It is used only where there is no
/proc. Other processes (engines, verifiers) are not counted.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_KIB_BYTES = 1024


def peak_rss_bytes() -> int:
    """Largest resident set of this process since it started, in bytes."""
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * _KIB_BYTES
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _KIB_BYTES


def device_peaks_bytes() -> tuple[int, int] | None:
    """Most device memory (allocated, reserved) by torch on the current device, in bytes; None without CUDA.

    torch is looked up, not imported: a process that never imported it has no device memory to report.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return int(torch.cuda.max_memory_allocated()), int(torch.cuda.max_memory_reserved())


def memory_values() -> dict[str, float]:
    """Metrics ``memory/peak_rss_bytes`` and, with a device, ``memory/device_peak_bytes`` and its reserved twin."""
    values: dict[str, float] = {"memory/peak_rss_bytes": peak_rss_bytes()}
    device = device_peaks_bytes()
    if device is not None:
        values["memory/device_peak_bytes"], values["memory/device_reserved_peak_bytes"] = device
    return values
