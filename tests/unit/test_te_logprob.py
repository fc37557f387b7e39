"""Chunked log-probabilities: memory, tensor parallelism, padding; and the Triton kernels under the interpreter."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from te_extensions import logprob
from te_extensions.logprob import HeadShard, default_chunk_rows, linear_logprob
from tests.unit.te_interpreter import run_cases


def test_triton_kernels_under_the_interpreter() -> None:
    run_cases("te_logprob_cases.py")


class LiveBytes(TorchDispatchMode):
    """The most bytes that were alive at once among the storages that operators made."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in inputs:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result


def test_few_chunks_of_logits_are_alive_at_once() -> None:
    """Forward: the logits and, on a CPU, their exponentials. Backward: the logits, which become their gradient."""
    rows, vocab, chunk = 256, 4000, 16
    generator = torch.Generator().manual_seed(0)
    head = HeadShard(torch.randn(vocab, 8, generator=generator), 0, vocab - 40, None)
    hidden = torch.randn(rows, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocab - 40, (rows,), generator=generator)
    with LiveBytes() as forward:
        loss = linear_logprob(hidden, targets, head, chunk_rows=chunk)[0].sum()
    with LiveBytes() as backward:
        loss.backward()
    chunk_bytes = 4 * chunk * vocab
    assert 2 * chunk_bytes < forward.peak_bytes < 2.2 * chunk_bytes
    assert chunk_bytes < backward.peak_bytes < 1.2 * chunk_bytes


@pytest.mark.parametrize("rows", [1, 300, 2048, 16384, 65536])
@pytest.mark.parametrize("columns", [50, 19008, 152064])
def test_the_default_chunk_keeps_its_promise(rows: int, columns: int) -> None:
    chunk = default_chunk_rows(rows, columns)
    assert 1 <= chunk <= rows
    # Six bytes a logit in backward: FP32 logits and their BF16 gradient.
    small = 6 * chunk * columns <= 1.5 * logprob._SMALL_CHUNK_BYTES
    assert small or 6 * chunk * columns <= 4 * rows * columns / 20
    # ... and is not so small that the products become slow.
    assert chunk == rows or 4 * chunk * columns >= 2**27 or chunk == logprob._LARGEST_CHUNK_ROWS


def test_chunk_rows_must_be_positive() -> None:
    head = HeadShard(torch.randn(5, 4), 0, 5, None)
    with pytest.raises(ValueError, match="chunk_rows = 0"):
        linear_logprob(torch.randn(2, 4), torch.tensor([0, 1]), head, chunk_rows=0)


class Ranks:
    """Stands in for the all-reduce of a tensor-parallel group whose ranks are threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: dict[int, Tensor] = {}

    def all_reduce(self, value: Tensor, head: HeadShard, op: Any = dist.ReduceOp.SUM) -> Tensor:
        self.values[head.vocab_start] = value
        self.barrier.wait(timeout=60)
        stacked = torch.stack([self.values[key] for key in sorted(self.values)])
        result = stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0)
        self.barrier.wait(timeout=60)
        return value.copy_(result)


# The third split leaves a rank with padding alone.
@pytest.mark.parametrize(("vocab", "shard"), [(60, 20), (53, 20), (40, 20)])
def test_three_ranks_agree_with_one(vocab: int, shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(3 * shard, 16, generator=generator)
    hidden = torch.randn(11, 16, generator=generator)
    targets = torch.randint(0, vocab, (11,), generator=generator)
    upstream = torch.randn(11, generator=generator)

    def run(head: HeadShard) -> tuple[Tensor, Tensor, Tensor]:
        leaf = hidden.clone().requires_grad_(True)
        logprobs, entropy = linear_logprob(leaf, targets, head, temperature=0.8, chunk_rows=4)
        (logprobs * upstream).sum().backward()
        assert leaf.grad is not None
        return logprobs.detach(), entropy, leaf.grad

    whole = run(HeadShard(weight, 0, vocab, None))
    monkeypatch.setattr(logprob, "_all_reduce", Ranks(3).all_reduce)
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def rank(index: int) -> None:
        part = weight[index * shard : (index + 1) * shard]
        found[index] = run(HeadShard(part, index * shard, vocab, None))

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2]
    for result in found.values():
        for a, b in zip(result, whole, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def test_garbage_in_the_padding_of_the_head_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(50, 16, generator=generator)
    hidden = torch.randn(9, 16, generator=generator)
    targets = torch.randint(0, 50, (9,), generator=generator)
    results = []
    for value in (0.0, 3e38):
        leaf = hidden.clone().requires_grad_(True)
        padded = HeadShard(torch.cat((weight, torch.full((6, 16), value))), 0, 50, None)
        logprobs, entropy = linear_logprob(leaf, targets, padded)
        logprobs.sum().backward()
        results.append((logprobs.detach(), entropy, leaf.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
