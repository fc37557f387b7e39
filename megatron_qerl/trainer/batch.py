"""From groups with advantages to micro-batches of packed tokens.

A micro-batch is a set of whole groups whose packed length stays within the token budget. A group too long for the
budget is cut between responses, and its prompt repeated. What belongs to a response travels with it as flat vectors
over its tokens, in the order in which the model returns log-probabilities.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_qerl.errors import ConfigError
from megatron_qerl.layers.packing import PackedTokens, pack
from megatron_qerl.layers.routing import RoutingRecord, pack_routes
from megatron_qerl.types import Group


@dataclass(frozen=True)
class TrainingResponse:
    """One response as the objective sees it; ``sequence`` numbers it in the batch.

    ``routes`` are the experts that the engine sent it to, to be replayed; None leaves them to the routers.
    """

    token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    advantage: float
    sequence: int
    routes: RoutingRecord | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class TrainingGroup:
    """A prompt and the responses of its group."""

    prompt_ids: tuple[int, ...]
    responses: tuple[TrainingResponse, ...]

    def packed_tokens(self, share_prefix: bool) -> int:
        """Length in the pack: the last token of a response is a target only."""
        own = sum(len(r.token_ids) - 1 for r in self.responses)
        return own + len(self.prompt_ids) * (1 if share_prefix else len(self.responses))


@dataclass(frozen=True)
class MicroBatch:
    """A packed micro-batch and its per-token vectors.

    Attributes:
        tokens: input of the model.
        rollout_logprobs, advantages: FP32 [n] over response tokens.
        sequence: int64 [n], number of each token's response in the whole batch.
        mask: bool [n], True where a token counts; False throughout a micro-batch that only keeps this rank in step.
    """

    tokens: PackedTokens
    rollout_logprobs: Tensor
    advantages: Tensor
    sequence: Tensor
    mask: Tensor


def training_groups(groups: Sequence[Group]) -> list[TrainingGroup]:
    """Groups with advantages -> training groups, responses numbered through."""
    result, number = [], 0
    for group in groups:
        assert len(group.advantages) == len(group.responses), "advantages come before packing"
        responses = []
        for scored, advantage in zip(group.responses, group.advantages, strict=True):
            completion = scored.completion
            responses.append(
                TrainingResponse(completion.token_ids, completion.logprobs, advantage, number, completion.routes)
            )
            number += 1
        result.append(TrainingGroup(group.prompt.token_ids, tuple(responses)))
    return result


def _split_long(group: TrainingGroup, budget: int, share_prefix: bool) -> list[TrainingGroup]:
    pieces: list[TrainingGroup] = []
    current: list[TrainingResponse] = []
    for response in group.responses:
        single = TrainingGroup(group.prompt_ids, (response,))
        if single.packed_tokens(share_prefix) > budget:
            raise ConfigError(
                "train.microbatch_tokens",
                budget,
                f"one prompt and response need {single.packed_tokens(share_prefix)} tokens",
                "raise train.microbatch_tokens or lower rollout.max_new_tokens",
            )
        trial = TrainingGroup(group.prompt_ids, (*current, response))
        if current and trial.packed_tokens(share_prefix) > budget:
            pieces.append(TrainingGroup(group.prompt_ids, tuple(current)))
            current = []
        current.append(response)
    pieces.append(TrainingGroup(group.prompt_ids, tuple(current)))
    return pieces


def first_piece(group: TrainingGroup, budget: int, *, share_prefix: bool) -> TrainingGroup:
    """As many of a group's responses as one micro-batch holds.

    Raises:
        ConfigError: not even one.
    """
    return _split_long(group, budget, share_prefix)[0]


def plan_microbatches(groups: Sequence[TrainingGroup], budget: int, *, share_prefix: bool) -> list[list[TrainingGroup]]:
    """First-fit decreasing by packed length.

    Raises:
        ConfigError: a single response does not fit the budget.
    """
    pieces = [p for g in groups for p in _split_long(g, budget, share_prefix)]
    pieces.sort(key=lambda p: -p.packed_tokens(share_prefix))
    bins: list[list[TrainingGroup]] = []
    loads: list[int] = []
    for piece in pieces:
        size = piece.packed_tokens(share_prefix)
        for i, load in enumerate(loads):
            if load + size <= budget:
                bins[i].append(piece)
                loads[i] += size
                break
        else:
            bins.append([piece])
            loads.append(size)
    return bins


def share_out(
    groups: Sequence[TrainingGroup], budget: int, ranks: int, *, share_prefix: bool
) -> list[list[list[TrainingGroup]]]:
    """The micro-batches of each data-parallel rank, as many on every rank, with near-equal loads.

    Every rank computes the same plan from the same groups. The counts are equal because experts (and Megatron's
    schedules over them) exchange tokens between data-parallel ranks in every layer, so that all must make the same
    passes. Groups are cut between responses, at the price of repeating the prompt, where the slowest rank gains by it.
    On one rank this is ``plan_microbatches``.

    Returns:
        Rank -> micro-batch -> pieces. A micro-batch without pieces only keeps its rank in step.

    Raises:
        ConfigError: a single response does not fit the budget.
    """
    bins = plan_microbatches(groups, budget, share_prefix=share_prefix)
    if ranks == 1:
        return [bins]
    pieces = [piece for b in bins for piece in b]
    best: list[list[list[TrainingGroup]]] = []
    slowest = 0
    # A few cuts a rank are enough to level what whole groups cannot.
    for _ in range(4 * ranks):
        loads = [[_load(m, share_prefix) for m in share] for share in best]
        if best and slowest <= 1.05 * sum(map(sum, loads)) / ranks:
            break
        shares = _shares(pieces, budget, ranks, len(bins), share_prefix)
        longest = max(sum(_load(m, share_prefix) for m in share) for share in shares)
        if not best or longest < slowest:
            best, slowest = shares, longest
        finer = _halved(pieces, share_prefix)
        if finer is None:
            break
        pieces = finer
    return best


def _load(microbatch: Sequence[TrainingGroup], share_prefix: bool) -> int:
    return sum(piece.packed_tokens(share_prefix) for piece in microbatch)


def _shares(
    pieces: Sequence[TrainingGroup], budget: int, ranks: int, at_least: int, share_prefix: bool
) -> list[list[list[TrainingGroup]]]:
    """Rank -> micro-batch -> pieces, from as few micro-batches as hold them, but ``at_least`` so many in all."""
    ordered = sorted(pieces, key=lambda p: -p.packed_tokens(share_prefix))
    rounds = -(-at_least // ranks)
    while (bins := _even_bins(ordered, budget, rounds * ranks, share_prefix)) is None:
        rounds += 1
    bins.sort(key=lambda b: -_load(b, share_prefix))
    # Of each round the longest micro-batch goes to the rank with the least so far.
    shares: list[list[list[TrainingGroup]]] = [[] for _ in range(ranks)]
    for r in range(rounds):
        lightest = sorted(range(ranks), key=lambda rank: sum(_load(m, share_prefix) for m in shares[rank]))
        for rank, microbatch in zip(lightest, bins[r * ranks : (r + 1) * ranks], strict=True):
            shares[rank].append(microbatch)
    return shares


def _halved(pieces: Sequence[TrainingGroup], share_prefix: bool) -> list[TrainingGroup] | None:
    """``pieces`` with the longest that has several responses cut in two; None if there is none."""
    whole = [p for p in pieces if len(p.responses) > 1]
    if not whole:
        return None
    longest = max(whole, key=lambda p: p.packed_tokens(share_prefix))
    half = len(longest.responses) // 2
    parts = [TrainingGroup(longest.prompt_ids, r) for r in (longest.responses[:half], longest.responses[half:])]
    return [p for p in pieces if p is not longest] + parts


def _even_bins(
    pieces: Sequence[TrainingGroup], budget: int, count: int, share_prefix: bool
) -> list[list[TrainingGroup]] | None:
    """``pieces``, longest first, each into the least loaded of ``count`` bins; None if the budget is too small."""
    bins: list[list[TrainingGroup]] = [[] for _ in range(count)]
    loads = [0] * count
    for piece in pieces:
        lightest = loads.index(min(loads))
        loads[lightest] += piece.packed_tokens(share_prefix)
        if loads[lightest] > budget:
            return None
        bins[lightest].append(piece)
    return bins


def build_microbatch(groups: Sequence[TrainingGroup], device: torch.device, *, share_prefix: bool) -> MicroBatch:
    """Pack one micro-batch onto ``device``.

    Args:
        groups: what is in it. Without any it holds one token that counts nowhere: a rank without work must still take
            part in the collectives of its layers.
    """
    counts = bool(groups)
    if not counts:
        groups = [TrainingGroup((0,), (TrainingResponse((0,), (0.0,), 0.0, 0),))]
    tokens = pack(
        [(g.prompt_ids, [r.token_ids for r in g.responses]) for g in groups], device, share_prefix=share_prefix
    )
    responses = [r for g in groups for r in g.responses]
    if counts and responses[0].routes is not None:
        records = [(len(g.prompt_ids), [r.routes for r in g.responses if r.routes is not None]) for g in groups]
        assert sum(len(r) for _, r in records) == len(responses), "all responses of a batch have routes, or none"
        tokens.params.routing = pack_routes(records, share_prefix=share_prefix)
    lengths = torch.tensor([len(r.token_ids) for r in responses])

    def spread(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(lengths).to(device)

    rollout = torch.tensor([x for r in responses for x in r.rollout_logprobs], dtype=torch.float32, device=device)
    return MicroBatch(
        tokens,
        rollout,
        spread([r.advantage for r in responses], torch.float32),
        spread([r.sequence for r in responses], torch.int64),
        torch.full((len(rollout),), counts, device=device),
    )


def split_minibatches(groups: Sequence[TrainingGroup], count: int) -> list[list[TrainingGroup]]:
    """``count`` near-equal runs of groups, in order; fewer if there are fewer groups."""
    count = min(count, len(groups))
    bounds = [len(groups) * i // count for i in range(count + 1)]
    return [list(groups[a:b]) for a, b in itertools.pairwise(bounds)]
