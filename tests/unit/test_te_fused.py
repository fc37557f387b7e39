"""The fused kernel as far as it can be tried without a GPU: it compiles, it fits, host and device agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from te_extensions import fused
from te_extensions.nvrtc import KernelBuildError, compile_cubin
from te_extensions.weight import NVFP4Weight

SOURCE = fused.source(fused.variant_for(1, 512, 512))[0]
SHAPES = ((55296, 5120), (5120, 5120), (5120, 3456))


def variants() -> list[fused.Variant]:
    return sorted({fused.variant_for(m, n, k) for m in fused.TOKEN_TILES for n, k in SHAPES}, key=repr)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TE_EXTENSIONS_CACHE", str(tmp_path))
    return tmp_path


def test_every_variant_compiles_for_hopper(own_cache: Path) -> None:
    for variant in variants():
        text, defines = fused.source(variant)
        assert compile_cubin(text, defines, fused.ARCH)[:4] == b"\x7fELF", variant
    assert len(list(own_cache.glob("*.cubin"))) == len(variants())


@pytest.mark.parametrize("rank", [16, 32, 96, 128])
def test_the_projecting_kernel_compiles_for_hopper(rank: int) -> None:
    for m in (8, 16, 128):
        text, defines = fused.source(fused.variant_for(m, 5120, 5120), rank)
        assert compile_cubin(text, defines, fused.ARCH)[:4] == b"\x7fELF"


def test_a_compiled_kernel_is_read_back_and_a_changed_one_is_not(own_cache: Path) -> None:
    source = 'extern "C" __global__ void k(int* x) { *x = VALUE; }'
    first = compile_cubin(source, {"VALUE": 1}, fused.ARCH)
    stored = next(own_cache.glob("*.cubin"))
    stored.write_bytes(b"seen")
    assert compile_cubin(source, {"VALUE": 1}, fused.ARCH) == b"seen"
    assert compile_cubin(source, {"VALUE": 2}, fused.ARCH) != first


def test_a_kernel_that_does_not_compile_says_why() -> None:
    with pytest.raises(KernelBuildError, match="undefined_name"):
        compile_cubin('extern "C" __global__ void k() { undefined_name = 1; }', {}, fused.ARCH)


def test_launches_fit_on_a_multiprocessor() -> None:
    for variant in variants():
        assert variant.smem_bytes <= 227 * 1024, variant
        assert variant.stages >= 2, variant
        multiply, copy = variant.registers
        # What a launch gets: 65536 registers over the threads, in steps of 8; warpgroups then trade them.
        at_launch = 65536 // variant.threads // 8 * 8
        assert variant.warpgroups * multiply + copy <= at_launch * (variant.warpgroups + 1), variant


def fields(name: str) -> list[str]:
    """Member names of a struct of the CUDA source, in order."""
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", SOURCE, re.DOTALL)
    assert body is not None
    without_comments = re.sub(r"//.*", "", body.group(1))
    declarations = [line for line in without_comments.split(";") if line.strip()]
    return [re.sub(r".*[\s*]", "", part.strip()) for line in declarations for part in line.split(",")]


@pytest.mark.parametrize(("name", "structure"), [("Params", fused._Params), ("Maps", fused._Maps)])
def test_host_and_device_agree_on_the_arguments(name: str, structure: type) -> None:
    assert fields(name) == [field[0] for field in structure._fields_]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_one_path_cuts_the_work_in_one_way(n: int, k: int) -> None:
    """What decides the order of additions is the same for every M of a path."""

    def cuts(m: int) -> tuple[int, ...]:
        v = fused.variant_for(m, n, k)
        return (v.block_n, v.unit, v.sub, v.ctas)

    assert fused.ONE_PATH_TOKENS == 64
    for first, last in ((1, 64), (65, 128), (129, 1000)):
        assert len({cuts(m) for m in range(first, last + 1)}) == 1


def test_a_batch_gets_the_smallest_tile_that_holds_it() -> None:
    assert [fused.variant_for(m, 512, 512).tokens for m in (1, 8, 9, 64, 65, 129, 256, 257, 5000)] == [
        8, 8, 16, 64, 96, 192, 256, 256, 256,
    ]  # fmt: skip


def test_refused_without_a_gpu() -> None:
    weight = NVFP4Weight(
        torch.zeros(64, 64, dtype=torch.uint8), torch.zeros(64, 8, dtype=torch.uint8).view(torch.float8_e4m3fn), 1.0
    )
    assert "not a CUDA device" in str(fused.fused_refusal(4, weight, torch.device("cpu")))
    with pytest.raises(ValueError, match="not a CUDA device; use path='dequantize'"):
        fused.fused_linear(torch.zeros(4, 128, dtype=torch.bfloat16), weight)
