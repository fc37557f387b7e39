"""The capability report on machines that this one is not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from te_extensions.capability import _PACKAGES, Facts, capabilities, judge
from te_extensions.dispatch import PATHS

ALL = frozenset(_PACKAGES)


def machine(capability: tuple[int, int] | None, packages: frozenset[str] = ALL) -> Facts:
    return Facts("cpu" if capability is None else "cuda:0", "a device", capability, "13.0", packages)


@pytest.mark.parametrize(
    ("capability", "usable"),
    [
        (None, {"reference"}),
        ((7, 5), {"reference", "humming"}),
        ((8, 0), {"reference", "dequantize", "humming"}),
        ((9, 0), {"reference", "dequantize", "fused", "humming"}),
        ((10, 0), {"reference", "dequantize", "humming", "flashinfer_w4a16", "te_w4a4"}),
        ((12, 0), {"reference", "dequantize", "humming", "flashinfer_w4a16", "te_w4a4"}),
    ],
)
def test_what_each_generation_can_run(capability: tuple[int, int] | None, usable: set[str]) -> None:
    report = judge(machine(capability))
    assert {path.name for path in report.paths if path.usable} == usable
    for path in report.paths:
        assert path.computes
        assert bool(path.reason) == bool(path.remedy) == (not path.usable)


@pytest.mark.parametrize(
    ("package", "path", "capability"),
    [
        ("triton", "dequantize", (9, 0)),
        ("cuda.bindings", "fused", (9, 0)),
        ("humming", "humming", (9, 0)),
        ("flashinfer", "flashinfer_w4a16", (10, 0)),
        ("transformer_engine", "te_w4a4", (10, 0)),
    ],
)
def test_a_missing_package_is_named_with_its_command(package: str, path: str, capability: tuple[int, int]) -> None:
    report = judge(machine(capability, ALL - {package}))
    assert not report[path].usable
    assert package in report[path].reason
    assert report[path].remedy.startswith("pip install")
    assert judge(machine(capability))[path].usable


def test_every_path_of_dispatch_is_reported() -> None:
    assert set(PATHS) <= {path.name for path in judge(machine(None)).paths}


def test_the_table_has_one_line_a_path() -> None:
    report = judge(machine((9, 0), ALL - {"humming"}))
    head, *lines = report.describe().splitlines()
    assert "compute capability 9.0" in head
    assert [line.split()[:2] for line in lines] == [[p.name, "yes" if p.usable else "no"] for p in report.paths]
    assert "pip install humming-kernels" in report.describe()


def test_this_machine() -> None:
    report = capabilities("cpu")
    assert report.facts.compute_capability is None
    assert report["reference"].usable
    with pytest.raises(KeyError, match="known are reference"):
        report["marlin"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="torch sees no NVIDIA GPU"):
        capabilities("cuda:0")


def test_looking_loads_no_backend() -> None:
    code = (
        "import sys, te_extensions.capability as c; c.capabilities();"
        "heavy = {'triton', 'humming', 'flashinfer', 'transformer_engine'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
