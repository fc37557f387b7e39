"""Arguments of the sub-commands that read a configuration: the file, overlays and overrides."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_qerl.config.schema import Section

OVERRIDE_FORM = re.compile(r"[A-Za-z_]\w*(\.\w+)+=", re.ASCII)


def add_config_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add CONFIG, bare ``section.key=value`` words, ``--set``, ``--overlay`` and ``--dry-run``."""
    parser.add_argument(
        "config", nargs=None if required else "?", metavar="CONFIG", help="YAML file, for example configs/demo.yaml"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="change a key of the config; the value is YAML: 1e-5, null, true, [a, b]",
    )
    parser.add_argument(
        "--set",
        dest="set_overrides",
        action="append",
        default=[],
        metavar="section.key=value",
        help="the same as an option; may be repeated, and is applied after the bare ones",
    )
    parser.add_argument(
        "--overlay",
        dest="overlays",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file whose keys are merged over the config; may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, do nothing")


def adopt_overrides(parser: argparse.ArgumentParser, args: argparse.Namespace, rest: list[str]) -> None:
    """Take overrides that came after an option, which argparse hands back as unknown; refuse other words.

    argparse fills a repeated positional in one go, so in ``train CONFIG --resume train.steps=5`` it sees none.
    """
    takes_overrides = hasattr(args, "overrides")
    unknown = [word for word in rest if not (takes_overrides and OVERRIDE_FORM.match(word))]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_overrides:
        args.overrides = [*args.overrides, *rest]


def config_from_args[M: Section](args: argparse.Namespace, model: type[M]) -> M:
    """Load the config that ``add_config_arguments``'s arguments describe.

    Raises:
        ConfigError: see ``megatron_qerl.config.loader.load_config``.
    """
    from megatron_qerl.config.loader import load_config

    return load_config(args.config, args.overlays, [*args.overrides, *args.set_overrides], model)
