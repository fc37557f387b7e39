"""CUDA C++ source -> loaded kernel, with the compiler that torch brings along (NVRTC), so that no toolkit is needed.

Cubins are kept in a cache folder (``TE_EXTENSIONS_CACHE``, else ``~/.cache/te_extensions``) under the SHA-256 of the
source, the options and the compiler's version, and written by rename: any number of processes may share it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

# Argument types of a launch, next to their values.
POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class KernelBuildError(RuntimeError):
    """A kernel did not compile or did not load; the message holds the compiler's log."""


def _bindings() -> tuple[Any, Any]:
    from cuda.bindings import driver, nvrtc

    return driver, nvrtc


def _check(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]) != 0:
        raise KernelBuildError(f"{what}: {result[0]!r}")
    return result[1] if len(result) == 2 else result[1:]


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("TE_EXTENSIONS_CACHE") or Path.home() / ".cache" / "te_extensions")


def compile_cubin(source: str, defines: Mapping[str, str | int], arch: str) -> bytes:
    """Machine code of ``source`` for ``arch`` ("sm_90a"). Needs no GPU.

    Raises:
        KernelBuildError: with the compiler's log.
    """
    _, nvrtc = _bindings()
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--ptxas-options=-v",
        *(f"-D{name}={value}" for name, value in sorted(defines.items())),
    ]
    version = _check(nvrtc.nvrtcVersion(), "nvrtcVersion")
    digest = hashlib.sha256("\0".join([source, *options, repr(version)]).encode()).hexdigest()
    stored = cache_folder() / f"{digest}.cubin"
    if stored.is_file():
        return stored.read_bytes()
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []), "nvrtcCreateProgram")
    encoded = [option.encode() for option in options]
    status = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]
    if int(status) != 0:
        size = _check(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise KernelBuildError(f"{status!r} for {options}:\n{log.decode(errors='replace')}")
    size = _check(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
    cubin: bytes = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    stored.parent.mkdir(parents=True, exist_ok=True)
    temporary = stored.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(cubin)
    temporary.replace(stored)
    return cubin


class Kernel:
    """One loaded function.

    Args:
        dynamic_smem_bytes: shared memory of every launch; raised above 48 KB here once.
        large_clusters: whether its clusters have more than the 8 CTAs that every GPU allows.
    """

    def __init__(self, function: Any, dynamic_smem_bytes: int = 0, *, large_clusters: bool = False) -> None:
        driver, _ = _bindings()
        self._driver, self._function, self._smem = driver, function, dynamic_smem_bytes
        if dynamic_smem_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, attribute, dynamic_smem_bytes), "cuFuncSetAttribute")
        if large_clusters:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _check(driver.cuFuncSetAttribute(function, attribute, 1), "cuFuncSetAttribute")

    def launch(
        self,
        grid: int,
        block: int,
        stream: int,
        values: Sequence[Any],
        types: Sequence[Any],
        *,
        overlap: bool = False,
    ) -> None:
        """Enqueue. ``overlap`` lets the kernel start before the one ahead of it has ended (it must wait for it itself).

        Raises:
            KernelBuildError: the driver refused the launch.
        """
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = self._smem
        config.hStream = driver.CUstream(stream)
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        _check((driver.cuLaunchKernelEx(config, self._function, (tuple(values), tuple(types)), 0)[0], None), "launch")


@cache
def load_function(cubin: bytes, name: str, device_index: int) -> Any:
    """The function ``name`` of a cubin in the current context of ``device_index``.

    Raises:
        KernelBuildError: the driver refused the module.
    """
    import torch

    driver, _ = _bindings()
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # makes torch create the context
        module = _check(driver.cuModuleLoadData(cubin), "cuModuleLoadData")
        return _check(driver.cuModuleGetFunction(module, name.encode()), f"cuModuleGetFunction({name})")


class TensorMap(ctypes.Structure):
    """``CUtensorMap``: what the copy engine must know of an array."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def byte_boxes(address: int, rows: int, row_bytes: int, box_rows: int, box_bytes: int) -> TensorMap:
    """Boxes of [box_rows, box_bytes] in a contiguous byte array [rows, row_bytes]; outside reads as zero.

    Rows of 128 bytes arrive with the 128-byte swizzle, shorter ones as they are.

    Raises:
        KernelBuildError: the driver refused it (row_bytes and the address must be multiples of 16).
    """
    driver, _ = _bindings()
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    swizzles = driver.CUtensorMapSwizzle
    swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_128B if box_bytes == 128 else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
    encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2,
        address,
        [u64(row_bytes), u64(rows)],
        [u64(row_bytes)],
        [u32(box_bytes), u32(box_rows)],
        [u32(1), u32(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(_check(encoded, "cuTensorMapEncodeTiled").getPtr(), 128))
