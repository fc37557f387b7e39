"""The one buffer that a decoded weight lives in while it is multiplied.

Dequantise-then-multiply needs a BF16 W for as long as one GEMM runs. Every layer borrows the same buffer, one a device
and stream, which grows to the largest layer and is overwritten by the next: no BF16 copy of the base outlives a layer.

Order on a stream is what makes sharing safe: the next decode is queued behind the GEMM that reads this one. So each
stream has a buffer of its own, and a lock keeps another thread from queueing its decode between this thread's decode
and GEMM. While a CUDA graph is captured the buffer comes from the graph's pool instead: a replayed graph must not
write into memory that eager code owns, and eager code must not believe that a captured decode has happened.

A decoded weight may be used twice. When layers are recomputed in backward, the second forward of the last linear of the
recomputed stretch decodes W, and its input gradient, which comes next, wants the same W. (Those before it were
overwritten: there is one matrix. Recomputing layer by layer makes every linear a last one.) ``reuse=True``, asked for
by input gradients alone, takes W from the buffer if it is provably the same: same storages, alive, same addresses, same
version counters, same shape, dtype and scale. A write that bypasses the version counter (``tensor.data``, a raw
pointer) cannot be seen; whoever does that to a frozen weight between a forward and its backward calls
``forget_decoded``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def version_of(tensor: Tensor) -> int | None:
    """The tensor's write counter, or None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


class Fingerprint:
    """What must be unchanged for two looks at some tensors to have seen the same bytes.

    Addresses alone would not do: a freed weight's address is given to the next one. A weak reference to the storage is
    unique while it exists, and keeps no memory alive.
    """

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._storages = tuple(StorageWeakRef(t.untyped_storage()) for t in tensors)
        self._views = tuple((t.data_ptr(), tuple(t.shape), t.stride(), version_of(t)) for t in tensors)

    @property
    def expired(self) -> bool:
        """Whether any of the storages is gone."""
        return any(ref.expired() for ref in self._storages)

    def same(self, other: Fingerprint) -> bool:
        """Whether ``other``, taken now, is of the same unchanged bytes. Never true for inference tensors."""
        return (
            not self.expired
            and all(version is not None for *_, version in self._views)
            and self._views == other._views
            and all(a.cdata == b.cdata for a, b in zip(self._storages, other._storages, strict=True))
        )


class Workspace:
    """The buffer of one stream. Use ``workspace_for``; the constructor is for tests.

    Attributes:
        decodes: how often a matrix was written.
        hits: how often one was found in place.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.decodes = 0
        self.hits = 0
        self._buffer: Tensor | None = None
        self._held: tuple[Fingerprint, tuple[int, ...], torch.dtype, tuple[float, ...]] | None = None
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return 0 if self._buffer is None else self._buffer.numel()

    @contextmanager
    def decoded(
        self,
        sources: tuple[Tensor, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        scales: tuple[float, ...],
        fill: Callable[[Tensor], object],
        *,
        reuse: bool,
    ) -> Iterator[Tensor]:
        """Lend the decoded matrix; it is valid until the ``with`` block ends.

        Args:
            sources: the packed tensors that ``fill`` reads.
            shape, dtype: of the decoded matrix.
            scales: what ``fill`` folds in; part of the matrix's identity.
            fill: writes every element of the contiguous tensor it is given.
            reuse: take the matrix that is already there if it is the same one.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            matrix = torch.empty(shape, dtype=dtype, device=self.device)
            fill(matrix)
            yield matrix
            return
        if self._owner == threading.get_ident():
            raise RuntimeError("the workspace holds one matrix: finish with the first before asking for a second")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield self._locate(Fingerprint(sources), shape, dtype, scales, fill, reuse)
            finally:
                self._owner = None

    def _locate(
        self,
        source: Fingerprint,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        scales: tuple[float, ...],
        fill: Callable[[Tensor], object],
        reuse: bool,
    ) -> Tensor:
        matrix = self._room(shape, dtype)
        held = self._held
        if reuse and held is not None and held[1:] == (shape, dtype, scales) and held[0].same(source):
            self.hits += 1
            return matrix
        # Forgotten first: a fill that raises leaves neither the old matrix nor the new.
        self._held = None
        fill(matrix)
        self.decodes += 1
        self._held = (source, shape, dtype, scales)
        return matrix

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The front of the buffer as a tensor, after growing it if need be."""
        count = 1
        for size in shape:
            count *= size
        needed = count * dtype.itemsize
        if self._buffer is None or self._buffer.numel() < needed:
            # Dropped before its successor exists, so that the peak is one matrix.
            self._buffer, self._held = None, None
            self._buffer = torch.empty(needed, dtype=torch.uint8, device=self.device)
        # A new view each time: one kept from inference mode could not be written to outside of it.
        return self._buffer[:needed].view(dtype).view(shape)

    def forget(self) -> None:
        """No longer trust what the buffer holds."""
        with self._lock:
            self._held = None

    def release(self) -> None:
        """Give the memory back to torch's allocator; the next use allocates again."""
        with self._lock:
            self._buffer, self._held = None, None


_workspaces: dict[tuple[torch.device, int], Workspace] = {}
_registry_lock = threading.Lock()


def workspace_for(device: torch.device) -> Workspace:
    """The workspace of ``device``'s current stream."""
    stream = 0
    if device.type == "cuda":
        current = torch.cuda.current_stream(device)
        device, stream = current.device, current.cuda_stream
    with _registry_lock:
        return _workspaces.setdefault((device, stream), Workspace(device))


def forget_decoded() -> None:
    """Call after changing a packed weight through a route that no version counter sees."""
    for workspace in list(_workspaces.values()):
        workspace.forget()


def release_workspaces() -> None:
    """Free every buffer, say before an engine on the same GPU takes the memory."""
    for workspace in list(_workspaces.values()):
        workspace.release()
