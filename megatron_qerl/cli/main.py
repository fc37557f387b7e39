"""Entry point: pick the sub-command, run it, turn what goes wrong into one line and an exit code.

Only the named sub-command's file is imported, and those files import torch and the like inside ``run``, so that
``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from megatron_qerl.cli.common import PROGRAM, Formatter, Parser, quiet_megatron, say_error
from megatron_qerl.cli.config_args import adopt_overrides
from megatron_qerl.errors import QerlError

COMMANDS = {
    "doctor": ("megatron_qerl.cli.doctor", "say what this machine can run, and what is missing"),
    "quantize": ("megatron_qerl.cli.quantize", "turn a Hugging Face model into an NVFP4 checkpoint, or verify one"),
    "train": ("megatron_qerl.cli.train", "train an adapter with reinforcement learning"),
    "experiment": ("megatron_qerl.cli.experiment", "compare arms over several seeds at equal generated tokens"),
    "eval": ("megatron_qerl.cli.evaluate", "measure a trained policy on held-out problems"),
    "diagnose": ("megatron_qerl.cli.diagnose", "measure what the noise did to a run's policy"),
    "export": ("megatron_qerl.cli.export", "write a run's adapter in PEFT format"),
    "plan": ("megatron_qerl.cli.plan", "count the memory of a run on each GPU, before it is started"),
    "launch": ("megatron_qerl.cli.launch", "start a run on a Slurm cluster or on plain hosts"),
    "report": ("megatron_qerl.cli.report", "write a run's report as one HTML file"),
}

EXIT_BUG = 1
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141

_EPILOG = """\
example, from a Hugging Face folder to a trained adapter:
  megatron-qerl quantize --model models/my-model --output models/my-model-nvfp4
  megatron-qerl train configs/demo.yaml model.path=models/my-model-nvfp4 run.name=first
  megatron-qerl eval --run runs/first
  megatron-qerl export --run runs/first --output adapters/first

Every sub-command has its own --help and a --dry-run that shows what would happen.
"""


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"{PROGRAM} {importlib.metadata.version(PROGRAM)}")
        parser.exit()


def build_parser(command: str | None) -> tuple[Parser, ModuleType | None]:
    """The parser for all sub-commands; only ``command``'s own arguments are filled in."""
    parser = Parser(
        prog=PROGRAM,
        description="Reinforcement learning of a LoRA adapter on a frozen NVFP4 base, with recorded noise (QeRL).",
        epilog=_EPILOG,
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="command", title="commands")
    module = None
    for name, (module_name, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", formatter_class=Formatter
        )
        if name == command:
            module = importlib.import_module(module_name)
            module.add_arguments(subparser)
    return parser, module


def _run_command(argv: Sequence[str]) -> int:
    command = next((word for word in argv if not word.startswith("-")), None)
    parser, module = build_parser(command)
    args, rest = parser.parse_known_args(argv)
    if module is None:
        parser.print_help()
        return 0 if not argv else 2
    adopt_overrides(parser, args, rest)
    quiet_megatron()
    return int(module.run(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the program's name; None takes them from the command line.

    Returns:
        0 on success; 2 when the user can mend it; 1 when something failed underneath; 75 when a run stopped on request
        and can be resumed; 130 when interrupted.
    """
    try:
        code = _run_command(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except QerlError as error:
        say_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say_error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Point stdout elsewhere, or Python complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
    except Exception:
        # The outermost frame: whatever arrives here was not foreseen, so show all of it.
        traceback.print_exc()
        say_error("this is a bug in megatron-qerl, not in what you asked for; please report it with the lines above")
        return EXIT_BUG


if __name__ == "__main__":
    sys.exit(main())
