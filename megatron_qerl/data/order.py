"""In what order problems are taken: every epoch a new shuffle, and a position that fits in one integer.

The shuffle of an epoch is a pure function of (seed, epoch), by sorting hashes. There is no generator state to save: a
run resumed at position p takes the problems that the unbroken run would have taken.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache


@lru_cache(maxsize=4)
def shuffled(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of range(count) that depends on the arguments alone, on every machine and version."""

    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=16).digest()

    return tuple(sorted(range(count), key=key))


class DataOrder:
    """The infinite sequence of problem indices of a run.

    Position p is place ``p % num_problems`` of epoch ``p // num_problems``. Where an epoch ends within a batch, the
    batch goes on with the next one, so every problem is taken exactly once an epoch; a batch that straddles the border
    may then hold a problem twice.

    Args:
        num_problems: size of the dataset, at least 1.
        seed: of all shuffles.
    """

    def __init__(self, num_problems: int, seed: int) -> None:
        assert num_problems >= 1, "a dataset has problems"
        self._num_problems = num_problems
        self._seed = seed

    def take(self, position: int, n: int) -> tuple[tuple[int, ...], int]:
        """The ``n`` indices from ``position`` on, and the position after them."""
        assert position >= 0, "positions count from 0"
        assert n >= 0, "cannot take fewer than none"
        places = (divmod(p, self._num_problems) for p in range(position, position + n))
        indices = tuple(shuffled(self._num_problems, self._seed, epoch)[place] for epoch, place in places)
        return indices, position + n
