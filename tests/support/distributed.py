"""Run one function in several processes, over gloo unless they are given GPUs.

Importing Megatron takes seconds a process, so a nursery imports once and forks the ranks of every launch: it never
starts a thread or a device itself, which is what makes forking it safe. It ends with the process that started it.

The function gets ``(rank, world_size, arguments)`` after the launcher's environment is set, starts and leaves its own
process groups, and returns something ``torch.save`` can hold.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
#: What the ranks need in any case.
PRELOADED = ("megatron_qerl.cli.main", "megatron_qerl.controller", "megatron_qerl.models.build", "tests.support.loaded")


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
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    order = {"world_size": world_size, "target": target, "folder": str(folder), "port": _free_port()}
    nursery = _nursery(gpus)
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write(json.dumps(order | {"timeout_s": timeout_s}) + "\n")
    nursery.stdin.flush()
    answer = nursery.stdout.readline()
    assert answer, f"the nursery of {target} ended with {nursery.wait()}"
    codes, late = json.loads(answer)
    if any(codes):
        ends = "\n".join(f"--- rank {r} (exit {codes[r]})\n{logs[r].read_text()[-3000:]}" for r in range(world_size))
        raise AssertionError(f"{target}: ranks {late} were stopped, exit codes {codes}\n{ends}")
    return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(world_size)]


@cache
def _nursery(gpus: bool) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.support.distributed"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)


def _rank(order: dict[str, Any], rank: int) -> None:
    """Body of one forked rank."""
    folder, world_size = Path(order["folder"]), int(order["world_size"])
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= {"WORLD_SIZE": str(world_size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(order["port"])}
    torch.set_num_threads(1)
    module, _, name = order["target"].partition(":")
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    result = getattr(importlib.import_module(module), name)(rank, world_size, arguments)
    torch.save(result, folder / f"result{rank}.pt")


def _fork(order: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _rank(order, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not the nursery's way out, which belongs to whoever started it.
        os._exit(code)


def _run(order: dict[str, Any]) -> tuple[list[int], list[int]]:
    """(exit codes, ranks that had to be stopped)."""
    importlib.import_module(order["target"].partition(":")[0])
    pids = [_fork(order, rank) for rank in range(order["world_size"])]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + order["timeout_s"]
    # Once a rank has failed, the others would wait for it until gloo gives up.
    while len(codes) < len(pids) and not any(codes.values()) and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if rank not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(status[1])
        time.sleep(0.02)
    late = [rank for rank in range(len(pids)) if rank not in codes]
    for rank in late:
        os.kill(pids[rank], signal.SIGKILL)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
    return [codes[rank] for rank in range(len(pids))], late


def main() -> None:
    """The nursery: orders on stdin, answers on stdout, one line each; prints of what it imports go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in PRELOADED:
        importlib.import_module(module)
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
