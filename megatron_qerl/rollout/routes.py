"""Which experts a generated response went to, put together from the engine's forwards.

A batch's prompts are computed once, left-padded, and each decode step computes one token a row. ``RouteTrace`` files
what each forward recorded under the rows it computed, so that a response ends up with one record of its prompt and of
all its tokens but the last, which is never fed back. That is what the trainer's pack holds of it
(``layers.routing.pack_routes``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_qerl.layers.routing import RoutingRecord


class RouteTrace:
    """Records of one batch.

    Args:
        prompts: of the forward over all prompts, rows ``s * n + i`` of n prompts padded to a common length.
        lengths: tokens of each prompt.
        source: prompt of each row of the batch.
    """

    def __init__(self, prompts: RoutingRecord, lengths: Sequence[int], source: Sequence[int]) -> None:
        longest, count = max(lengths), len(lengths)
        each = [prompts.rows(torch.arange(longest - length, longest) * count + i) for i, length in enumerate(lengths)]
        self._parts = [[each[prompt]] for prompt in source]

    def step(self, record: RoutingRecord, rows: Sequence[int]) -> None:
        """One token of each of ``rows``, in the order of the forward."""
        for place, row in enumerate(rows):
            self._parts[row].append(record.rows(torch.tensor([place])))

    def response(self, row: int, tokens: int) -> RoutingRecord:
        """The prompt's and the response's tokens but the last, of a response of ``tokens`` tokens.

        A row that has stopped may go on being computed; what came after is dropped.
        """
        return RoutingRecord.concatenate(self._parts[row][:tokens])
