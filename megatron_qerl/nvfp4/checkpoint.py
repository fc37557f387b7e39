"""One view of every model folder this project reads.

Three layouts arrive here: a plain Hugging Face folder, a ModelOpt NVFP4 folder (the one this project writes), and a
compressed-tensors NVFP4 folder, which has the same bytes under other names and stores the reciprocal of the tensor
scale. Callers name a module and get a :class:`PackedWeight`; only the requested rows and columns are read, so a
tensor-parallel rank touches its own shard alone.

Everything that can be wrong with the files is found when the folder is opened, before any weight is used.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import torch
from torch import Tensor

from megatron_qerl.errors import CheckpointError
from megatron_qerl.nvfp4 import tokenizer_files
from megatron_qerl.nvfp4.format import BLOCK, PackedWeight
from megatron_qerl.nvfp4.shared_scale import share_tensor_scale
from megatron_qerl.nvfp4.tensor_files import (
    INDEX_FILE,
    SINGLE_FILE,
    TensorSpec,
    read_header,
    read_part,
    tensor_sha256,
)

__all__ = ["MANIFEST_FILE", "ModelFolder", "PackedWeight", "read_json", "share_tensor_scale"]

MANIFEST_FILE = "manifest.json"
MODELOPT_ALGORITHMS = ("W4A16_NVFP4", "NVFP4")
COMPRESSED_TENSORS_FORMAT = "nvfp4-pack-quantized"
_MODELOPT = ("weight", "weight_scale", "weight_scale_2")
_COMPRESSED = ("weight_packed", "weight_scale", "weight_global_scale")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(str(path), "missing", "a model folder must have it", "Copy the folder again") from error
    except ValueError as error:
        raise CheckpointError(str(path), "not JSON", "must be a JSON object", "Copy the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(str(path), type(value).__name__, "must be a JSON object", "Copy the file again")
    return value


@dataclass
class ModelFolder:
    """A folder of safetensors files with a config.json; open one with :meth:`open`.

    Attributes:
        path: the folder.
        config: Hugging Face config.json.
        bytes_read: bytes of tensors read so far.
    """

    path: Path
    config: dict[str, Any]
    _specs: dict[str, TensorSpec]
    _files: dict[str, Path]
    bytes_read: int = 0
    _handles: dict[Path, BinaryIO] = field(default_factory=dict, repr=False)
    _sha256: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Check the folder and return a view of it. Reads headers only.

        Raises:
            CheckpointError: the folder, config.json or a file that the index names is missing, a safetensors file is
                half-written, the index names a tensor that its file lacks, or the weights are quantised in a way that
                this project does not read.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(str(path), "missing", "the model folder must exist", "Check the path")
        config = read_json(path / "config.json")
        specs: dict[str, TensorSpec] = {}
        files: dict[str, Path] = {}
        for file, wanted in _shards(path).items():
            header = read_header(file)
            if wanted is not None and (lost := sorted(wanted - header.keys())):
                rule = f"{INDEX_FILE} says that {lost[0]} is in it"
                raise CheckpointError(str(file), f"lacks {len(lost)} tensors", rule, "Copy the file again")
            names = header.keys() if wanted is None else wanted
            specs |= {name: header[name] for name in names}
            files |= dict.fromkeys(names, file)
        folder = cls(path, config, dict(sorted(specs.items())), files)
        folder._check_quantization()
        return folder

    # -- what is in the folder --------------------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        """Names of all stored tensors, sorted."""
        return tuple(self._specs)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a stored tensor.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._specs:
            raise CheckpointError(f"{self.path}: {name}", "missing", "the model needs it", "Use complete files")
        return self._specs[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.spec(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.spec(name).dtype

    def file(self, name: str) -> Path:
        """The safetensors file that holds a tensor."""
        self.spec(name)
        return self._files[name]

    @cached_property
    def nvfp4_modules(self) -> tuple[str, ...]:
        """Names of all modules with a packed weight, sorted."""
        return tuple(
            name.rpartition(".")[0]
            for name, spec in self._specs.items()
            if name.rpartition(".")[2] in ("weight", "weight_packed") and spec.dtype == torch.uint8
        )

    @property
    def quantized(self) -> bool:
        return bool(self.nvfp4_modules)

    def is_nvfp4(self, module_name: str) -> bool:
        """Whether the module, such as ``model.layers.0.self_attn.q_proj``, has a packed weight."""
        return self._layout(module_name) is not None

    def nvfp4_shape(self, module_name: str) -> tuple[int, int]:
        """(N, K) of a packed weight, counted in weights rather than bytes."""
        n, half_k = self.shape(f"{module_name}.{self._tensors(module_name)[0]}")
        return n, 2 * half_k

    def _layout(self, module_name: str) -> Literal["modelopt", "compressed"] | None:
        if f"{module_name}.{_COMPRESSED[0]}" in self._specs:
            return "compressed"
        weight = self._specs.get(f"{module_name}.{_MODELOPT[0]}")
        return "modelopt" if weight is not None and weight.dtype == torch.uint8 else None

    def _tensors(self, module_name: str) -> tuple[str, str, str]:
        layout = self._layout(module_name)
        if layout is None:
            name = f"{self.path}: {module_name}"
            raise CheckpointError(name, "not packed", "an NVFP4 weight was asked for", "Use an NVFP4 checkpoint")
        return _COMPRESSED if layout == "compressed" else _MODELOPT

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """A tensor or a part of it, in its stored dtype. Only the bytes of the part are read.

        Args:
            rows: contiguous slice of the first dimension; None for all.
            cols: contiguous slice of the second dimension; None for all.
        """
        spec = self.spec(name)
        index = []
        for axis, part in enumerate((rows, cols)):
            if axis >= len(spec.shape):
                assert part is None, f"{name} has {len(spec.shape)} dimensions"
                continue
            start, stop, step = (part or slice(None)).indices(spec.shape[axis])
            exceeds = part is not None and part.stop is not None and part.stop > spec.shape[axis]
            if step != 1 or stop < start or exceeds:
                where = f"{self.path}: {name}"
                raise CheckpointError(where, part, f"not a part of axis {axis} of {spec.shape}", "Use matching files")
            index.append(slice(start, stop))
        piece = read_part(self._handle(self._files[name]), spec, tuple(index))
        self.bytes_read += piece.numel() * piece.element_size()
        return piece

    def read_nvfp4(self, module_name: str, rows: slice | None = None, cols: slice | None = None) -> PackedWeight:
        """A packed weight or a part of it.

        Args:
            module_name: such as ``model.layers.0.self_attn.q_proj``.
            rows: part of N.
            cols: part of K, counted in weights; both ends must be multiples of 16.

        Raises:
            CheckpointError: a tensor is missing or has the wrong dtype or shape, or a part cuts a block of 16.
        """
        weight, scale, tensor_scale = (f"{module_name}.{suffix}" for suffix in self._tensors(module_name))
        n, k = self.nvfp4_shape(module_name)
        self._check_packed(weight, scale, n, k)
        bytes_part = blocks_part = None
        if cols is not None:
            start, stop, step = cols.indices(k)
            if step != 1 or start % BLOCK or stop % BLOCK:
                rule = f"parts of K = {k} must start and end at multiples of {BLOCK}"
                remedy = f"Choose a tensor parallel size that divides {k // BLOCK} blocks"
                raise CheckpointError(f"{self.path}: {weight}", f"K[{start}:{stop}]", rule, remedy)
            bytes_part = slice(start // 2, stop // 2)
            blocks_part = slice(start // BLOCK, stop // BLOCK)
        stored = self.read(tensor_scale).float().reshape(-1)
        if stored.numel() != 1 or not (math.isfinite(stored.item()) and stored.item() > 0):
            rule = "must be one positive finite number"
            raise CheckpointError(f"{self.path}: {tensor_scale}", stored.tolist(), rule, "Quantise the model again")
        value = stored[0]
        return PackedWeight(
            packed=self.read(weight, rows, bytes_part),
            block_scale=self.read(scale, rows, blocks_part),
            tensor_scale=1.0 / value if self._layout(module_name) == "compressed" else value.clone(),
        )

    def _check_packed(self, weight: str, scale: str, n: int, k: int) -> None:
        where = f"{self.path}: {weight}"
        if k % BLOCK:
            raise CheckpointError(where, f"K = {k}", f"K must be a multiple of {BLOCK}", "Quantise another model")
        found = (self.dtype(scale), self.shape(scale))
        wanted = (torch.float8_e4m3fn, (n, k // BLOCK))
        if found != wanted:
            rule = f"block scales of a {n} x {k} weight must be {wanted[0]} {wanted[1]}"
            raise CheckpointError(f"{self.path}: {scale}", f"{found[0]} {found[1]}", rule, "Quantise the model again")

    def _handle(self, file: Path) -> BinaryIO:
        if file not in self._handles:
            self._handles[file] = file.open("rb", buffering=0)
        return self._handles[file]

    # -- identity ---------------------------------------------------------------------------------------------------

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """What manifest.json records, as it stands; None where there is none (``manifest.read_manifest`` checks it)."""
        path = self.path / MANIFEST_FILE
        return read_json(path) if path.is_file() else None

    @cached_property
    def base_hash(self) -> str:
        """What the weights are: ``tensors_hash``, from the hashes that the manifest recorded if there is one.

        Two quantisations of one model with the same result have the same hash. That the files hold what the manifest
        says is ``manifest.verify_manifest``'s to check.
        """
        if self.manifest is None:
            return self.tensors_hash()
        recorded = self.manifest.get("tensors", {})
        return _digest({name: str(entry["sha256"]) for name, entry in recorded.items()})

    def tensors_hash(self) -> str:
        """SHA-256 over the sorted (name, SHA-256 of dtype, shape and bytes) of all tensors; reads them all."""
        return _digest({name: self.tensor_hash(name) for name in self.names()})

    def tensor_hash(self, name: str, tensor: Tensor | None = None) -> str:
        """SHA-256 of one tensor, remembered. Whoever holds the tensor already passes it to save a second reading."""
        if name not in self._sha256:
            self._sha256[name] = tensor_sha256(self.read(name) if tensor is None else tensor)
        return self._sha256[name]

    def remember_hashes(self, hashes: Mapping[str, str]) -> None:
        """Take hashes of tensors that another process computed from the same files."""
        self._sha256 |= hashes

    @cached_property
    def tokenizer_hash(self) -> str:
        """SHA-256 over the tokenizer's files."""
        return tokenizer_files.tokenizer_hash(self.path)

    @cached_property
    def chat_template_hash(self) -> str | None:
        """SHA-256 of the chat template's text; None when the folder has none."""
        return tokenizer_files.chat_template_hash(self.path)

    def check_tokenizer(self) -> None:
        """Refuse a tokenizer that does not belong to these weights.

        Raises:
            CheckpointError: the files differ from what the manifest recorded, or tokenizer.json has token ids that
                the model's vocabulary lacks.
        """
        recorded = self.manifest or {}
        tokenizer, template = recorded.get("tokenizer_sha256"), recorded.get("chat_template_sha256")
        if tokenizer is not None and tokenizer != self.tokenizer_hash:
            rule = f"differs from the tokenizer that {MANIFEST_FILE} recorded ({tokenizer[:12]})"
            remedy = "Copy the tokenizer files of the source model"
            raise CheckpointError(f"{self.path}: tokenizer", self.tokenizer_hash[:12], rule, remedy)
        if template is not None and template != self.chat_template_hash:
            rule = f"differs from the template that {MANIFEST_FILE} recorded ({template[:12]})"
            found = self.chat_template_hash
            remedy = "Copy the chat template of the source model"
            raise CheckpointError(f"{self.path}: chat template", found and found[:12], rule, remedy)
        tokenizer_files.check_vocabulary(self.path, self.config)

    def _check_quantization(self) -> None:
        """Refuse weights whose meaning this project does not know; reading them as something else would be silent."""
        declared = self.config.get("quantization_config")
        hf_quant = self.path / "hf_quant_config.json"
        where = f"{self.path}: quantization_config"
        if declared is None and hf_quant.is_file():
            where = str(hf_quant)
            declared = {"quant_method": "modelopt", **read_json(hf_quant).get("quantization", {})}
        if declared is not None and not self._known(declared):
            named = declared.get("quant_algo") or declared.get("format") or declared.get("quant_method")
            rule = f"must be ModelOpt {' or '.join(MODELOPT_ALGORITHMS)}, or compressed-tensors NVFP4"
            raise CheckpointError(where, named, rule, "Quantise the original model with this project")
        if declared is not None and not self.quantized:
            rule = "says NVFP4, but no tensor is packed"
            raise CheckpointError(where, "no packed weight", rule, "Use complete files")
        scaled = next((name for name in self._specs if name.endswith("pre_quant_scale")), None)
        if scaled is not None:
            rule = "activation scales must be folded into the weights"
            raise CheckpointError(f"{self.path}: {scaled}", "present", rule, "Quantise the original model again")
        for module in self.nvfp4_modules:
            for suffix in self._tensors(module):
                self.spec(f"{module}.{suffix}")

    @staticmethod
    def _known(declared: dict[str, Any]) -> bool:
        if declared.get("quant_method") == "compressed-tensors":
            return declared.get("format") == COMPRESSED_TENSORS_FORMAT
        return declared.get("quant_method") == "modelopt" and declared.get("quant_algo") in MODELOPT_ALGORITHMS


def _digest(hashes: dict[str, str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(hashes):
        digest.update(f"{name} {hashes[name]}\n".encode())
    return digest.hexdigest()


def _shards(path: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a folder and, where an index lists them, the tensors wanted from each."""
    index = path / INDEX_FILE
    if index.is_file():
        wanted: dict[Path, set[str] | None] = {}
        for name, file in read_json(index).get("weight_map", {}).items():
            names = wanted.setdefault(path / file, set())
            assert names is not None
            names.add(name)
        for file in wanted:
            if not file.is_file():
                raise CheckpointError(str(file), "missing", f"{INDEX_FILE} names it", "Copy the missing file")
        return wanted
    if (path / SINGLE_FILE).is_file():
        return {path / SINGLE_FILE: None}
    rule = f"needs {SINGLE_FILE} or {INDEX_FILE}"
    raise CheckpointError(str(path), "no weights", rule, "Use a folder with safetensors weights")
