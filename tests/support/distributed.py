"""Run one function in several processes, over gloo unless they are given GPUs.

Importing Megatron takes seconds, so one launch does many cases.

The function gets ``(rank, world_size, arguments)`` after the launcher's environment is set, starts and leaves its own
process groups, and returns something ``torch.save`` can hold.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch(
    world_size: int, target: str, arguments: Any, folder: Path, timeout_s: float = 300.0, *, gpus: bool = False
) -> list[Any]:
    """Results of all ranks, by rank.

    Args:
        target: ``package.module:function``.
        arguments: anything ``torch.save`` can hold.
        folder: where arguments, results and logs are kept.
        timeout_s: all processes are killed after it.
        gpus: leave the GPUs visible, one for each rank.

    Raises:
        AssertionError: a rank failed or the time ran out; the message has the end of each log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(arguments, folder / "arguments.pt")
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    processes = []
    for rank, log in enumerate(logs):
        environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "tests.support.distributed", target, str(folder)]
        with log.open("w") as out:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out))
    deadline = time.monotonic() + timeout_s
    try:
        while any(p.poll() is None for p in processes):
            if any(p.poll() for p in processes) or time.monotonic() > deadline:
                break  # the others would wait for the dead one until gloo gives up
            time.sleep(0.05)
    finally:
        late = [rank for rank, p in enumerate(processes) if p.poll() is None]
        for p in processes:
            p.kill()
            p.wait()
    codes = [p.returncode for p in processes]
    if any(codes):
        ends = "\n".join(f"--- rank {r} (exit {codes[r]})\n{logs[r].read_text()[-3000:]}" for r in range(world_size))
        raise AssertionError(f"{target}: ranks {late} were stopped, exit codes {codes}\n{ends}")
    return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(world_size)]


def main() -> None:
    """Body of one rank: ``python -m tests.support.distributed module:function folder``."""
    target, folder = sys.argv[1], Path(sys.argv[2])
    module, _, name = target.partition(":")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    result = getattr(importlib.import_module(module), name)(rank, world_size, arguments)
    torch.save(result, folder / f"result{rank}.pt")


if __name__ == "__main__":
    main()
