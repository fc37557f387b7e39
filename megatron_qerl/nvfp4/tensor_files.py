"""Safetensors files: checked before they are read, planned before they are written.

A safetensors file is a header length (8 bytes, little endian), a JSON header that maps each name to its dtype, shape
and byte range, and the bytes. A copy that was cut short still has a good header, so the file's length is compared
with what the header promises before any tensor is used.

Writing goes the other way round. A quantiser knows every output name, dtype and shape before it has computed one
value, so the files are laid out and their room is reserved at the start, and each tensor is then written to its place
as soon as it exists. Nothing is buffered, and a full disk shows up in the first second instead of the last.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from megatron_qerl.errors import CheckpointError, FaultError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER_BYTES = 100_000_000  # the format's own limit
_HEADER_ALIGNMENT = 8

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor, and where its bytes begin in the file that it was found in."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int = field(default=0, compare=False)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 over dtype, shape and bytes, as hexadecimal digits. The same on every machine."""
    digest = hashlib.sha256(f"{_NAMES[tensor.dtype]} {list(tensor.shape)} ".encode())
    digest.update(_raw_bytes(tensor))
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_header(path: Path) -> dict[str, TensorSpec]:
    """The tensors of a safetensors file, after checking that the file is complete.

    Raises:
        CheckpointError: the header is cut off or is not JSON, the file is shorter or longer than its header promises,
            a byte range contradicts its dtype and shape, or a dtype is unknown here.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_bytes = int.from_bytes(start, "little")
        if len(start) < 8 or header_bytes > min(size_bytes - 8, _LONGEST_HEADER_BYTES):
            raise _damaged(path, f"{size_bytes} bytes", "the file ends inside its own header")
        raw = file.read(header_bytes)
    try:
        header = dict(json.loads(raw))
    except (ValueError, TypeError) as error:
        raise _damaged(path, f"{size_bytes} bytes", "the header is not a JSON object") from error
    header.pop("__metadata__", None)
    specs, end = {}, 0
    for name, entry in header.items():
        spec, last = _entry(path, name, entry)
        first = 8 + header_bytes + last - spec.size_bytes
        specs[name], end = replace(spec, offset_bytes=first), max(end, last)
    promised_bytes = 8 + header_bytes + end
    if size_bytes != promised_bytes:
        raise _damaged(path, f"{size_bytes} bytes", f"its header promises {promised_bytes} bytes")
    return specs


def _entry(path: Path, name: str, entry: dict[str, Any]) -> tuple[TensorSpec, int]:
    """One header entry -> its spec and where its bytes end."""
    try:
        written, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, name, "the header entry lacks dtype, shape or data_offsets") from error
    dtype = DTYPES.get(written)
    if dtype is None:
        raise CheckpointError(
            f"{path}: {name}", written, f"dtype must be one of {sorted(DTYPES)}", "Convert the tensor"
        )
    spec = TensorSpec(name, dtype, shape)
    if last - first != spec.size_bytes:
        raise _damaged(path, f"{name}: {last - first} bytes", f"its dtype and shape need {spec.size_bytes}")
    return spec, last


def _damaged(path: Path, value: str, rule: str) -> CheckpointError:
    return CheckpointError(str(path), value, f"half-written or damaged safetensors file, {rule}", "Copy the file again")


def read_part(file: BinaryIO, spec: TensorSpec, part: tuple[slice, ...]) -> Tensor:
    """A part of a tensor, by reading its bytes and no others.

    A memory map would be shorter, but the system reads ahead in it: of a column range it fetches every row whole.

    Args:
        file: the tensor's file, unbuffered.
        spec: from the file's header.
        part: a range of each of the first two dimensions; fewer take the others whole.

    Raises:
        CheckpointError: the file has become shorter since its header was checked.
    """
    size = [s.stop - s.start for s in part] + list(spec.shape[len(part) :])
    result = torch.empty(size, dtype=spec.dtype)
    if not result.numel():
        return result
    row_bytes = math.prod(spec.shape[1:]) * spec.dtype.itemsize
    inner_bytes = math.prod(spec.shape[2:]) * spec.dtype.itemsize
    first = part[0].start if part else 0
    columns = part[1] if len(part) > 1 else None
    begin = spec.offset_bytes + first * row_bytes + (columns.start * inner_bytes if columns else 0)
    whole_rows = columns is None or columns.stop - columns.start == spec.shape[1]
    view = _raw_bytes(result)
    run_bytes = len(view) if whole_rows else len(view) // size[0]
    for row in range(len(view) // run_bytes):
        _read_all(file, view[row * run_bytes : (row + 1) * run_bytes], begin + row * row_bytes)
    return result


def _read_all(file: BinaryIO, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(file.fileno(), [view], offset)
        if count == 0:
            raise _damaged(Path(file.name), f"ends before byte {offset}", "it was cut after it was opened")
        view, offset = view[count:], offset + count


class ShardWriter:
    """Writes a planned set of tensors as one safetensors file or several with an index.

    Use as a context manager; on a clean exit every planned tensor must have been written.

    Args:
        folder: existing folder.
        specs: every tensor that will be written. Order decides which tensors share a file.
        max_shard_bytes: limit of one file's tensor bytes. A tensor larger than that gets a file of its own.

    Attributes:
        sha256: name -> :func:`tensor_sha256` of what was written so far.

    Raises:
        FaultError: the disk is full, or a planned tensor was never written.
    """

    def __init__(self, folder: Path, specs: Sequence[TensorSpec], max_shard_bytes: int) -> None:
        self.folder = folder
        self.sha256: dict[str, str] = {}
        self._specs = {spec.name: spec for spec in specs}
        assert len(self._specs) == len(specs), "a tensor is planned twice"
        self._place: dict[str, tuple[int, int]] = {}  # name -> file descriptor, offset
        self._descriptors: list[int] = []
        shards = list(_split(specs, max_shard_bytes))
        files = [SINGLE_FILE] if len(shards) == 1 else _shard_names(len(shards))
        try:
            for file, shard in zip(files, shards, strict=True):
                self._lay_out(folder / file, shard)
        except BaseException:
            self._close()
            raise
        if len(shards) > 1:
            self._write_index(files, shards)

    def _lay_out(self, path: Path, shard: list[TensorSpec]) -> None:
        """Write the header and reserve room for the tensors of one file."""
        # Wide dtypes first: readers view the bytes in place and need each tensor aligned to its element size.
        ordered = sorted(shard, key=lambda spec: (-spec.dtype.itemsize, spec.name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offsets, offset = {}, 0
        for spec in ordered:
            offsets[spec.name] = offset
            end = offset + spec.size_bytes
            header[spec.name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % _HEADER_ALIGNMENT)
        with disk_faults(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            self._descriptors.append(descriptor)
            os.posix_fallocate(descriptor, 0, 8 + len(raw) + offset)
            _write_all(descriptor, len(raw).to_bytes(8, "little") + raw, 0)
        for name, start in offsets.items():
            self._place[name] = (descriptor, 8 + len(raw) + start)

    def _write_index(self, files: list[str], shards: list[list[TensorSpec]]) -> None:
        weight_map = {spec.name: file for file, shard in zip(files, shards, strict=True) for spec in shard}
        total_bytes = sum(spec.size_bytes for spec in self._specs.values())
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        path = self.folder / INDEX_FILE
        with disk_faults(path):
            path.write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, tensor: Tensor) -> None:
        """Put ``tensor`` into its reserved place. It must have the planned dtype and shape."""
        spec = self._specs[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), (spec, tensor.dtype, tensor.shape)
        assert name not in self.sha256, f"{name} was written twice"
        tensor = tensor.detach().cpu().contiguous()
        descriptor, offset = self._place[name]
        with disk_faults(self.folder):
            _write_all(descriptor, _raw_bytes(tensor), offset)
        self.sha256[name] = tensor_sha256(tensor)

    def _close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for descriptor in self._descriptors:
                    os.fsync(descriptor)
        finally:
            self._close()
        missing = sorted(self._specs.keys() - self.sha256.keys())
        if kind is None and missing:
            lost = f"{len(missing)} planned tensors missing, first {missing[0]}"
            raise FaultError(f"writing {self.folder}", lost, "This is a bug, please report it")


@contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn "no space left" into one line that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise FaultError(f"writing {path}", "the disk is full", "Free some space or choose another output") from error


def _raw_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _split(specs: Sequence[TensorSpec], max_shard_bytes: int) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    filled_bytes = 0
    for spec in specs:
        if shard and filled_bytes + spec.size_bytes > max_shard_bytes:
            yield shard
            shard, filled_bytes = [], 0
        shard.append(spec)
        filled_bytes += spec.size_bytes
    yield shard


def _shard_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
