"""The configuration of a run, as frozen pydantic models.

A default lives here and nowhere else. Unknown keys are refused (``loader`` adds the closest known key as a
suggestion), and every combination that would train on wrong numbers without saying so is refused by a validator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from megatron_qerl.config.algorithm import AlgorithmSection, DynamicSamplingSection, OverlongSection
from megatron_qerl.config.noise import NOISE_ROLES, NoiseSection
from megatron_qerl.config.section import (
    FolderName,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Importable from here; their definitions have files of their own.
__all__ = ["NOISE_ROLES", "AlgorithmSection", "DynamicSamplingSection", "NoiseSection", "OverlongSection", "Section"]


class RunSection(Section):
    """Where a run lives and what makes it repeatable."""

    name: FolderName = Field(description="name of the run; its folder is output_dir/name")
    output_dir: Path = Field(default=Path("runs"), description="parent of the run folder")
    seed: Annotated[int, Field(ge=0, lt=1 << 40)] = Field(
        default=1, description="seeds sampling, noise, adapters and data order; below 2^40"
    )
    threads: NonNegativeInt = Field(default=0, description="CPU threads for torch; 0 leaves torch's choice")


class ModelSection(Section):
    """The frozen base model."""

    path: Path = Field(description="folder of a Hugging Face or ModelOpt NVFP4 checkpoint")
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", description="dtype of activations")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="resolved once at start and logged")
    weight_cache: Literal["none", "resident"] = Field(
        default="none",
        description="resident keeps the dequantised base (full size in memory; for small models on a CPU)",
    )
    attention: Literal["auto", "sdpa", "transformer_engine"] = Field(default="auto")
    max_sequence_length: PositiveInt = Field(default=4096, description="longest prompt + completion, in tokens")


class LoraSection(Section):
    """Low-rank adapters: y = W x + (alpha / rank) B (A x)."""

    rank: PositiveInt = 32
    alpha: PositiveFloat = 32.0
    targets: tuple[str, ...] = Field(default=LORA_TARGETS, min_length=1)
    expert_mode: Literal["per_expert", "shared_outer", "none"] = Field(
        default="per_expert",
        description="mixture of experts: own factors for each expert; or gate's and up's A and down's B shared by all; "
        "or no adapters on experts",
    )

    @model_validator(mode="after")
    def _known_targets(self) -> Self:
        unknown = sorted(set(self.targets) - set(LORA_TARGETS))
        if unknown:
            raise ValueError(f"unknown LoRA targets {unknown}; choose from {list(LORA_TARGETS)}")
        if len(set(self.targets)) != len(self.targets):
            raise ValueError("a LoRA target is listed twice")
        return self


class ParallelSection(Section):
    """Megatron's parallel layout; the product must divide the number of processes."""

    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    context_parallel_size: PositiveInt = 1
    expert_model_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt | None = Field(
        default=None, description="splits each expert's width; null: as tensor_model_parallel_size"
    )
    token_dispatcher: Literal["alltoall", "allgather"] = Field(
        default="alltoall", description="how tokens reach their experts"
    )
    sequence_parallel: bool = False
    use_distributed_optimizer: bool | None = Field(
        default=None,
        description="spread optimizer states over the data-parallel ranks; null: where there are several",
    )
    timeout_minutes: PositiveInt = Field(
        default=30, description="a rank that waits longer for another gives up; must exceed the longest rollout"
    )

    def spreads_optimizer(self, data_size: int) -> bool:
        """Whether optimizer states are spread over ``data_size`` data-parallel ranks."""
        return data_size > 1 if self.use_distributed_optimizer is None else self.use_distributed_optimizer

    @model_validator(mode="after")
    def _sequences_need_tensors(self) -> Self:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel splits what tensor parallelism leaves whole, so it needs "
                "tensor_model_parallel_size > 1; raise that or set sequence_parallel: false"
            )
        return self


class DatasetSection(Section):
    """A source of problems. ``kind`` fixes the field names; docs/datasets.md has the schemas."""

    kind: Literal["arithmetic", "jsonl", "gsm8k", "math"]
    path: Path | None = Field(default=None, description="JSONL file (kinds jsonl, gsm8k, math)")
    split: Literal["train", "heldout"] = Field(default="train", description="arithmetic: operand pairs to draw from")
    operations: tuple[Literal["add", "mul"], ...] = Field(default=("add", "mul"), min_length=1)
    max_sum_operand: PositiveInt = Field(default=9, description="arithmetic: largest operand of a sum")
    max_product_operand: PositiveInt = Field(default=12, description="arithmetic: largest factor of a product")
    heldout_fraction: Fraction = Field(default=0.25, description="arithmetic: share of operand pairs held out")
    limit: PositiveInt | None = Field(default=None, description="use only the first N problems after shuffling")
    prompt_suffix: str = Field(default="", description="appended to each question")

    @model_validator(mode="after")
    def _path_fits_kind(self) -> Self:
        if self.kind == "arithmetic" and self.path is not None:
            raise ValueError("kind arithmetic generates its problems; remove path")
        if self.kind != "arithmetic" and self.path is None:
            raise ValueError(f"kind {self.kind} reads a file; set path")
        return self


class DataSection(Section):
    """Training and evaluation problems and how they become prompts."""

    train: DatasetSection
    eval: DatasetSection
    system_prompt: str | None = Field(default=None, description="system message; null keeps the template's own")
    chat_template: bool = Field(default=True, description="render with the tokenizer's chat template")


class RolloutSection(Section):
    """Generation."""

    engine: Literal["embedded", "sglang", "vllm"] = "embedded"
    prompts_per_step: PositiveInt = 8
    group_size: Annotated[int, Field(ge=2)] = 8
    max_prompt_tokens: PositiveInt = 1024
    max_new_tokens: PositiveInt = 1024
    temperature: PositiveFloat = Field(default=1.0, description="log-probabilities are those at this temperature")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: NonNegativeInt = Field(default=0, description="0 keeps the whole vocabulary")
    max_batch_size: PositiveInt = Field(default=128, description="rows decoded at once by the embedded engine")
    routing_replay: bool = Field(
        default=True,
        description="mixture of experts under likelihood replay: the trainer sends each token where the engine sent it",
    )
    parity_bound: PositiveFloat | None = Field(
        default=None,
        description="largest |engine - trainer| log-probability, a twentieth of it on average; "
        "null: 1e-4 in float32, 2 in bfloat16",
    )


class RewardSection(Section):
    """Verification of answers."""

    verifier: Literal["math"] = "math"
    timeout_s: PositiveFloat = Field(default=5.0, description="time limit for one answer")
    correct_score: float = 1.0
    wrong_score: float = 0.0
    workers: PositiveInt = Field(default=1, description="verifier processes; several help with long formulas")
    truncated_counts_as: Literal["judged", "wrong"] = Field(
        default="judged", description="judged: a truncated response is still parsed; wrong: it scores wrong_score"
    )

    @model_validator(mode="after")
    def _scores_differ(self) -> Self:
        if self.correct_score <= self.wrong_score:
            raise ValueError(
                f"correct_score = {self.correct_score} must exceed wrong_score = {self.wrong_score}; "
                "otherwise no group carries a signal, or the wrong one"
            )
        return self


class OptimizerSection(Section):
    """AdamW on the adapter parameters, through Megatron's optimizer."""

    learning_rate: PositiveFloat = 1e-5
    min_learning_rate: NonNegativeFloat = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    adam_epsilon: PositiveFloat = 1e-8
    gradient_clip: PositiveFloat = 1.0


class TrainSection(Section):
    """The loop and how a batch is cut."""

    steps: PositiveInt
    minibatches_per_step: PositiveInt = Field(default=1, description="optimizer updates for one rollout")
    microbatch_tokens: PositiveInt = Field(default=16384, description="token budget of one forward and backward")
    share_prompt_prefix: bool = Field(
        default=True, description="compute a prompt once for its whole group (needs sdpa attention)"
    )
    recompute: Literal["none", "full", "full_offload"] = Field(
        default="none",
        description="recompute activations in backward; full_offload also keeps the layers' inputs in host memory",
    )
    logprob_chunk_tokens: PositiveInt | None = Field(
        default=None, description="rows of logits alive at a time; null: what a sixteenth of the memory of all allows"
    )


class CheckpointSection(Section):
    """Saving. A checkpoint is written to a temporary folder and renamed, so none is ever half there."""

    interval_steps: PositiveInt = 10
    keep: PositiveInt = Field(default=2, description="newest checkpoints kept")


class EvalSection(Section):
    """Evaluation of the policy that will be deployed (clean) and, on request, of the noisy one."""

    interval_steps: NonNegativeInt = Field(default=0, description="0: only before and after training")
    problems: PositiveInt | None = Field(default=None, description="evaluate on the first N; null: all")
    modes: tuple[Literal["greedy", "sampled"], ...] = Field(default=("greedy",), min_length=1)
    samples_per_problem: PositiveInt = Field(default=1, description="for mode sampled")
    noisy: bool = Field(default=False, description="also evaluate under the noise then in force")
    bootstrap_resamples: PositiveInt = 2000


class WandbSection(Section):
    """Weights & Biases, one of the sinks."""

    project: str = "megatron-qerl"
    mode: Literal["online", "offline"] = "offline"
    entity: str | None = None


class MetricsSection(Section):
    """Where metrics go besides metrics.jsonl, which is always written."""

    console: bool = True
    sinks: tuple[Literal["wandb"], ...] = ()
    wandb: WandbSection = WandbSection()


class RunConfig(Section):
    """One training run."""

    run: RunSection
    model: ModelSection
    lora: LoraSection = LoraSection()
    parallel: ParallelSection = ParallelSection()
    noise: NoiseSection = NoiseSection()
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    metrics: MetricsSection = MetricsSection()

    @model_validator(mode="after")
    def _numbers_would_be_right(self) -> Self:
        rollout, algorithm, noise = self.rollout, self.algorithm, self.noise
        if algorithm.likelihood == "clean" and (rollout.top_p < 1.0 or rollout.top_k > 0):
            raise ValueError(
                f"rollout.top_p = {rollout.top_p}, rollout.top_k = {rollout.top_k} with algorithm.likelihood = clean: "
                "a cut support cannot be repaired by importance weights; "
                "set rollout.top_p: 1.0 and rollout.top_k: 0, or use likelihood: replay"
            )
        if rollout.top_p < 1.0 or rollout.top_k > 0:
            raise ValueError(
                f"rollout.top_p = {rollout.top_p}, rollout.top_k = {rollout.top_k}: the trainer's log-probabilities "
                "are over the whole vocabulary, so the ratio would have the wrong denominator; "
                "set rollout.top_p: 1.0 and rollout.top_k: 0"
            )
        if rollout.max_prompt_tokens + rollout.max_new_tokens > self.model.max_sequence_length:
            raise ValueError(
                f"rollout.max_prompt_tokens + rollout.max_new_tokens = "
                f"{rollout.max_prompt_tokens + rollout.max_new_tokens} exceeds "
                f"model.max_sequence_length = {self.model.max_sequence_length}; shorten one or raise the other"
            )
        longest = rollout.max_prompt_tokens + rollout.max_new_tokens - 1
        if self.train.microbatch_tokens < longest:
            raise ValueError(
                f"train.microbatch_tokens = {self.train.microbatch_tokens} is less than one prompt with one response "
                f"may need, {longest}; raise it, or shorten rollout.max_prompt_tokens or rollout.max_new_tokens"
            )
        overlong = algorithm.overlong
        if overlong.enabled and overlong.buffer_tokens >= rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong.buffer_tokens = {overlong.buffer_tokens} must be smaller than "
                f"rollout.max_new_tokens = {rollout.max_new_tokens}"
            )
        if noise.enabled and noise.schedule != "constant" and self.train.steps < noise.stages:
            raise ValueError(
                f"noise.stages = {noise.stages} needs at least as many steps, train.steps = {self.train.steps}; "
                "some stages would never run. Lower noise.stages or raise train.steps"
            )
        if self.optimizer.schedule == "cosine" and self.optimizer.min_learning_rate > self.optimizer.learning_rate:
            raise ValueError("optimizer.min_learning_rate exceeds optimizer.learning_rate; lower it")
        if self.optimizer.warmup_steps >= self.train.steps * self.train.minibatches_per_step:
            raise ValueError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} leaves no update after warm-up; "
                "lower it or raise train.steps"
            )
        return self


class CalibrationSection(Section):
    """Activations that AWQ weighs the error with (paper section 4.1: 256 sequences of 2048 tokens)."""

    method: Literal["max", "awq"] = "max"
    dataset: Path | None = Field(default=None, description="JSONL with a text field; null: the built-in text")
    text_field: str = "text"
    sequences: PositiveInt = 256
    sequence_length: PositiveInt = 2048
    seed: NonNegativeInt = 1


class QuantizeConfig(Section):
    """``megatron-qerl quantize``: a Hugging Face folder becomes a ModelOpt NVFP4 folder."""

    source: Path
    output: Path
    calibration: CalibrationSection = CalibrationSection()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_shard_bytes: PositiveInt = Field(default=5_000_000_000, description="size limit of one output file")


def sections(model: type[BaseModel]) -> dict[str, Any]:
    """Field name -> default or ``...`` for required fields, for documentation and error messages."""
    return {name: (... if f.is_required() else f.default) for name, f in model.model_fields.items()}
