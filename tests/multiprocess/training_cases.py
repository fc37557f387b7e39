"""What each rank does in ``test_training``: whole runs, and runs in which one rank fails."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_qerl import controller, session
from megatron_qerl.cli.main import main
from megatron_qerl.config.loader import load_config
from megatron_qerl.errors import QerlError
from megatron_qerl.rollout.engines.embedded import EmbeddedEngine

PLACES: dict[str, tuple[Any, str]] = {
    "generate": (EmbeddedEngine, "generate"),
    "vanish": (EmbeddedEngine, "generate"),
    "tokenizer": (session, "load_tokenizer"),
}


def run_cases(rank: int, world_size: int, arguments: dict[str, tuple[Path, list[str]]]) -> dict[str, int]:
    """Body of a rank: exit code of ``megatron-qerl train`` for each named run, one after the other."""
    return {name: main(["train", str(path), *words]) for name, (path, words) in arguments.items()}


def run_with_a_failure(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: a run in which one rank fails in the named place. Returns what this one said, and when."""
    began = time.monotonic()
    said = ""

    def fail(*_: Any, **__: Any) -> None:
        if arguments["error"] is None:
            # As if killed: nothing is said and nothing closed. The launcher wants a result.
            torch.save({"said": "", "seconds": 0.0}, arguments["folder"] / f"result{rank}.pt")
            os._exit(0)
        kind, words = arguments["error"]
        raise kind(*words)

    with pytest.MonkeyPatch.context() as patch:
        if rank == arguments["rank"]:
            patch.setattr(*PLACES[arguments["place"]], fail)
        try:
            controller.train(load_config(arguments["path"], overrides=arguments["overrides"]), resume=False)
        except (QerlError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
    return {"said": said, "seconds": time.monotonic() - began}
