"""``megatron-qerl export``: a run's adapter in PEFT format, for inference engines and Hugging Face."""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
Write the adapter of a run's checkpoint as a PEFT folder (adapter_config.json, adapter_model.safetensors).

Such a folder loads with peft.PeftModel.from_pretrained and into engines that serve LoRA adapters.
"""

_EPILOG = """\
examples:
  megatron-qerl export --run runs/demo --output adapters/demo
  megatron-qerl export --run runs/demo --output adapters/demo-20 --checkpoint 20
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--run", required=True, type=Path, metavar="RUN_DIR", help="folder that train wrote")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to write; must not exist yet")
    parser.add_argument("--checkpoint", default="latest", help="latest, or the step of a saved checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print the run's config and the plan, do nothing")


def run(args: argparse.Namespace) -> int:
    """Check the run and the output folder, export."""
    from megatron_qerl.config.loader import load_resolved_config, resolved_yaml
    from megatron_qerl.errors import UserError

    config = load_resolved_config(args.run)
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        raise UserError("--output", args.output, "already has content", "Name a folder that does not exist yet")
    if args.dry_run:
        print(resolved_yaml(config), end="")
        print(f"# plan\n# run folder: {args.run}, checkpoint {args.checkpoint}")
        print(f"# adapter: rank {config.lora.rank}, alpha {config.lora.alpha:g}, on {', '.join(config.lora.targets)}")
        print(f"# output: {args.output}")
        return 0

    from megatron_qerl.export import export_adapter

    written = export_adapter(args.run, args.output, args.checkpoint)
    print(f"adapter: {written}")
    return 0
