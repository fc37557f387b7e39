"""The embedded engine: an autoregressive loop over the trainer's own Megatron model.

It shares the trainer's weights, so a sync moves nothing; what `publish` does is put the noise in force and fix the
version that completions carry. Prompts are left-padded into one batch and computed once; their cache rows are then
repeated for the responses of the group. Rows that have finished leave the batch once enough of them have.

All ranks of a replica run the loop on the same requests. They draw the same tokens, since a draw depends on names alone
and logits are gathered to the same bytes on each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_qerl.errors import FaultError
from megatron_qerl.layers.attention import KVCache
from megatron_qerl.layers.routing import Recording
from megatron_qerl.models.policy import PolicyChunks
from megatron_qerl.noise.registry import NoiseRegistry
from megatron_qerl.parallel.sequence import whole_sequences
from megatron_qerl.rollout.engine import GenerationRequest
from megatron_qerl.rollout.routes import RouteTrace
from megatron_qerl.rollout.sampling import sample, uniforms
from megatron_qerl.types import Completion, FinishReason, PolicyVersion, SamplingParams


@dataclass
class _Batch:
    """Rows being decoded. All tensors have the same first dimension B; ``row`` maps to the caller's numbering."""

    row: Tensor
    next_position: Tensor
    blocked: Tensor  # bool [B, S_max], True at left padding

    def select(self, keep: Tensor) -> None:
        self.row, self.next_position, self.blocked = self.row[keep], self.next_position[keep], self.blocked[keep]


class EmbeddedEngine:
    """RolloutEngine over the model in this process.

    Args:
        model: the trainer's model.
        registry: its noise.
        max_batch_size: rows decoded at once.
    """

    def __init__(self, model: PolicyChunks, registry: NoiseRegistry, max_batch_size: int) -> None:
        self.model, self.registry, self.max_batch_size = model, registry, max_batch_size
        self._policy: PolicyVersion | None = None
        self._kv_peak_bytes = 0

    @property
    def kv_cache_peak_bytes(self) -> int:
        return self._kv_peak_bytes

    def publish(self, policy: PolicyVersion) -> PolicyVersion:
        """Every generate call builds its own cache, so nothing old survives; the weights are the trainer's."""
        self._policy = policy
        self._kv_peak_bytes = 0
        return policy

    def close(self) -> None:
        self._policy = None

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[list[Completion]]:
        if self._policy is None:
            raise FaultError("embedded engine", "was asked to generate before a policy was published", "publish first")
        policy = replace(self._policy, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)
        if sampling.top_p < 1.0 or sampling.top_k > 0:
            raise FaultError("embedded engine", "does not cut the support (top_p, top_k)", "use top_p 1.0 and top_k 0")
        results: list[list[Completion]] = []
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), whole_sequences(self.model), self.registry.applied(policy.noise):
                for part in self._split(requests):
                    results.extend(self._generate(part, sampling, policy))
        finally:
            self.model.train(was_training)
        return self._merge(requests, results)

    def _split(self, requests: Sequence[GenerationRequest]) -> list[list[tuple[GenerationRequest, range]]]:
        """Batches of (request, response indices) of at most ``max_batch_size`` rows, in order."""
        pieces = [
            (request, range(begin, min(begin + self.max_batch_size, request.group_size)))
            for request in requests
            for begin in range(0, request.group_size, self.max_batch_size)
        ]
        batches: list[list[tuple[GenerationRequest, range]]] = []
        rows = self.max_batch_size + 1
        for request, indices in pieces:
            if rows + len(indices) > self.max_batch_size:
                batches.append([])
                rows = 0
            batches[-1].append((request, indices))
            rows += len(indices)
        return batches

    @staticmethod
    def _merge(requests: Sequence[GenerationRequest], parts: list[list[Completion]]) -> list[list[Completion]]:
        """Put the pieces of a split request together again; pieces come in order."""
        flat = iter(parts)
        merged: list[list[Completion]] = []
        for request in requests:
            group: list[Completion] = []
            while len(group) < request.group_size:
                group.extend(next(flat))
            merged.append(group)
        return merged

    def _prefill(self, prompts: list[tuple[int, ...]], new_tokens: int) -> tuple[KVCache, Tensor, Tensor]:
        """Cache of the left-padded prompts, their last logits [n, V], and where padding lies, bool [n, S_max]."""
        device = self.model.inv_freq.device
        longest = max(len(p) for p in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        blocked = torch.zeros(len(prompts), longest + new_tokens, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            blocked[i, : longest - len(prompt)] = True
        positions = (torch.arange(longest)[None] - blocked.sum(dim=1, keepdim=True)).clamp(min=0)
        causal = torch.ones(longest, longest, dtype=torch.bool).triu(1)
        mask = causal[None] | blocked[:, None, :longest]
        # A padding query may look at itself: a row with nothing to look at would be nan and spread.
        mask &= ~torch.eye(longest, dtype=torch.bool)[None]
        cache = KVCache(len(prompts), longest + new_tokens)
        logits = self.model(ids.to(device), positions.to(device), mask[:, None].to(device), inference_context=cache)
        return cache, logits, blocked.to(device)

    def _generate(
        self, part: list[tuple[GenerationRequest, range]], sampling: SamplingParams, policy: PolicyVersion
    ) -> list[list[Completion]]:
        prompts = [r.prompt.token_ids for r, _ in part]
        wanted = any(r.routes for r, _ in part)
        with self._recording(wanted) as kept:
            cache, logits, blocked = self._prefill(prompts, sampling.max_new_tokens)
        device = logits.device
        names = [(r.prompt.problem.uid, i, r.stream) for r, indices in part for i in indices]
        source = torch.tensor([n for n, (_, indices) in enumerate(part) for _ in indices], device=device)
        cache.select(source)
        self._kv_peak_bytes = max(self._kv_peak_bytes, cache.nbytes)
        trace = None if kept is None else RouteTrace(kept.record(), [len(p) for p in prompts], source.tolist())
        logits = logits[source]
        blocked = blocked[source]
        prompt_tokens = torch.tensor([len(r.prompt.token_ids) for r, i in part for _ in i], device=device)
        batch = _Batch(torch.arange(len(names), device=device), prompt_tokens, blocked)
        draws = uniforms(sampling.seed, names, sampling.max_new_tokens).to(device)
        stops = torch.tensor(sampling.stop_token_ids, device=device)
        tokens: list[list[int]] = [[] for _ in names]
        logprobs: list[list[float]] = [[] for _ in names]
        stopped = [False] * len(names)
        for t in range(sampling.max_new_tokens):
            token, logprob = sample(logits, sampling.temperature, draws[batch.row, t])
            ended = torch.isin(token, stops)
            for row, tok, lp, end in zip(
                batch.row.tolist(), token.tolist(), logprob.tolist(), ended.tolist(), strict=True
            ):
                if not stopped[row]:
                    tokens[row].append(tok)
                    logprobs[row].append(lp)
                    stopped[row] = end
            live = torch.tensor([not stopped[r] for r in batch.row.tolist()], device=device)
            if t + 1 == sampling.max_new_tokens or not bool(live.any()):
                break
            if int(live.sum()) <= 0.75 * len(live):
                keep = live.nonzero().squeeze(1)
                batch.select(keep)
                cache.select(keep)
                token = token[keep]
            end_position = cache.sequence_len_offset + 1
            with self._recording(wanted) as kept:
                logits = self.model(
                    token[:, None],
                    batch.next_position[:, None],
                    batch.blocked[:, None, None, :end_position],
                    inference_context=cache,
                )
            if trace is not None and kept is not None:
                trace.step(kept.record(), batch.row.tolist())
            batch.next_position = batch.next_position + 1
        completions = self._completions(part, tokens, logprobs, stopped, policy)
        return completions if trace is None else _with_routes(completions, trace)

    @contextmanager
    def _recording(self, wanted: bool) -> Iterator[Recording | None]:
        """Keep the routes of the forward inside."""
        if not wanted:
            yield None
            return
        with self.model.routing.recording() as kept:
            yield kept

    @staticmethod
    def _completions(
        part: list[tuple[GenerationRequest, range]],
        tokens: list[list[int]],
        logprobs: list[list[float]],
        stopped: list[bool],
        policy: PolicyVersion,
    ) -> list[list[Completion]]:
        rows = iter(range(len(tokens)))
        result = []
        for _, indices in part:
            group = []
            for index in indices:
                row = next(rows)
                reason: FinishReason = "stop" if stopped[row] else "length"
                group.append(Completion(tuple(tokens[row]), tuple(logprobs[row]), reason, policy, index))
            result.append(group)
        return result


def _with_routes(groups: list[list[Completion]], trace: RouteTrace) -> list[list[Completion]]:
    """The completions of a batch, row after row, with their records."""
    rows = iter(range(sum(map(len, groups))))
    return [[replace(c, routes=trace.response(next(rows), len(c.token_ids))) for c in group] for group in groups]
