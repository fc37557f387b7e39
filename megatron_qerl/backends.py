"""What this machine can run, found by trying it.

A package that is installed may still be unusable: built for another torch, without a device, or a stranger of the same
name. So each one is imported and put to a small use, in a child process with a time limit, because a broken binary can
crash or hang the interpreter that imports it. Every answer says what is missing and how to get it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_qerl import backend_probes
from megatron_qerl.errors import BackendUnavailableError, UserError

_CPU_FLAGS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX BF16"}
_ENGINES = ("sglang", "vllm")
_OWN_ENVIRONMENT = (
    "Engines have environments of their own: make one with `python -m venv ENGINE`, install it there with "
    "`ENGINE/bin/pip install {name}`, and check it with `megatron-qerl doctor --engine-python ENGINE/bin/python`"
)
_REINSTALL = "Install this project's requirements again: `pip install megatron-qerl`"


@dataclass(frozen=True)
class Component:
    """Something that the project can use.

    Attributes:
        name: its name in the table and in JSON.
        probe: function of ``backend_probes`` that tries it.
        purpose: what it is needed for.
        remedy: how to get it.
        required: whether the CPU path needs it.
        distribution: package whose pinned version is compared with the installed one, if it is pinned.
        exact: whether another version than the pinned one counts as unusable.
    """

    name: str
    probe: str
    purpose: str
    remedy: str
    required: bool = False
    distribution: str = ""
    exact: bool = False


@dataclass(frozen=True)
class Finding:
    """The answer for one component.

    Attributes:
        name, purpose, required: as in ``Component``.
        usable: whether it worked.
        found: version and facts.
        reason: why it is not usable; empty when it is.
        remedy: how to get it; empty when it is usable.
    """

    name: str
    purpose: str
    required: bool
    usable: bool
    found: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class ChildResult:
    """How a child process ended; ``returncode`` is None when it ran out of time."""

    returncode: int | None
    stdout: str
    stderr: str


COMPONENTS: tuple[Component, ...] = (
    Component("torch on CPU", "torch_cpu", "everything", _REINSTALL, required=True, distribution="torch"),
    Component(
        "torch on CUDA",
        "torch_cuda",
        "training on NVIDIA GPUs",
        "Use a machine with an NVIDIA GPU and driver, and a torch build for CUDA; without it model.device is cpu",
    ),
    Component(
        "megatron-core",
        "megatron_core",
        "the model and its parallel layouts",
        _REINSTALL,
        required=True,
        distribution="megatron-core",
        exact=True,
    ),
    Component(
        "transformers", "transformers", "tokenizers and model configs", _REINSTALL, True, distribution="transformers"
    ),
    Component("modelopt", "modelopt", "quantize", _REINSTALL, required=True, distribution="nvidia-modelopt"),
    Component("math-verify worker", "math_verify", "rewards", _REINSTALL, required=True, distribution="math-verify"),
    Component("matplotlib", "matplotlib", "report", _REINSTALL, required=True),
    Component(
        "transformer_engine",
        "transformer_engine",
        "fused layers on GPUs (model.attention: transformer_engine)",
        "On a machine with an NVIDIA GPU: `pip install 'megatron-qerl[gpu]'`; without it set model.attention: sdpa",
        distribution="transformer-engine",
    ),
    Component(
        "NVIDIA apex",
        "apex",
        "Megatron's fused optimizer on GPUs; torch's is used without it",
        "Not needed on a CPU. Beware: `pip install apex` brings an unrelated package, which `pip uninstall apex` "
        "removes. Build NVIDIA's from the source repository NVIDIA/apex with its --cpp_ext and --cuda_ext options",
    ),
    Component(
        "wandb",
        "wandb",
        "metrics.sinks: [wandb]",
        "`pip install 'megatron-qerl[wandb]'`; metrics.jsonl and the report do not need it",
    ),
)


def probe_all(engine_pythons: Sequence[Path] = (), timeout_s: float = 120.0) -> tuple[Finding, ...]:
    """Try every component, the engines in this interpreter and in each of ``engine_pythons``, and Slurm.

    Args:
        engine_pythons: interpreters of other environments that may hold sglang or vllm.
        timeout_s: limit for each single trial.

    Raises:
        UserError: an engine interpreter is not an executable file.
        BackendUnavailableError: the project itself is not installed.
    """
    for python in engine_pythons:
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise UserError(
                "--engine-python", python, "must be a Python interpreter that can be run", "Name ENVIRONMENT/bin/python"
            )
    own = Path(sys.executable)
    pythons = (own, *engine_pythons)
    trials = [(component, own) for component in COMPONENTS]
    trials += [(_engine_component(name, python), python) for name in _ENGINES for python in pythons]
    pinned = pinned_versions()
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        findings = list(pool.map(lambda trial: probe(trial[0], trial[1], timeout_s, pinned), trials))
    result = findings[: len(COMPONENTS)]
    for start in range(len(COMPONENTS), len(findings), len(pythons)):
        result += _worth_telling(findings[start : start + len(pythons)])
    return (*result, probe_slurm(timeout_s))


def probe(component: Component, python: Path, timeout_s: float, pinned: dict[str, str] | None = None) -> Finding:
    """Try one component with one interpreter."""
    script = Path(backend_probes.__file__).read_text(encoding="utf-8")
    result = run_child([str(python), "-c", script, component.probe], timeout_s)
    answer = _read_answer(result, timeout_s)
    usable, found, reason = bool(answer["usable"]), str(answer["found"]), str(answer["reason"])
    if usable and component.probe == "torch_cpu":
        found = f"{found}, {cpu_flags()}"
    wanted = (pinned or {}).get(component.distribution)
    version = str(answer["version"] or "").partition("+")[0]  # without the build's suffix, as in 2.11.0+cu130
    if wanted is not None and usable and version != wanted:
        found = f"{found} (tested with {wanted})"
        if component.exact:
            usable, reason = False, f"the project depends on details of version {wanted}"
    return _finding(component, usable, found, reason)


def run_child(command: Sequence[str], timeout_s: float) -> ChildResult:
    """Run a command in an empty folder, without input, and end it with all its children when time is up.

    Files take its output: a pipe would stay open, and be waited for, as long as any grandchild lives.
    """
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        returncode: int | None
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        err.seek(0)
        return ChildResult(returncode, out.read().decode(errors="replace"), err.read().decode(errors="replace"))


def probe_slurm(timeout_s: float) -> Finding:
    """Whether jobs can be submitted: the commands are on PATH and the controller answers."""
    component = Component(
        "slurm",
        "",
        "submitting jobs to a cluster",
        "Run doctor on a login node of the cluster, or load its Slurm module; for one machine Slurm is not needed",
    )
    missing = [name for name in ("sinfo", "sbatch") if shutil.which(name) is None]
    if missing:
        return _finding(component, False, "not installed", f"not on PATH: {', '.join(missing)}")
    version = run_child(["sinfo", "--version"], timeout_s).stdout.strip() or "unknown version"
    result = run_child(["sinfo", "--noheader", "--format=%P"], timeout_s)
    if result.returncode != 0:
        said = "no answer in time" if result.returncode is None else _last_line(result.stderr)
        return _finding(
            component, False, version, f"the commands are there, but the controller does not answer: {said}"
        )
    return _finding(component, True, f"{version}, partitions: {' '.join(result.stdout.split()) or 'none'}", "")


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's instruction sets that speed up matrix products, as text."""
    if not path.is_file():
        return "instruction sets unknown on this system"
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", path.read_text(errors="replace"), re.MULTILINE)
    flags = set(match.group(1).split()) if match else set()
    known = [f"{name} {'yes' if flag in flags else 'no'}" for flag, name in _CPU_FLAGS.items()]
    return ", ".join(known)


def pinned_versions() -> dict[str, str]:
    """Distribution -> version, for the requirements of this project that name exactly one version.

    Raises:
        BackendUnavailableError: the project runs from a folder that was not installed.
    """
    try:
        requirements = importlib.metadata.requires("megatron-qerl") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendUnavailableError(
            "megatron-qerl",
            "not installed",
            "versions are compared with the requirements of the installed package",
            "Run `pip install -e .` in the project's folder",
        ) from error
    pins = (re.match(r"([\w.-]+)(?:\[[^\]]*\])?==([\w.]+)", text) for text in requirements)
    return {pin.group(1): pin.group(2) for pin in pins if pin is not None}


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON document with the verdict."""
    return json.dumps(
        {"cpu_path_usable": cpu_path_usable(findings), "components": [asdict(f) for f in findings]}, indent=2
    )


def cpu_path_usable(findings: Sequence[Finding]) -> bool:
    """Whether everything that a run on a CPU needs is usable."""
    return all(finding.usable for finding in findings if finding.required)


def _engine_component(name: str, python: Path) -> Component:
    label = name if python == Path(sys.executable) else f"{name} ({python})"
    remedy = _OWN_ENVIRONMENT.format(name=name)
    return Component(label, name, f"rollout.engine: {name}", f"{remedy}; rollout.engine: embedded needs neither")


def _worth_telling(findings: Sequence[Finding]) -> list[Finding]:
    """Of one engine's findings: where it is not installed is of no interest once it was found, or sought elsewhere."""
    elsewhere = findings[1:]
    found = any(finding.usable for finding in findings)
    kept = [f for f in findings if not f.found.startswith(backend_probes.NOT_INSTALLED)]
    return kept if found or kept else list(elsewhere or findings)


def _read_answer(result: ChildResult, timeout_s: float) -> dict[str, object]:
    for line in reversed(result.stdout.splitlines()):
        if line.startswith(backend_probes.MARKER) and result.returncode == 0:
            answer: dict[str, object] = json.loads(line.removeprefix(backend_probes.MARKER))
            return answer
    if result.returncode is None:
        reason = f"it did not finish in {timeout_s:g} s; on a slow disk give it more with --timeout-s"
    elif result.returncode < 0:
        reason = f"it crashed the interpreter ({signal.Signals(-result.returncode).name})"
    elif result.returncode == 0:
        reason = "the interpreter did not run the probe; is it Python 3.9 or later?"
    else:
        reason = f"importing or using it failed: {_last_line(result.stderr)}"
    return {"usable": False, "found": "installed, but broken", "reason": reason, "version": None}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def _finding(component: Component, usable: bool, found: str, reason: str) -> Finding:
    remedy = "" if usable else component.remedy
    return Finding(
        component.name, component.purpose, component.required, usable, found, "" if usable else reason, remedy
    )
