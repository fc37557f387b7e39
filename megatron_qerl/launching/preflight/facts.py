"""What one node says about itself. No torch here: a node whose torch is broken must still be able to say so."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_qerl.config.cluster import ClusterConfig

_PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformers",
    "safetensors",
    "numpy",
    "nvidia-modelopt",
    "transformer-engine",
    "math-verify",
)
_PROBE_BYTES = 8 << 20
_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Facts:
    """One node.

    Attributes:
        node: its name.
        versions: package -> version; "source" is a hash of this project's code.
        gpus: names of the GPUs.
        driver: of the GPUs; empty without.
        gpu_memory_bytes: of the smallest GPU; 0 without.
        memory_bytes: of the machine.
        clock_ahead_s: of the first node's clock.
        errors: check -> what is wrong, for what the node can judge alone.
        rates: measured speeds, for the record.
    """

    node: str
    versions: dict[str, str]
    gpus: tuple[str, ...]
    driver: str
    gpu_memory_bytes: int
    memory_bytes: int
    clock_ahead_s: float
    errors: dict[str, str]
    rates: dict[str, float]


def gather_facts(
    node: str, cluster: ClusterConfig, shared: Path, ahead: Callable[[], float], port: int | None
) -> Facts:
    """Look at this node.

    Args:
        node: its name.
        cluster: what it must have.
        shared: folder of the run, or its nearest parent that exists.
        ahead: asks how far this clock is ahead of the first node's.
        port: must be free here; None where nothing will listen.
    """
    errors: dict[str, str] = {}
    rates: dict[str, float] = {}
    limits = cluster.preflight
    local = Path(os.path.expandvars(limits.local_dir))
    for check, folder, free_gib in (
        ("local disk", local, limits.local_free_gib),
        ("shared file system", shared, limits.shared_free_gib),
    ):
        problem, rate = _disk(folder, free_gib, node)
        rates[f"{check} write MB/s"] = rate
        if problem:
            errors[check] = problem
    gpus, driver, memory = _gpus(cluster, errors)
    offset = 0.0
    try:
        offset = ahead()
    except OSError as error:
        errors["network"] = f"cannot reach the first node ({error})"
    if port is not None:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("", port))
            except OSError as error:
                errors["ports"] = f"port {port}, where the ranks are to meet, cannot be used ({error.strerror})"
    total = psutil.virtual_memory().total
    return Facts(node, versions(), gpus, driver, memory, total, offset, errors, rates)


def versions() -> dict[str, str]:
    """What must be equal on all nodes."""
    found = {"python": platform.python_version(), "source": source_hash()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def source_hash() -> str:
    """Hash of this project's Python and CUDA files."""
    root = Path(__file__).parents[3]
    digest = hashlib.sha256()
    for package in ("megatron_qerl", "te_extensions"):
        for file in sorted((root / package).rglob("*")):
            if file.suffix in (".py", ".sh", ".cu", ".cuh"):
                digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _disk(folder: Path, free_gib: float, node: str) -> tuple[str, float]:
    """What is wrong with a folder, and megabytes a second of a small synced write that was read back."""
    probe = folder / f".preflight-{node}-{os.getpid()}"
    content = os.urandom(1 << 16) * (_PROBE_BYTES >> 16)
    try:
        free = shutil.disk_usage(folder).free
        if free < free_gib * 2**30:
            return f"{folder} has {free / 2**30:.2f} GiB free, {free_gib:g} GiB are asked for", 0.0
        began = time.monotonic()
        with probe.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        rate = _PROBE_BYTES / 1e6 / max(time.monotonic() - began, 1e-6)
        same = probe.read_bytes() == content
        return ("" if same else f"{folder} does not give back what was written"), rate
    except OSError as error:
        why = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        return f"{folder} cannot be written: {why}", 0.0
    finally:
        probe.unlink(missing_ok=True)


def _gpus(cluster: ClusterConfig, errors: dict[str, str]) -> tuple[tuple[str, ...], str, int]:
    """Names, driver and smallest memory of the GPUs that nvidia-smi sees; not asked where none are wanted."""
    if not cluster.gpus_per_node:
        return (), "", 0
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        errors["GPUs"] = f"nvidia-smi does not answer ({error})"
        return (), "", 0
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    if done.returncode != 0 or not rows:
        errors["GPUs"] = f"nvidia-smi: {' '.join((done.stdout + done.stderr).split())[:200] or 'no GPU'}"
        return (), "", 0
    if len(rows) != cluster.gpus_per_node:
        errors["GPUs"] = f"has {len(rows)}, gpus_per_node = {cluster.gpus_per_node}"
    return tuple(row[0] for row in rows), rows[0][1], min(int(row[2]) for row in rows) << 20
