"""What the ranks find out together: whether collectives are right and fast, and whether the model's files are.

``python -m megatron_qerl.launching.preflight.ranks CONFIG CLUSTER`` is one rank; its last line is JSON. Values are
small whole numbers, so that sums are exact in float32 and a wrong element is wrong, not rounded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_qerl.config.cluster import ClusterConfig
from megatron_qerl.config.loader import load_config
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.errors import QerlError
from megatron_qerl.launching.preflight.findings import MARKER, RankFindings
from megatron_qerl.models.shape import read_shape
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.parallel.setup import resolve_device
from megatron_qerl.planning.ledger import peak_bytes

_PATTERN = 251  # a prime, so that shifted or swapped blocks do not look alike
_REPEATS = 3
_SECOND_LOOKS = 4


def pattern(rank: int, count: int, device: torch.device) -> torch.Tensor:
    """What a rank sends: [count] small whole numbers that tell ranks and places apart."""
    return (torch.arange(count, device=device) * (rank + 1) % _PATTERN).float()


def check_collectives(found: RankFindings, cluster: ClusterConfig, device: torch.device) -> None:
    """Gather everyone's pattern and name whose is wrong, then sum and time sums, of all and of this node's ranks."""
    rank, world, local = dist.get_rank(), dist.get_world_size(), cluster.ranks_per_node
    small = 1 << 12
    everyone = [torch.empty(small, device=device) for _ in range(world)]
    dist.all_gather(everyone, pattern(rank, small, device))
    found.wrong_from = [r for r in range(world) if not torch.equal(everyone[r], pattern(r, small, device))]
    count = (cluster.preflight.message_mib << 20) // 4
    nodes = [dist.new_group(list(range(first, first + local))) for first in range(0, world, local)]
    found.bandwidth_gb_per_s, found.wrong_sums = _timed_sum(list(range(world)), count, device, None)
    own = list(range(rank // local * local, rank // local * local + local))
    found.node_bandwidth_gb_per_s, wrong = _timed_sum(own, count, device, nodes[rank // local])
    found.wrong_sums = found.wrong_sums or wrong


def _timed_sum(ranks: list[int], count: int, device: torch.device, group: Any) -> tuple[float, bool]:
    """Bus bandwidth of the best repeat, 2 (n - 1) / n of a byte each, as in nccl-tests, and if a sum was wrong."""
    if len(ranks) == 1:
        return 0.0, False
    expected = sum(pattern(r, count, device) for r in ranks)
    best, wrong = float("inf"), False
    for _ in range(_REPEATS):
        value = pattern(dist.get_rank(), count, device)
        dist.barrier(group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.monotonic()
        dist.all_reduce(value, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.monotonic() - began)
        wrong = wrong or not torch.equal(value, torch.as_tensor(expected))
    return 2 * (len(ranks) - 1) / len(ranks) * count * 4 / best / 1e9, wrong


def check_model(found: RankFindings, config: RunConfig) -> None:
    """Hash a share of the base's tensors and look again, on every node, at those that are not the manifest's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder, wrong = None, []
    try:
        folder = ModelFolder.open(config.model.path)
        folder.check_tokenizer()
        wrong = wrong_tensors(folder, folder.names()[rank::world])
        found.bytes_hashed = folder.bytes_read
    except (QerlError, OSError) as error:
        found.error = str(error)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, wrong)
    suspects = sorted({name for names in everyone for name in names})[:_SECOND_LOOKS]
    if folder is not None and suspects:
        try:
            found.wrong_tensors = wrong_tensors(ModelFolder.open(config.model.path), tuple(suspects))
        except (QerlError, OSError) as error:
            found.error = str(error)


def wrong_tensors(folder: ModelFolder, names: tuple[str, ...]) -> list[str]:
    """Those whose hash is not the manifest's; without a manifest they are only read."""
    hashes = {name: folder.tensor_hash(name) for name in names}
    if folder.manifest is None:
        return []
    recorded = folder.manifest["tensors"]
    return [name for name, value in hashes.items() if recorded.get(name, {}).get("sha256") != value]


def plan_memory(found: RankFindings, config: RunConfig) -> None:
    """What ``megatron-qerl plan`` counts for this many ranks."""
    try:
        folder = ModelFolder.open(config.model.path)
        shape = read_shape(folder.config, folder.path)
        found.peak_bytes = peak_bytes(config, shape, gpus=dist.get_world_size(), packed=folder.quantized)
    except (QerlError, OSError) as error:
        found.plan_error = str(error)


def main() -> int:
    """Body of one rank."""
    config: RunConfig = load_config(sys.argv[1])
    cluster = load_config(sys.argv[2], model=ClusterConfig)
    found = RankFindings(int(os.environ["RANK"]))
    try:
        device = resolve_device(config.model.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        elif cluster.gpus_per_node and config.model.device != "cpu":
            found.error = "torch sees no GPU here"
        torch.set_num_threads(1)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=cluster.preflight.time_limit_s))
        check_collectives(found, cluster, device)
        check_model(found, config)
        if found.rank == 0:
            plan_memory(found, config)
        dist.destroy_process_group()
    except (QerlError, RuntimeError, OSError) as error:
        found.error = f"{type(error).__name__}: {error}"
    print(f"\n{MARKER}{json.dumps(asdict(found))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
