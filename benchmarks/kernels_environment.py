"""What the numbers of a kernel run depend on.

``benchmarks.environment`` says it for whole runs and imports the package that trains. A machine that only measures
kernels may lack that package's dependencies, so this one needs torch alone.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output_of(*command: str) -> str | None:
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def environment(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on. MEGATRON_QERL_COMMIT names the commit where there is no git."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("MEGATRON_QERL_COMMIT") or _output_of("git", "rev-parse", "HEAD"),
        "hardware": {"gpu": torch.cuda.get_device_name()} if cuda else {"machine": platform.machine()},
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count if cuda else None,
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "humming-kernels": _version("humming-kernels"),
        "python": platform.python_version(),
    }
