"""The fused NVFP4 linear on Hopper: decode in registers, multiply on the tensor cores, LoRA in the same launch.

``csrc/fused_linear.cu`` tells how it works. Its variants differ in the number of tokens a tile. Up to 64 tokens they
cut the work in the same places, so a row of y has the same bits for every M from 1 to 64 and whatever the other rows
hold. From 65 to 128 and from 129 to 256 tokens the cuts may be others, again the same for every M. Above 256 tokens
they depend on the number of token tiles, ceil(M / 256), and on the tile that a row is in, never on what other rows
hold. Between these ranges a result may differ in its last bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from te_extensions.nvrtc import FLOAT, INT, POINTER, Kernel, TensorMap, byte_boxes, compile_cubin, load_function
from te_extensions.weight import NVFP4Weight

ARCH = "sm_90a"
TILE_K = 128
_SMEM_BYTES = 227 * 1024
# Files of the kernel, in the order in which they are joined.
_PARTS = ("ptx.cuh", "pack.cu", "fused_linear.cu")
_PROJECT_WARPS = 16  # of a CTA of pack_and_project, as csrc/project.cu has it
_LONG_K = 8192
_LARGEST_PROJECTED_RANK = 128
# Tokens a tile. A batch takes the smallest that holds it, or several tiles of the largest.
TOKEN_TILES = (8, 16, 32, 64, 96, 128, 192, 256)
# Up to here all batches are cut in the same places.
ONE_PATH_TOKENS = 64
MOST_PROJECTED_TOKENS = 128
# Few weights, or many tokens and few rows of W: tiles of 128 rows balance better over the GPU than tiles of 256.
_FEW_ROWS, _SMALL_WEIGHTS = 8192, 64 * 1024 * 1024


@dataclass(frozen=True)
class FusedLora:
    """Low-rank columns added to the product: y += u b^T, in FP32, before y is rounded.

    Attributes:
        u: BF16 [M, R], already scaled: s * A x. Columns of adapters that do not apply to a row hold zero.
        b: BF16 [N, R].
    """

    u: Tensor
    b: Tensor


@dataclass(frozen=True)
class FusedAdapter:
    """LoRA whole: y += s (x a^T) b^T, where the launch that packs x computes u = s x a^T as well. At most 128 tokens.

    Attributes:
        a: BF16 [R, K], R a multiple of 16 and at most 128.
        b: BF16 [N, R].
        scale: s = alpha / r.
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class Variant:
    """Compile-time shape of the kernel.

    Attributes:
        tokens: tokens a tile.
        warpgroups: warpgroups that multiply; one more copies.
        row_blocks: 64-row blocks of W a warpgroup.
        sub: K-tiles of 128 a stage of the shared-memory ring.
        unit: K-tiles a unit of work.
        registers: a thread's registers in the warpgroups that multiply and in the one that copies.
        scale_boxes: whether block scales come by the copy engine (K a multiple of 256).
        ctas: CTAs that share an SM.
        max_stages: most stages of the ring, which has as many as fit.
    """

    tokens: int
    warpgroups: int
    row_blocks: int
    sub: int
    unit: int
    registers: tuple[int, int]
    scale_boxes: bool
    ctas: int = 1
    max_stages: int = 8

    @property
    def block_n(self) -> int:
        return 64 * self.row_blocks * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def stage_bytes(self) -> int:
        return self.sub * (self.tokens * 256 + self.block_n * 64) + (self.block_n * 16 if self.scale_boxes else 0)

    @property
    def stages(self) -> int:
        return min(self.max_stages, (_SMEM_BYTES // self.ctas - 2048) // self.stage_bytes)

    def __post_init__(self) -> None:
        # A stage is released while the next one is being multiplied.
        assert self.stages >= 2, f"{self} leaves room for {self.stages} stage"

    @property
    def smem_bytes(self) -> int:
        # The ring starts on a multiple of 1024 bytes inside what the launch gets.
        return self.stages * self.stage_bytes + 1024


def variant_for(tokens: int, n: int, k: int) -> Variant:
    """The variant that serves a batch of ``tokens`` rows."""
    tile = next((t for t in TOKEN_TILES if t >= tokens), TOKEN_TILES[-1])
    boxes = k % 256 == 0
    if tile > 128 or n * k < _SMALL_WEIGHTS or (tile > ONE_PATH_TOKENS and n <= _FEW_ROWS):
        return Variant(tile, 2, 1, 1, 1, (224, 56), boxes)
    if tile > ONE_PATH_TOKENS:
        return Variant(tile, 2, 2, 2, 2, (224, 56), boxes)
    return Variant(tile, 4, 1, 2, 2, (104, 64), boxes)


def _wgmma(tokens: int) -> str:
    """The body of ``wgmma``: one m64 n(tokens) k16 instruction."""
    count = tokens // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    return (
        'asm volatile("{\\n.reg .pred p;\\nsetp.eq.u32 p, 0, 0;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 "
        f'{{{registers}}}, {{{a}}}, %{count + 4}, p, 1, 1, 0;\\n}}" : {outputs} '
        ': "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x));'
    )


def source(variant: Variant, projected_rank: int = 0, project_ctas: int = 8) -> tuple[str, dict[str, str | int]]:
    """(CUDA source, defines) of a variant.

    Args:
        projected_rank: R of ``pack_and_project``; 0 leaves that kernel out.
        project_ctas: CTAs of its clusters.
    """
    folder = Path(__file__).parent / "csrc"
    parts = ("ptx.cuh", "pack.cu", "project.cu") if projected_rank else _PARTS
    text = "\n".join((folder / part).read_text() for part in parts)
    defines: dict[str, str | int] = {
        "MT": variant.tokens,
        "WGS": variant.warpgroups,
        "RM": variant.row_blocks,
        "SUB": variant.sub,
        "UNIT": variant.unit,
        "STAGES": variant.stages,
        "CTAS": variant.ctas,
        "SCALE_BOXES": int(variant.scale_boxes),
        "REGS_MULTIPLY": variant.registers[0],
        "REGS_COPY": variant.registers[1],
    }
    if projected_rank:
        defines |= {"RANK": projected_rank, "PROJECT_CTAS": project_ctas}
    return text.replace("WGMMA_BODY", _wgmma(variant.tokens)), defines


class _Params(ctypes.Structure):
    """``Params`` of the CUDA source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scales", "tiles", "lora_tiles", "y", "partial")),
        ("flags", ctypes.c_void_p),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "m_tiles", "units", "n_tiles", "lora_stages")),
    )


@lru_cache(maxsize=4096)
def _boxes(address: int, rows: int, row_bytes: int, box_rows: int, box_bytes: int) -> TensorMap:
    return byte_boxes(address, rows, row_bytes, box_rows, box_bytes)


class _Maps(ctypes.Structure):
    """``Maps`` of the CUDA source."""

    _fields_ = tuple((name, TensorMap) for name in ("weights", "scales", "lora_b"))


@dataclass(frozen=True)
class _Loaded:
    multiply: Kernel
    pack: Kernel
    processors: int


@cache
def _load(variant: Variant, device_index: int) -> _Loaded:
    text, defines = source(variant)
    cubin = compile_cubin(text, defines, ARCH)
    return _Loaded(
        Kernel(load_function(cubin, "fused_linear", device_index), variant.smem_bytes),
        Kernel(load_function(cubin, "pack_activations", device_index)),
        torch.cuda.get_device_properties(device_index).multi_processor_count,
    )


@cache
def _load_project(variant: Variant, rank: int, ctas: int, device_index: int) -> Kernel:
    text, defines = source(variant, rank, ctas)
    cubin = compile_cubin(text, defines, ARCH)
    smem_bytes = _PROJECT_WARPS * _project_rows(variant) * (rank + 1) * 4
    return Kernel(load_function(cubin, "pack_and_project", device_index), smem_bytes, large_clusters=ctas > 8)


def _project_rows(variant: Variant) -> int:
    """Tokens of a projecting cluster."""
    return min(16, variant.tokens)


def _project_ctas(variant: Variant, k: int) -> int:
    """CTAs of a cluster. A long K is worth the wait for a large one, unless many tokens need many of them."""
    return 16 if k > _LONG_K and variant.tokens <= ONE_PATH_TOKENS else 8


def fused_refusal(x_rows: int, weight: NVFP4Weight, device: torch.device) -> str | None:
    """Why the fused kernel cannot serve this product, or None."""
    if device.type != "cuda":
        return f"device {device} is not a CUDA device"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"compute capability {torch.cuda.get_device_capability(device)} is not 9.0 (Hopper)"
    cols, packed, scales = weight.shape[1], weight.packed, weight.block_scale
    obstacles = (
        (x_rows < 1, "no rows"),
        (cols % 64 != 0, f"K = {cols} is not a multiple of 64"),
        (not (packed.is_contiguous() and scales.is_contiguous()), "the packed bytes are not contiguous"),
        (
            packed.data_ptr() % 16 != 0 or scales.data_ptr() % 16 != 0,
            "the packed bytes do not start at a multiple of 16 bytes, which the copy engine needs",
        ),
    )
    return next((reason for applies, reason in obstacles if applies), None)


def adapter_refusal(x_rows: int, rank: int) -> str | None:
    """Why no ``FusedAdapter`` of R = ``rank`` serves this many rows, or None."""
    if rank % 16 or not 16 <= rank <= _LARGEST_PROJECTED_RANK:
        return f"R = {rank} is not a multiple of 16 up to {_LARGEST_PROJECTED_RANK}"
    if x_rows > MOST_PROJECTED_TOKENS:
        return f"M = {x_rows} is above {MOST_PROJECTED_TOKENS}"
    return None


def _check_inputs(x: Tensor, weight: NVFP4Weight, lora: FusedLora | FusedAdapter | None) -> None:
    rows, cols = weight.shape
    refusal = fused_refusal(x.shape[0], weight, x.device)
    if refusal is not None:
        raise ValueError(f"fused_linear cannot run: {refusal}; use path='dequantize'")
    if x.dim() != 2 or x.shape[1] != cols or x.dtype != torch.bfloat16 or not x.is_contiguous():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, needed contiguous BF16 [M, {cols}]")
    if lora is None:
        return
    rank = lora.b.shape[1]
    if isinstance(lora, FusedAdapter):
        refusal = adapter_refusal(x.shape[0], rank)
        if refusal is not None:
            raise ValueError(f"a FusedAdapter cannot be served: {refusal}; compute u and pass a FusedLora")
        other = ("a", lora.a, (rank, cols))
    else:
        other = ("u", lora.u, (x.shape[0], rank))
    for name, tensor, shape in (other, ("b", lora.b, (rows, rank))):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
            raise ValueError(f"lora.{name} is {tuple(tensor.shape)} {tensor.dtype}, needed contiguous BF16 {shape}")


def _pad_rank(lora: FusedLora) -> FusedLora:
    """Columns up to the next multiple of 8: the copy engine wants rows of a multiple of 16 bytes."""
    missing = -lora.u.shape[1] % 8
    if not missing:
        return lora
    pad = torch.nn.functional.pad
    return FusedLora(pad(lora.u, (0, missing)), pad(lora.b, (0, missing)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 1024) * 1024


def fused_linear(x: Tensor, weight: NVFP4Weight, lora: FusedLora | FusedAdapter | None = None) -> Tensor:
    """x W^T (+ u b^T), one rounding, no autograd.

    Args:
        x: BF16 [M, K] on a Hopper GPU, contiguous.
        weight: the packed matrix, N x K.
        lora: low-rank columns, or a whole adapter, or None.

    Returns:
        BF16 [M, N].

    Raises:
        ValueError: the kernel cannot serve this product (``fused_refusal`` says why) or a shape is wrong.
    """
    _check_inputs(x, weight, lora)
    (m, k), n = x.shape, weight.shape[0]
    variant = variant_for(m, n, k)
    loaded = _load(variant, x.device.index)
    if isinstance(lora, FusedLora):
        lora = _pad_rank(lora)
    rank = 0 if lora is None else lora.b.shape[1]
    m_tiles = -(-m // variant.tokens)
    n_tiles = -(-n // variant.block_n)
    units = -(-k // (variant.unit * TILE_K))
    k_tiles, lora_stages = units * variant.unit, -(-rank // (32 * variant.sub))
    grid = min(loaded.processors * variant.ctas, n_tiles * m_tiles * units)
    flag_count = grid * variant.warpgroups
    sizes = (
        m_tiles * k_tiles * variant.tokens * 256,
        m_tiles * lora_stages * variant.tokens * 128,
        grid * variant.tokens * variant.block_n * 4,
        flag_count * 4,
    )
    y = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    workspace = torch.empty(sum(map(_aligned, sizes)), dtype=torch.uint8, device=x.device)
    address, places = workspace.data_ptr(), []
    for size in sizes:
        places.append(address)
        address += _aligned(size)
    tiles, lora_tiles, partial, flags = places
    stream = torch.cuda.current_stream(x.device).cuda_stream
    counts = (m_tiles, k_tiles, lora_stages, flag_count)
    if isinstance(lora, FusedAdapter):
        packing = -(-max(m_tiles * variant.tokens * k_tiles * 4, flag_count) // (32 * _PROJECT_WARPS))
        ctas = _project_ctas(variant, k)
        clusters = m_tiles * variant.tokens // _project_rows(variant) + -(-packing // ctas)
        _load_project(variant, rank, ctas, x.device.index).launch(
            clusters * ctas,
            32 * _PROJECT_WARPS,
            stream,
            (x.data_ptr(), tiles, lora.a.data_ptr(), lora.scale, lora_tiles, flags, m, k, *counts),
            (POINTER, POINTER, POINTER, FLOAT, POINTER, POINTER, *(INT,) * 6),
            overlap=True,
        )
    else:
        threads = max(m_tiles * variant.tokens * (k_tiles * 4 + lora_stages * 8), flag_count)
        u = 0 if lora is None else lora.u.data_ptr()
        loaded.pack.launch(
            -(-threads // 128),
            128,
            stream,
            (x.data_ptr(), tiles, u, lora_tiles, flags, m, k, rank, *counts),
            (POINTER,) * 5 + (INT,) * 7,
            overlap=True,
        )
    params = _Params(
        weight.block_scale.data_ptr(),
        tiles,
        lora_tiles,
        y.data_ptr(),
        partial,
        flags,
        weight.tensor_scale * 256.0,
        m,
        n,
        k,
        m_tiles,
        units,
        n_tiles,
        lora_stages,
    )
    rows, weight_box = variant.block_n, 64 * variant.sub
    weights = _boxes(weight.packed.data_ptr(), n, k // 2, rows, weight_box)
    scales = _boxes(weight.block_scale.data_ptr(), n, k // 16, rows, 16) if variant.scale_boxes else weights
    lora_b = weights if lora is None else _boxes(lora.b.data_ptr(), n, rank * 2, rows, weight_box)
    maps = _Maps(weights, scales, lora_b)
    loaded.multiply.launch(grid, variant.threads, stream, (maps, params), (None, None), overlap=True)
    return y
