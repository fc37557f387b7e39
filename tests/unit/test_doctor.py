"""Doctor tells what is usable by trying it, and survives whatever the packages do."""

from __future__ import annotations

import argparse
import json
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from megatron_qerl.backend_probes import PROBES
from megatron_qerl.backends import (
    COMPONENTS,
    Finding,
    as_json,
    cpu_flags,
    cpu_path_usable,
    pinned_versions,
    probe,
    probe_all,
    probe_slurm,
    run_child,
)
from megatron_qerl.cli import doctor
from megatron_qerl.errors import UserError

OWN = Path(sys.executable)
BY_PROBE = {component.probe: component for component in COMPONENTS}

FAKE_TORCH = """
__version__ = "2.11.0+cpu"
bfloat16 = "bf16"
class version: cuda = {cuda!r}
class backends:
    class cpu:
        get_cpu_capability = staticmethod(lambda: "AVX512")
get_num_threads = lambda: 2
class cuda:
    is_available = staticmethod(lambda: {available!r})
    device_count = staticmethod(lambda: 8)
    get_device_capability = staticmethod(lambda index: (9, 0))
    get_device_name = staticmethod(lambda index: "NVIDIA H200")
    class get_device_properties:
        def __init__(self, index): self.total_memory = 139 * 2**30
class Ones:
    def __init__(self, *args, **options): pass
    def __matmul__(self, other): return self
    def sum(self): return {total!r}
ones = Ones
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of the path of every probing child."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def _module(packages: Path, name: str, text: str = "") -> None:
    path = packages.joinpath(*name.split("."))
    path.mkdir(parents=True)
    for folder in (path, *path.parents):
        if folder == packages:
            break
        (folder / "__init__.py").touch()
    (path / "__init__.py").write_text(text)


def _distribution(packages: Path, name: str, version: str, summary: str = "") -> None:
    folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n")


def _torch(packages: Path, *, cuda: str | None = None, available: bool = False, total: float = 32.0**3) -> None:
    _module(packages, "torch", FAKE_TORCH.format(cuda=cuda, available=available, total=total))


def _probe(name: str, timeout_s: float = 60.0) -> Finding:
    return probe(BY_PROBE[name], OWN, timeout_s, pinned_versions())


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_real_torch_multiplies_and_names_the_instruction_sets() -> None:
    finding = _probe("torch_cpu")
    assert finding.usable, finding.reason
    assert "2.11.0" in finding.found
    assert "AMX BF16" in finding.found
    assert (finding.reason, finding.remedy) == ("", "")


def test_the_real_verifier_and_the_real_plotting_library_are_used() -> None:
    for name in ("math_verify", "matplotlib"):
        finding = _probe(name)
        assert finding.usable, finding.reason


def test_a_torch_that_multiplies_wrongly_is_not_usable(packages: Path) -> None:
    _torch(packages, total=17.0)
    finding = _probe("torch_cpu")
    assert not finding.usable
    assert "gave 17.0, not 32768.0" in finding.reason


def test_a_verifier_that_accepts_everything_is_not_usable(packages: Path) -> None:
    _module(packages, "math_verify", "parse = lambda text: text\nverify = lambda gold, answer: True\n")
    finding = _probe("math_verify")
    assert not finding.usable
    assert "0.6 True" in finding.reason


@pytest.mark.parametrize(
    ("cuda", "available", "usable", "said"),
    [
        (None, False, False, "for the CPU alone"),
        ("13.0", False, False, "sees no NVIDIA device"),
        ("13.0", True, True, "8 x NVIDIA H200 (capability 9.0, 139 GiB); torch built for CUDA 13.0; NVFP4 weights are"),
    ],
)
def test_cuda_is_told_apart_by_what_is_missing(
    packages: Path, cuda: str | None, available: bool, usable: bool, said: str
) -> None:
    _torch(packages, cuda=cuda, available=available)
    finding = _probe("torch_cuda")
    assert finding.usable == usable
    assert said in (finding.found if usable else finding.reason)
    assert bool(finding.remedy) != usable


def test_a_package_that_raises_is_broken_and_its_error_is_shown(packages: Path) -> None:
    _module(packages, "wandb", "print('loading')\nraise OSError('libfoo.so: undefined symbol')\n")
    finding = _probe("wandb")
    assert not finding.usable
    assert finding.found == "installed, but broken"
    assert "OSError: libfoo.so: undefined symbol" in finding.reason


def test_a_package_that_crashes_the_interpreter_is_survived(packages: Path) -> None:
    _module(packages, "wandb", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert "crashed the interpreter (SIGSEGV)" in _probe("wandb").reason


def test_a_package_that_works_and_crashes_at_exit_is_not_usable(packages: Path) -> None:
    crash = "import atexit, os, signal\natexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV))\n"
    _module(packages, "wandb", crash + "__version__ = '9'\ndef init(): ...\n")
    finding = _probe("wandb")
    assert not finding.usable
    assert "SIGSEGV" in finding.reason


def test_a_package_that_hangs_is_ended_with_its_children(packages: Path, tmp_path: Path) -> None:
    trace = tmp_path / "child"
    _module(
        packages,
        "wandb",
        "import subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '60'])\nopen({str(trace)!r}, 'w').write(str(child.pid))\ntime.sleep(60)\n",
    )
    started = time.monotonic()
    finding = _probe("wandb", timeout_s=2.0)
    assert time.monotonic() - started < 10.0
    assert "did not finish in 2 s" in finding.reason
    assert "--timeout-s" in finding.reason
    child = int(trace.read_text())
    deadline = time.monotonic() + 5.0
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)


def _alive(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_package_that_prints_and_exits_with_success_is_not_taken_for_usable(packages: Path) -> None:
    _module(packages, "wandb", "import os\nprint('all fine', flush=True)\nos._exit(0)\n")
    finding = _probe("wandb")
    assert not finding.usable
    assert "did not run the probe" in finding.reason


def test_noise_on_standard_output_does_not_hide_the_answer(packages: Path) -> None:
    _module(packages, "wandb", "print('banner without line end', end='')\n__version__ = '9'\ndef init(): ...\n")
    assert _probe("wandb").found == "9"


def test_a_folder_called_wandb_is_not_the_package(packages: Path) -> None:
    (packages / "wandb").mkdir()
    _module(packages, "sitecustomize", "import sys\nsys.path = [p for p in sys.path if 'site-packages' not in p]\n")
    finding = _probe("wandb")
    assert not finding.usable
    assert "only a folder has its name" in finding.reason


def test_the_web_toolkit_named_apex_is_not_nvidias(packages: Path) -> None:
    _module(packages, "apex", "import pyramid_mailer\n")
    _module(packages, "apex.views")
    (packages / "apex" / "__init__.py").write_text("import pyramid_mailer\n")
    _distribution(packages, "apex", "0.9.10.dev0", "Pyramid toolkit to add Velruse")
    finding = _probe("apex")
    assert not finding.usable
    assert finding.found == "another package named apex (0.9.10.dev0: Pyramid toolkit to add Velruse)"
    assert "not NVIDIA's" in finding.reason
    assert "pip uninstall apex" in finding.remedy


def test_nvidias_apex_without_compiled_extensions_is_named_as_that(packages: Path) -> None:
    _module(packages, "apex.optimizers")
    _module(packages, "apex.contrib")
    _distribution(packages, "apex", "0.1")
    finding = _probe("apex")
    assert not finding.usable
    assert finding.found == "NVIDIA apex 0.1"
    assert "no amp_C" in finding.reason


def test_nvidias_apex_with_its_extensions_is_usable(packages: Path) -> None:
    _torch(packages)
    _module(packages, "apex.optimizers")
    _module(packages, "amp_C")
    assert _probe("apex").found == "NVIDIA apex unknown version with compiled extensions"


def test_no_apex_at_all_is_a_third_answer() -> None:
    if _has_module("apex"):
        pytest.skip("an apex is installed here")
    assert _probe("apex").found == "not installed"


def _has_module(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def _fake_megatron(packages: Path, version: str) -> None:
    _module(packages, "megatron.core.models.hybrid.hybrid_model")
    _distribution(packages, "megatron-core", version)


def test_another_version_of_an_exact_pin_is_unusable_and_of_a_loose_one_a_remark(packages: Path) -> None:
    _fake_megatron(packages, "0.99.0")
    _module(packages, "modelopt.torch.quantization", "W4A16_NVFP4_CFG = {}\n")
    _distribution(packages, "nvidia-modelopt", "0.99.0")
    exact, loose = _probe("megatron_core"), _probe("modelopt")
    pinned = pinned_versions()
    assert not exact.usable
    assert f"details of version {pinned['megatron-core']}" in exact.reason
    assert loose.usable
    assert loose.found == f"0.99.0 (tested with {pinned['nvidia-modelopt']})"


def test_the_suffix_of_a_build_is_no_other_version(packages: Path) -> None:
    _torch(packages)
    assert "tested with" not in _probe("torch_cpu").found


def test_an_engine_is_found_in_the_interpreter_that_was_named(packages: Path, tmp_path: Path) -> None:
    site = tmp_path / "engine_site"
    site.mkdir()
    _module(site, "vllm")
    _distribution(site, "vllm", "0.33.0")
    _torch(site, cuda="13.0", available=True)
    python = _script(tmp_path / "engine" / "bin" / "python", f'#!/bin/sh\nPYTHONPATH={site} exec {OWN} "$@"\n')
    _stub_everything(packages)
    findings = {f.name: f for f in probe_all([python], 60.0)}
    found = findings[f"vllm ({python})"]
    assert found.usable, found.reason
    assert found.found.startswith("vllm 0.33.0, torch 2.11.0+cpu with a CUDA device, Python 3.")
    assert "vllm" not in findings  # not here, but there: one row
    assert not findings[f"sglang ({python})"].usable
    assert "sglang" not in findings


def test_an_interpreter_that_cannot_run_is_the_users_error(tmp_path: Path) -> None:
    plain = tmp_path / "python"
    plain.touch()
    for path in (plain, tmp_path / "absent", tmp_path):
        with pytest.raises(UserError, match="--engine-python"):
            probe_all([path])


def test_something_that_is_no_python_is_not_an_engine(tmp_path: Path) -> None:
    python = _script(tmp_path / "python", "#!/bin/sh\necho hello\n")
    assert "did not run the probe" in probe(BY_PROBE["wandb"], python, 10.0).reason


def _stub_everything(packages: Path) -> None:
    """Light stand-ins for every required package, so that all of doctor runs in seconds."""
    pinned = pinned_versions()
    _torch(packages)
    _fake_megatron(packages, pinned["megatron-core"])
    _module(packages, "transformers", "class AutoTokenizer: ...\n")
    _distribution(packages, "transformers", pinned["transformers"])
    _module(packages, "modelopt.torch.quantization", "W4A16_NVFP4_CFG = {}\n")
    _distribution(packages, "nvidia-modelopt", pinned["nvidia-modelopt"])
    verify = "parse = lambda text: text\nverify = lambda gold, answer: answer == '$0.5$'\n"
    _module(packages, "math_verify", verify)
    _distribution(packages, "math-verify", pinned["math-verify"])
    _module(packages, "matplotlib.backends.backend_svg")
    _module(packages, "wandb", "__version__ = '1'\ndef init(): ...\n")


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args(words)


def test_the_exit_code_follows_the_required_rows_alone(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _stub_everything(packages)
    assert doctor.run(_arguments("--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cpu_path_usable"] is True
    assert [c["name"] for c in document["components"]][:2] == ["torch on CPU", "torch on CUDA"]
    assert {c["name"] for c in document["components"]} >= {"slurm", "sglang", "vllm", "NVIDIA apex", "wandb"}
    assert not next(c for c in document["components"] if c["name"] == "torch on CUDA")["usable"]

    (packages / "modelopt" / "__init__.py").write_text("raise RuntimeError('half an installation')\n")
    assert doctor.run(_arguments()) == 1
    text = capsys.readouterr().out
    assert "NO (required)" in text
    assert "modelopt: importing or using it failed: RuntimeError: half an installation." in " ".join(text.split())
    assert text.endswith("The CPU path is NOT ready: mend the required rows first.\n")


def test_each_unusable_row_of_the_text_has_reason_and_remedy_within_the_width() -> None:
    findings = [
        Finding("a", "x", True, True, "1.0", "", ""),
        Finding("b [bold]", "y", False, False, "not installed", "there is no module b", "Install b " * 20 + "now"),
    ]
    text = doctor.as_text(findings, width=90)
    assert max(len(line) for line in text.splitlines()[1:]) <= 90
    assert "b [bold]" in text
    assert "there is no module b." in text
    assert "Optional" in text
    assert "Required" not in text
    assert text.endswith("can run here.")


def test_dry_run_names_the_components_and_tries_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_qerl.backends.probe_all", lambda *a: pytest.fail("tried"))
    assert doctor.run(_arguments("--dry-run", "--engine-python", "/x/python")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "modelopt: quantize (required)" in lines
    assert "sglang, vllm: in /x/python" in lines


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_senseless_time_limit_is_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        _arguments("--timeout-s", text)


def test_slurm_is_absent_asleep_or_awake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(folder))
    assert probe_slurm(5.0).reason == "not on PATH: sinfo, sbatch"
    _script(folder / "sbatch", "#!/bin/sh\n")
    broken = "#!/bin/sh\n[ $1 = --version ] && echo slurm 22.05 || { echo unable to contact controller >&2; exit 1; }\n"
    _script(folder / "sinfo", broken)
    asleep = probe_slurm(5.0)
    assert not asleep.usable
    assert asleep.found == "slurm 22.05"
    assert "does not answer: unable to contact controller" in asleep.reason
    _script(folder / "sinfo", "#!/bin/sh\n[ $1 = --version ] && echo slurm 22.05 || printf 'gpu*\\ncpu\\n'\n")
    assert probe_slurm(5.0).found == "slurm 22.05, partitions: gpu* cpu"


def test_instruction_sets_are_read_from_the_processor_s_flags(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f\nprocessor : 1\nflags : fpu\n")
    assert cpu_flags(path) == "AVX2 yes, AVX-512 yes, AVX-512 BF16 no, AMX BF16 no"
    assert "unknown" in cpu_flags(tmp_path / "absent")


def test_a_child_gets_an_empty_folder_and_no_input() -> None:
    code = "import os, sys; print(os.listdir('.'), repr(sys.stdin.read()))"
    assert run_child([sys.executable, "-c", code], 30.0).stdout == "[] ''\n"
    assert run_child([sys.executable, "-c", "import time; time.sleep(60)"], 0.5).returncode is None
    crash = f"import os; os.kill(os.getpid(), {int(signal.SIGABRT)})"
    assert run_child([sys.executable, "-c", crash], 30.0).returncode == -signal.SIGABRT


def test_every_component_has_its_probe_and_every_pin_is_compared() -> None:
    assert {component.probe for component in COMPONENTS} | {"sglang", "vllm"} == set(PROBES)
    assert all(component.remedy and component.purpose for component in COMPONENTS)
    pinned = pinned_versions()
    compared = {component.distribution for component in COMPONENTS if component.distribution}
    assert compared <= pinned.keys()
    assert pinned.keys() - compared == {"triton"}  # comes with torch


def test_the_verdict_needs_every_required_row() -> None:
    good = Finding("a", "x", True, True, "", "", "")
    bad = Finding("b", "x", True, False, "", "r", "m")
    optional = Finding("c", "x", False, False, "", "r", "m")
    assert cpu_path_usable([good, optional])
    assert not cpu_path_usable([good, bad])
    assert json.loads(as_json([bad]))["components"][0]["remedy"] == "m"
