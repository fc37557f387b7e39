"""``megatron-qerl plan``: how much memory a run takes on each GPU, before it is started."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_qerl.cli.config_args import add_config_arguments, config_from_args

if TYPE_CHECKING:
    from megatron_qerl.planning.ledger import Ledger

_DESCRIPTION = """\
Print the memory of a run by kind, for the worst rank of each pipeline stage, and whether it fits.

Needs the config and the model's config.json, no weights and no GPU. Sizes are GiB.
"""

_EPILOG = """\
examples:
  megatron-qerl plan configs/qwen2.5-32b-gsm8k.yaml --gpus 8 --memory-gib 80
  megatron-qerl plan configs/demo.yaml --model-config path/to/config.json train.recompute=full
"""
# Left to the CUDA context, NCCL and what torch's allocator cannot hand out again.
RESERVE_BYTES = 6 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add_config_arguments(parser)
    parser.add_argument(
        "--gpus", type=int, default=None, help="processes of the trainer; default: tensor x pipeline x context"
    )
    parser.add_argument(
        "--memory-gib", type=float, default=None, help="memory of one GPU; without it nothing is judged"
    )
    parser.add_argument(
        "--model-config", type=Path, default=None, metavar="FILE", help="instead of model.path/config.json"
    )
    parser.add_argument("--dense", action="store_true", help="count the base as unquantised whatever config.json says")


def _hf_config(path: Path) -> dict[str, Any]:
    from megatron_qerl.errors import UserError

    try:
        read: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError("--model-config", path, "is not there", "Name a config.json of the model") from None
    except (OSError, ValueError) as error:
        raise UserError(
            "--model-config", path, f"cannot be read ({error})", "Name a config.json of the model"
        ) from None
    return read


def run(args: argparse.Namespace) -> int:
    """Count, print, and return 0, or 2 where a limit is given and exceeded."""
    from megatron_qerl.config.loader import resolved_yaml
    from megatron_qerl.config.schema import RunConfig
    from megatron_qerl.errors import UserError
    from megatron_qerl.models.shape import read_shape
    from megatron_qerl.planning.ledger import ledgers, suggestions

    config = config_from_args(args, RunConfig)
    if args.dry_run:
        print(resolved_yaml(config), end="")
        return 0
    layout = config.parallel
    product = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
    gpus = product if args.gpus is None else args.gpus
    if gpus < 1 or gpus % product:
        raise UserError("--gpus", gpus, f"must be a multiple of tensor x pipeline x context = {product}", "Change one")
    path = args.model_config or config.model.path / "config.json"
    hf = _hf_config(path)
    shape = read_shape(hf, path.parent)
    packed = not args.dense
    counted = ledgers(config, shape, gpus=gpus, packed=packed)
    print(f"{'NVFP4' if packed else config.model.dtype} base, {gpus} GPUs, per GPU:")
    for ledger in counted:
        print("\n".join(_table(ledger)))
    peak = max(ledger.peak_bytes for ledger in counted)
    if args.memory_gib is None:
        print(f"peak {_gib(peak)}; --memory-gib says whether it fits")
        return 0
    limit = int(args.memory_gib * 2**30) - RESERVE_BYTES
    if peak <= limit:
        print(f"fits: peak {_gib(peak)}, {args.memory_gib:g} GiB less {_gib(RESERVE_BYTES)} for CUDA and NCCL")
        return 0
    print(
        f"does not fit: peak {_gib(peak)} is above {_gib(limit)} ({args.memory_gib:g} GiB less {_gib(RESERVE_BYTES)})"
    )
    ways = suggestions(config, shape, gpus=gpus, packed=packed, limit_bytes=limit)
    print("any one of these would make it fit:" if ways else "no single change of the usual keys makes it fit")
    print("\n".join(f"  {way}" for way in ways))
    return 2


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _table(ledger: Ledger) -> list[str]:
    lines = [f"pipeline stage {ledger.stage}"]
    lines += [f"  {e.kind:24s} {e.nbytes / 2**30:8.2f}  {e.phase:9s} {e.formula}" for e in ledger.entries]
    lines += [f"  {'= ' + phase:24s} {ledger.total(phase) / 2**30:8.2f}" for phase in ("training", "rollout")]
    return lines
