"""What the stages of one QeRL step hand to each other.

All are frozen dataclasses of plain Python values, so that this module needs neither torch nor numpy and any of them
can be written to JSON. Shape suffixes used throughout the project: ``T`` tokens of a completion, ``P`` tokens of a
prompt, ``B`` rows of a batch, ``G`` responses of a group, ``V`` vocabulary, ``H`` hidden size, ``N``/``K`` output and
input features of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
NoiseScope = Literal["rollout", "group", "response", "token"]
LikelihoodMode = Literal["replay", "clean", "uncorrected"]


class Outcome(StrEnum):
    """How an answer was judged; the five are counted apart (reading, algorithm 2, step 7)."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Problem:
    """One question with a known answer.

    Attributes:
        uid: unique within its dataset and stable between runs; sampling seeds are keyed by it.
        question: the text put to the model.
        answer: the reference answer, in a form that the reward's parser reads.
        cluster: problems that share it are not independent (phrasings of one operand pair); intervals resample by it.
        source: dataset name, for per-benchmark tables.
    """

    uid: str
    question: str
    answer: str
    cluster: str
    source: str


@dataclass(frozen=True)
class Prompt:
    """A problem rendered with the chat template. ``token_ids`` has length P, without padding."""

    problem: Problem
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. ``temperature`` 0 means greedy; ``top_p`` 1 and ``top_k`` 0 keep the whole support."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    top_p: float = 1.0
    top_k: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class NoiseState:
    """Everything needed to rebuild every noise vector z exactly, on any rank, device or process.

    Attributes:
        stage: index into the schedule, 0 is the noise-free warm-up.
        sigma: nominal standard deviation of z.
        seed: the run's noise seed.
        step: training step whose rollout this noise shaped; part of the generator key.
        scope: how long one draw lasts.
        roles: logical norm roles that receive noise, sorted.
        modules_hash: SHA-256 over the sorted (layer, role, channels) list, so that a replay on another model fails.
        dtype: dtype in which z is drawn and added ("float32").
        budget: "absolute": sigma is the deviation of z; "relative": of z / w, so that the norm scales w of the base
            are needed too (``noise/budget.py``). A policy's ``base_hash`` names them.
    """

    stage: int
    sigma: float
    seed: int
    step: int
    scope: NoiseScope
    roles: tuple[str, ...]
    modules_hash: str
    dtype: str = "float32"
    budget: Literal["absolute", "relative"] = "absolute"

    @property
    def active(self) -> bool:
        return self.sigma > 0.0


@dataclass(frozen=True)
class PolicyVersion:
    """The behaviour policy: what exactly generated a token.

    Attributes:
        base_hash: SHA-256 of the frozen base checkpoint's manifest.
        adapter_version: number of optimizer updates that the adapter has seen.
        adapter_hash: SHA-256 over the adapter tensors in canonical order.
        noise: the noise in force, or None for the clean policy.
        temperature, top_p, top_k: the sampling transform; log-probabilities are those of the sampling distribution.
    """

    base_hash: str
    adapter_version: int
    adapter_hash: str
    noise: NoiseState | None
    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True)
class Completion:
    """One generated response.

    Attributes:
        token_ids: length T, with the stop token if one was produced.
        logprobs: length T, natural-log probability of each token under the sampling distribution of ``policy``.
        finish_reason: "stop" (a stop token), "length" (ran into max_new_tokens), "abort" (engine gave up).
        policy: what generated it.
        response_index: position in its group; with the prompt's uid and the seed it names the random stream.
        routes: of a mixture of experts, if they were wanted: the experts that the prompt's and the response's tokens
            (but the last) went to, a ``layers.routing.RoutingRecord``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy: PolicyVersion
    response_index: int
    routes: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs), "one log-probability a token"


@dataclass(frozen=True)
class Judgement:
    """The verdict on one completion. ``score`` is the raw task score, before any length shaping."""

    outcome: Outcome
    score: float
    extracted: str | None


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion with its verdict. ``reward`` is the score after shaping; ``text`` is the decoded response."""

    completion: Completion
    judgement: Judgement
    reward: float
    text: str


@dataclass(frozen=True)
class Group:
    """The G responses to one prompt, with one advantage each (length G; empty until computed)."""

    prompt: Prompt
    responses: tuple[ScoredCompletion, ...]
    advantages: tuple[float, ...] = ()

    @property
    def raw_scores(self) -> tuple[float, ...]:
        return tuple(r.judgement.score for r in self.responses)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(r.reward for r in self.responses)

    @property
    def mixed(self) -> bool:
        """Whether the raw scores differ, that is, whether the group carries a learning signal."""
        return len(set(self.raw_scores)) > 1


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl: step index, flat name -> number, and what is not a number."""

    step: int
    values: dict[str, float]
    info: dict[str, Any] = field(default_factory=dict)
