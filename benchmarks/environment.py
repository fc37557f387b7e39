"""What every result file says about where it came from."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_qerl.bookkeeping import hardware, versions

RESULTS = Path(__file__).parent / "results"


def cpu_model() -> str:
    """Processor name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def environment() -> dict[str, Any]:
    """Hardware, versions, commit and date."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "cpu": cpu_model(),
        "hardware": hardware(),
        "versions": versions(),
    }


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file with the environment first, and print it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"environment": environment(), **data}, indent=1) + "\n"
    path.write_text(text)
    print(text, end="")
