"""manifest.json: what a quantised checkpoint is, where it came from and how to tell that it is still the same.

It holds the SHA-256 of every tensor (over dtype, shape and bytes), so a trainer and an engine can prove that they
loaded one and the same matrix, and the hash of the manifest itself names the frozen base in every recorded rollout.
Beside that it keeps what a later reader asks: the source model, the tokenizer, the calibration data, the versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_qerl.errors import CheckpointError
from megatron_qerl.nvfp4.checkpoint import MANIFEST_FILE, ModelFolder
from megatron_qerl.nvfp4.tensor_files import DTYPES, file_sha256

FORMAT = "megatron-qerl nvfp4"
FORMAT_VERSION = 1
_PACKAGES = ("torch", "transformers", "nvidia-modelopt", "megatron-qerl")


@dataclass(frozen=True)
class CalibrationRecord:
    """The activations that AWQ weighed errors with.

    Attributes:
        dataset: file name, or "built-in".
        sequences, sequence_length: size of the calibration set; every sequence has exactly that many tokens.
        seed: seed of the built-in text, and of the sketch that stands in for the activations.
        tokens_sha256: SHA-256 of the token ids as little-endian int32, sequence after sequence.
    """

    dataset: str
    sequences: int
    sequence_length: int
    seed: int
    tokens_sha256: str


def source_record(source: ModelFolder) -> dict[str, Any]:
    """What the source model is. Its tensors are hashed here unless that happened while they were read."""
    return {
        "name": source.path.resolve().name,
        "config_sha256": file_sha256(source.path / "config.json"),
        "tensors_sha256": source.tensors_hash(),
    }


def write_manifest(
    folder: Path,
    *,
    source: ModelFolder,
    tensors: Mapping[str, dict[str, Any]],
    method: str,
    calibration: CalibrationRecord | None,
    folding: Mapping[str, Any] | None,
) -> Path:
    """Write manifest.json into a folder whose other files are all there.

    Args:
        folder: the quantised folder.
        source: the model that was quantised.
        tensors: name -> dtype, shape and sha256 of every tensor in ``folder``.
        method: calibration method, "max" or "awq".
        calibration: the calibration data; None when the weights alone decided.
        folding: what AWQ folded into norms and linears; None without AWQ.
    """
    written = ModelFolder.open(folder)
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "source": source_record(source),
        "tokenizer_sha256": written.tokenizer_hash,
        "chat_template_sha256": written.chat_template_hash,
        "versions": {package: _version(package) for package in _PACKAGES},
        "quantization": {
            "algorithm": "W4A16_NVFP4",
            "method": method,
            "tensor_scale": "power of two, shared in fused groups",
            "smallest_block_scale": "2^-6",
        },
        "calibration": asdict(calibration) if calibration is not None else None,
        "folding": folding,
        "tensors": dict(sorted(tensors.items())),
    }
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return path


def tensor_record(folder: ModelFolder, name: str, sha256: str) -> dict[str, Any]:
    """One tensor's entry of the manifest."""
    spec = folder.spec(name)
    written = next(key for key, dtype in DTYPES.items() if dtype == spec.dtype)
    return {"dtype": written, "shape": list(spec.shape), "sha256": sha256}


def read_manifest(folder: ModelFolder) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        CheckpointError: it is missing, or not one that this version reads.
    """
    manifest, path = folder.manifest, folder.path / MANIFEST_FILE
    if manifest is None:
        raise CheckpointError(str(path), "missing", "a quantised folder must have it", "Copy the folder again")
    found = (manifest.get("format"), manifest.get("format_version"))
    if found != (FORMAT, FORMAT_VERSION):
        rule = f"must be {(FORMAT, FORMAT_VERSION)}"
        raise CheckpointError(f"{path}: format", found, rule, "Quantise the source model again")
    return manifest


def manifest_problems(folder: ModelFolder, *, progress: Callable[[int, int], None] | None = None) -> tuple[str, ...]:
    """Everything in which a folder differs from its manifest, one line each; empty when nothing does.

    Reads every tensor. The tokenizer and the chat template are compared too.
    """
    manifest = read_manifest(folder)
    recorded, present = manifest["tensors"], set(folder.names())
    problems = [f"{name}: recorded, but missing from the files" for name in sorted(recorded.keys() - present)]
    problems += [f"{name}: in the files, but not recorded" for name in sorted(present - recorded.keys())]
    common = sorted(present & recorded.keys())
    for count, name in enumerate(common, start=1):
        if folder.tensor_hash(name) != recorded[name]["sha256"]:
            problems.append(
                f"{name}: SHA-256 {folder.tensor_hash(name)[:12]}, recorded {recorded[name]['sha256'][:12]}"
            )
        if progress is not None:
            progress(count, len(common))
    if folder.tokenizer_hash != manifest["tokenizer_sha256"]:
        problems.append("tokenizer files differ from the recorded ones")
    if folder.chat_template_hash != manifest["chat_template_sha256"]:
        problems.append("the chat template differs from the recorded one")
    return tuple(problems)


def verify_manifest(folder: ModelFolder) -> None:
    """Recompute every hash of a checkpoint.

    Raises:
        CheckpointError: names the first difference and counts the rest.
    """
    problems = manifest_problems(folder)
    if problems:
        rule = "the files are not those that were quantised"
        remedy = "Copy the folder again, or quantise the source model again"
        raise CheckpointError(str(folder.path), f"{problems[0]} ({len(problems)} in all)", rule, remedy)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
