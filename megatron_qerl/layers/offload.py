"""Recomputation checkpoints that wait for backward in host memory.

Full recomputation keeps one hidden state a checkpointed layer, [S, B, H]: 1.6 GB for 8192 tokens of a 7B model, more
than anything else that grows with depth. They are not touched between a layer's forward and its backward, and a GPU
copies to pinned host memory while it computes. So each is copied out on a stream of its own as soon as it is saved, and
the one that backward wants next is fetched while the current layer is differentiated.

This is a ``saved_tensors_hooks``: whatever saves a tensor of the hidden state's shape inside ``active`` gets it parked.
Values come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_qerl.errors import FaultError


@dataclass
class _Parked:
    """One tensor in host memory.

    Attributes:
        queue: all tensors of the same forward, in the order in which they were saved.
        index: its place there.
        host: the copy; None once it was fetched.
        fetched: the tensor on its way back, or there.
        arrived: recorded behind the copy back.
    """

    queue: list[_Parked]
    index: int
    device: torch.device
    host: Tensor | None
    fetched: Tensor | None = None
    arrived: Any = None


class CheckpointOffload:
    """Parks hidden states of one model. One instance serves all its forwards, also several before a backward.

    Attributes:
        parked_bytes: bytes copied out by the last forward.
    """

    def __init__(self) -> None:
        self.parked_bytes = 0
        self._stream: Any = None

    @contextmanager
    def active(self, hidden: Tensor) -> Iterator[None]:
        """Within the block, saved tensors shaped like ``hidden`` go to host memory."""
        if hidden.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(hidden.device)
        queue: list[_Parked] = []
        shape, dtype = hidden.shape, hidden.dtype
        self.parked_bytes = 0

        def pack(tensor: Tensor) -> Tensor | _Parked:
            if tensor.shape != shape or tensor.dtype != dtype:
                return tensor
            return self._park(tensor, queue)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield

    def _park(self, tensor: Tensor, queue: list[_Parked]) -> _Parked:
        # Pinned memory comes from torch's cache, which hands a block out again once the copies that use it are done.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if tensor.is_cuda:
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self._stream):
                host.copy_(tensor, non_blocking=True)
            # Its memory must not be given to another tensor before the copy has read it.
            tensor.record_stream(self._stream)
        else:
            host.copy_(tensor)
        self.parked_bytes += host.numel() * host.element_size()
        parked = _Parked(queue, len(queue), tensor.device, host)
        queue.append(parked)
        return parked

    def _fetch(self, parked: _Parked) -> None:
        """Start the copy back."""
        host = parked.host
        assert host is not None, "fetched once"
        if parked.device.type == "cuda":
            # Allocated on the computing stream, where it will also be freed: the copy waits for what that memory held.
            fetched = torch.empty(host.shape, dtype=host.dtype, device=parked.device)
            self._stream.wait_stream(torch.cuda.current_stream(parked.device))
            with torch.cuda.stream(self._stream):
                fetched.copy_(host, non_blocking=True)
                parked.arrived = self._stream.record_event()
        else:
            fetched = host.clone()
        parked.fetched, parked.host = fetched, None

    def _unpack(self, saved: Tensor | _Parked) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.host is None and saved.fetched is None:
            raise FaultError(
                "activation offloading",
                "a checkpoint was asked for twice: only one backward can follow a forward",
                "do not use retain_graph, or set train.recompute: full",
            )
        if saved.fetched is None:
            self._fetch(saved)
        if saved.index > 0 and saved.queue[saved.index - 1].host is not None:
            self._fetch(saved.queue[saved.index - 1])
        if saved.arrived is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.arrived)
        fetched = saved.fetched
        assert fetched is not None, "fetched above"
        saved.fetched, saved.arrived = None, None
        return fetched
