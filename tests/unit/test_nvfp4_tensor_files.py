"""Writing safetensors in place, against the safetensors package."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_qerl.errors import CheckpointError, FaultError
from megatron_qerl.nvfp4 import tensor_files
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.tensor_files import ShardWriter, TensorSpec, read_header, read_part, tensor_sha256

TENSORS: dict[str, Tensor] = {
    "a.odd_bytes": torch.arange(7, dtype=torch.uint8),
    "b.bf16": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "c.scalar": torch.tensor(2.0**-9),
    "d.fp8": torch.tensor([[1.0, 448.0, 2.0**-6]]).to(torch.float8_e4m3fn),
    "e.wide": torch.arange(4, dtype=torch.float64),
}
SPECS = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in TENSORS.items()]


def write_all(folder: Path, max_shard_bytes: int = 1 << 20) -> ShardWriter:
    with ShardWriter(folder, SPECS, max_shard_bytes) as writer:
        for name in reversed(TENSORS):  # any order
            writer.write(name, TENSORS[name])
    return writer


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and tensor_sha256(a) == tensor_sha256(b)


def test_a_planned_file_reads_back_with_the_safetensors_package(tmp_path: Path) -> None:
    write_all(tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    assert all(same_bytes(loaded[name], tensor) for name, tensor in TENSORS.items())
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_every_tensor_is_aligned_to_its_element(tmp_path: Path) -> None:
    write_all(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    for spec in SPECS:
        assert (8 + header_bytes + header[spec.name]["data_offsets"][0]) % spec.dtype.itemsize == 0


def test_shards_keep_the_limit_and_the_index_finds_everything(tmp_path: Path) -> None:
    write_all(tmp_path, max_shard_bytes=37)
    (tmp_path / "config.json").write_text("{}")
    folder = ModelFolder.open(tmp_path)
    files = {folder.file(name) for name in folder.names()}
    assert len(files) == 3
    for file in files:
        held_bytes = sum(spec.size_bytes for spec in SPECS if folder.file(spec.name) == file)
        assert held_bytes <= 37 or sum(folder.file(s.name) == file for s in SPECS) == 1
    assert all(same_bytes(folder.read(name), tensor) for name, tensor in TENSORS.items())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(spec.size_bytes for spec in SPECS)


def test_the_writer_knows_the_hash_of_what_it_wrote(tmp_path: Path) -> None:
    writer = write_all(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    folder = ModelFolder.open(tmp_path)
    assert writer.sha256 == {name: folder.tensor_hash(name) for name in folder.names()}


def test_a_tensor_that_was_planned_and_never_written_is_a_fault(tmp_path: Path) -> None:
    with (
        pytest.raises(FaultError, match=r"4 planned tensors missing, first b\.bf16"),
        ShardWriter(tmp_path, SPECS, 1 << 20) as writer,
    ):
        writer.write("a.odd_bytes", TENSORS["a.odd_bytes"])


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensor_files.os, call, full)
    with pytest.raises(FaultError, match="the disk is full") as caught:
        write_all(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_tensor_hash_covers_dtype_and_shape() -> None:
    zeros = torch.zeros(4, dtype=torch.uint8)
    others = [zeros.view(2, 2), zeros.view(torch.int8), zeros.view(torch.float32), torch.ones_like(zeros)]
    assert len({tensor_sha256(t) for t in [zeros, *others]}) == 5


def test_a_part_is_read_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte range asked of the file, against slicing the whole tensor."""
    matrix = torch.arange(24 * 10, dtype=torch.int16).view(24, 10)
    cube = torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)
    save_file({"pad": torch.ones(3, dtype=torch.uint8), "matrix": matrix, "cube": cube}, tmp_path / "x.safetensors")
    specs = read_header(tmp_path / "x.safetensors")
    asked: list[int] = []
    true_preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(sum(len(b) for b in buffers))
        return true_preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    with (tmp_path / "x.safetensors").open("rb", buffering=0) as file:
        for name, tensor in (("matrix", matrix), ("cube", cube)):
            for part in ((), (slice(1, 3),), (slice(0, 4), slice(2, 5)), (slice(1, 4), slice(0, tensor.shape[1]))):
                asked.clear()
                found = read_part(file, specs[name], part)
                assert torch.equal(found, tensor[part] if part else tensor)
                assert sum(asked) == found.numel() * found.element_size()
        assert read_part(file, specs["matrix"], (slice(5, 5), slice(0, 10))).shape == (0, 10)


def test_a_file_that_is_cut_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"matrix": torch.ones(8, 8)}, path)
    spec = read_header(path)["matrix"]
    with path.open("rb", buffering=0) as file:
        os.truncate(path, path.stat().st_size - 40)
        with pytest.raises(CheckpointError, match="cut after it was opened"):
            read_part(file, spec, ())
