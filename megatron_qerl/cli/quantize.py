"""``megatron-qerl quantize``: from a Hugging Face folder to an NVFP4 folder, and the proof that it is one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_qerl.cli.common import PROGRAM
from megatron_qerl.cli.config_args import OVERRIDE_FORM, add_config_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_qerl.config.schema import QuantizeConfig
    from megatron_qerl.nvfp4.format import PackedWeight

_DESCRIPTION = """\
Turn a Hugging Face model folder into a ModelOpt NVFP4 checkpoint: 4-bit weights, one scale for each 16 of them.

Name the folders with --model and --output, or put them into a YAML file and name that.
"""

_EPILOG = """\
examples:
  megatron-qerl quantize --model models/my-model --output models/my-model-nvfp4
  megatron-qerl quantize --model SRC --output DST --calibration awq --dataset text.jsonl --sequences 256 --verify
  megatron-qerl quantize configs/quantize_demo.yaml
  megatron-qerl quantize --verify-only models/my-model-nvfp4 --source models/my-model
"""

# Option -> config key; each is an override of that key.
_OPTIONS = {
    "model": "source",
    "output": "output",
    "calibration": "calibration.method",
    "sequences": "calibration.sequences",
    "sequence_length": "calibration.sequence_length",
    "dataset": "calibration.dataset",
    "device": "device",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``quantize``."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add_config_arguments(parser, required=False)
    parser.add_argument("--model", metavar="SRC", help="Hugging Face folder to quantise (config key source)")
    parser.add_argument("--output", metavar="DST", help="folder to write (config key output)")
    parser.add_argument("--calibration", choices=("max", "awq"), help="max needs no data; awq weighs by activations")
    parser.add_argument("--sequences", type=int, metavar="N", help="awq: number of calibration sequences")
    parser.add_argument("--sequence-length", type=int, metavar="L", help="awq: tokens of each")
    parser.add_argument("--dataset", metavar="FILE", help="awq: JSONL with a text field; without it built-in text")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where to calibrate")
    parser.add_argument("--verify", action="store_true", help="afterwards verify what was written against the source")
    parser.add_argument("--verify-only", type=Path, metavar="DIR", help="only verify this NVFP4 folder")
    parser.add_argument("--source", type=Path, metavar="SRC", help="with --verify-only: what DIR was made from")


def run(args: argparse.Namespace) -> int:
    """Quantise, verify, or both."""
    from megatron_qerl.config.loader import resolved_yaml
    from megatron_qerl.errors import UserError

    if args.verify_only is not None:
        given = [name for name in (*_OPTIONS, "verify") if getattr(args, name)]
        if args.config is not None or given:
            named = args.config or ", ".join(f"--{name.replace('_', '-')}" for name in given)
            rule = "cannot be combined with --verify-only, which quantises nothing"
            raise UserError("quantize", named, rule, "Use --verify-only DIR with --source SRC alone")
        if args.dry_run:
            against = f" against {args.source}" if args.source is not None else ""
            print(f"# plan\n# verify {args.verify_only}{against}")
            return 0
        return _verify(args.verify_only, args.source)
    if args.source is not None:
        raise UserError("--source", args.source, "belongs to --verify-only", "Name the model to quantise with --model")

    config = _config(args)
    if args.dry_run:
        print(resolved_yaml(config), end="")
        print("\n".join(f"# {line}" for line in _plan(config, verify=args.verify)))
        return 0

    from megatron_qerl.nvfp4.quantize import quantize

    written = quantize(config, progress=_show_progress)
    print(f"NVFP4 checkpoint: {written}")
    return _verify(written, config.source) if args.verify else 0


def _config(args: argparse.Namespace) -> QuantizeConfig:
    """The config from a file, from options, or from a file with options over it."""
    from megatron_qerl.config.loader import load_config
    from megatron_qerl.config.schema import QuantizeConfig
    from megatron_qerl.errors import ConfigError

    if args.config is not None and OVERRIDE_FORM.match(args.config):
        # In `quantize --model SRC calibration.seed=2` there is no file, and the override comes first.
        args.overrides, args.config = [args.config, *args.overrides], None
    options = {key: getattr(args, name) for name, key in _OPTIONS.items() if getattr(args, name) is not None}
    if args.config is None and not args.overlays and not {"source", "output"} <= options.keys():
        absent = "--model" if "source" not in options else "--output"
        remedy = f"Give --model SRC and --output DST, or a YAML file; see {PROGRAM} quantize --help"
        raise ConfigError(absent, "missing", "must be given when there is no config file", remedy)
    overrides = [*args.overrides, *args.set_overrides]
    return load_config(args.config, args.overlays, overrides, QuantizeConfig, options=options)


def _plan(config: QuantizeConfig, *, verify: bool) -> Iterator[str]:
    """What ``quantize`` would do, one fact a line; reads the disk, changes nothing."""
    yield "plan"
    here = "found" if (config.source / "config.json").is_file() else "NOT FOUND here"
    yield f"read: {config.source} ({here})"
    calibration = config.calibration
    if calibration.method == "awq":
        text = calibration.dataset if calibration.dataset is not None else "the built-in text"
        yield f"calibrate: awq on {calibration.sequences} x {calibration.sequence_length} tokens of {text}"
    else:
        yield "calibrate: max, from the weights alone"
    fate = "has content already" if config.output.is_dir() and any(config.output.iterdir()) else "new"
    yield f"write: {config.output} ({fate})"
    if verify:
        yield f"verify: {config.output} against {config.source}"


def _verify(folder: Path, source: Path | None) -> int:
    from megatron_qerl.nvfp4.verify import verify

    report = verify(folder, source, _packed_matmul, progress=_show_progress)
    print(report.render())
    return 0 if report.ok else 1


def _packed_matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [M, K] times a packed weight [N, K], transposed, as the trainer's layers compute it."""
    from megatron_qerl.layers.kernels import NVFP4Weight, nvfp4_linear

    return nvfp4_linear(x, NVFP4Weight(weight.packed, weight.block_scale, float(weight.tensor_scale)))


def _show_progress(stage: str, done: int, total: int) -> None:
    """One line that counts up on a terminal; in a log only a stage's last count."""
    if sys.stderr.isatty():
        print(f"\r\033[K{stage}: {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total:
        print(f"{stage}: {done}/{total}", file=sys.stderr, flush=True)
