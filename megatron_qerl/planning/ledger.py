"""Memory of a training run, rank by rank, before it is started.

Each kind is a formula over the model's sizes and the config. Weights, adapters, optimizer and workspace are exact;
activations count the tensors that live at the worst moment of a step. ``tests/unit/test_plan.py`` compares the sum with
the measured peaks under ``benchmarks/results`` and allows 5 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_qerl.config.schema import RunConfig
from megatron_qerl.layers.kernels import default_chunk_rows
from megatron_qerl.layers.mlp import BACKWARD_ROWS
from megatron_qerl.models.shape import ModelShape, check_layout
from megatron_qerl.planning.sizes import (
    Linear,
    adapter_parameters,
    adapter_split,
    block_linears,
    block_norms,
    stage_blocks,
    vocabulary_parameters,
)

NVFP4_BYTES = 0.5 + 1 / 16
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Hidden states alive at once in a layer's backward: the layer's input and output, their gradients, the residual, one
# in flight to or from the host.
_HIDDEN_ALIVE = 6
# Slices of the MLP's activation alive at once in its backward (see layers/mlp.py).
_SLICES_ALIVE = 4


@dataclass(frozen=True)
class Entry:
    """One kind of memory.

    Attributes:
        kind: what it is.
        nbytes: on the rank.
        phase: "always", or when it is there besides: "training" or "rollout".
        formula: how it was counted, in words.
    """

    kind: str
    nbytes: int
    phase: str
    formula: str


@dataclass(frozen=True)
class Ledger:
    """Memory of one rank of a pipeline stage."""

    stage: int
    entries: tuple[Entry, ...]

    def total(self, phase: str) -> int:
        """Bytes in a phase: what is always there and what belongs to it."""
        return sum(e.nbytes for e in self.entries if e.phase in ("always", phase))

    @property
    def peak_bytes(self) -> int:
        """The larger of the two phases."""
        return max(self.total("training"), self.total("rollout"))


def _owned_masters(config: RunConfig, linears: list[Linear], gpus: int) -> int:
    """Adapter elements of a block that one rank's optimizer updates.

    A distributed optimizer splits them over the ranks that hold the same ones: data-parallel ranks, and of an expert's
    own factors those few that hold the same experts.
    """
    layout = config.parallel
    stage = max(1, gpus // layout.pipeline_model_parallel_size)
    # Context-parallel ranks hold the same parameters, and Megatron spreads the optimizer over them too.
    dense = max(1, stage // layout.tensor_model_parallel_size)
    width = layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size
    experts = max(1, stage // (width * layout.expert_model_parallel_size))
    if layout.use_distributed_optimizer is False:
        dense = experts = 1
    total = 0
    for linear in linears:
        shared, own = adapter_split(linear, config.lora)
        total += shared // dense + own // experts
    return total


def _static(config: RunConfig, shape: ModelShape, stage: int, blocks: int, gpus: int, packed: bool) -> list[Entry]:
    layout, width = config.parallel, _DTYPE_BYTES[config.model.dtype]
    linears = block_linears(shape, layout)
    weights = blocks * sum(linear.weights for linear in linears)
    adapters = blocks * sum(adapter_parameters(linear, config.lora) for linear in linears)
    masters = blocks * _owned_masters(config, linears, gpus)
    biases = blocks * linears[0].rows * shape.qkv_bias
    router = blocks * shape.experts.count * shape.hidden_size if shape.experts is not None else 0
    vocabulary = vocabulary_parameters(shape, layout, stage)
    last = stage == layout.pipeline_model_parallel_size - 1
    norms = blocks * block_norms(shape) + shape.hidden_size * last
    master = 12 if width == 2 else 8
    decoded = max(linear.rows * linear.cols * linear.copies for linear in linears) * width
    resident = packed and config.model.weight_cache == "resident"
    entries = [
        Entry(
            "frozen linears",
            round(weights * (NVFP4_BYTES if packed else width)),
            "always",
            "0.5625 bytes a weight" if packed else f"{width} bytes a weight",
        ),
        Entry(
            "embedding, head, norms",
            (vocabulary + biases + router) * width + norms * 4,
            "always",
            f"{width} bytes a parameter, 4 a norm scale",
        ),
        Entry("adapters", adapters * width, "always", f"{width} bytes a parameter"),
        Entry("adapter gradients", adapters * 4, "always", "FP32 buffer of Megatron's DDP"),
        Entry(
            "optimizer",
            masters * master,
            "always",
            ("FP32 copy and " if width == 2 else "") + "two moments" + (", spread over ranks" * (masters < adapters)),
        ),
    ]
    if resident:
        entries.append(Entry("decoded copy", weights * width, "always", "model.weight_cache: resident"))
    elif packed:
        entries.append(Entry("workspace", decoded, "always", "the largest matrix, decoded"))
    return entries


def _saved_by_a_block(shape: ModelShape, linears: list[Linear], tokens: int, width: int) -> int:
    """What one block keeps for backward without recomputation: inputs of both norms and of the adapters, q, k and v,
    the attention's output, linear_fc1's output."""
    features = 4 * shape.hidden_size + linears[0].rows + linears[1].cols
    routed = shape.experts.per_token if shape.experts is not None else 1
    return tokens * (features + linears[2].rows * routed) * width


def _training(config: RunConfig, shape: ModelShape, stage: int, blocks: int, gpus: int) -> list[Entry]:
    layout, width = config.parallel, _DTYPE_BYTES[config.model.dtype]
    tokens = -(-config.train.microbatch_tokens // layout.context_parallel_size)
    hidden_tokens = tokens // layout.tensor_model_parallel_size if layout.sequence_parallel else tokens
    hidden = hidden_tokens * shape.hidden_size * width
    linears = block_linears(shape, layout)
    routed = shape.experts.per_token if shape.experts is not None else 1
    wide = tokens * linears[2].rows * routed * width
    slices = _SLICES_ALIVE * min(tokens * routed, BACKWARD_ROWS) * linears[3].cols * width
    layer = wide + slices + _HIDDEN_ALIVE * hidden
    in_flight = layout.pipeline_model_parallel_size - stage  # micro-batches of 1F1B whose backward has not begun
    kept = {
        "none": blocks * _saved_by_a_block(shape, linears, tokens, width),
        "full": blocks * hidden,
        "full_offload": 0,
    }[config.train.recompute]
    entries = [
        Entry("activations kept", kept * in_flight, "training", f"train.recompute: {config.train.recompute}"),
    ]
    head = 0
    if stage == layout.pipeline_model_parallel_size - 1:
        columns = -(-shape.vocab_size // layout.tensor_model_parallel_size)
        rows = config.train.logprob_chunk_tokens or default_chunk_rows(tokens, columns)
        head = min(rows, tokens) * columns * 6 + 3 * hidden
    update = 4 * blocks * _owned_masters(config, linears, gpus)
    entries.append(
        Entry(
            "a layer or the update",
            max(layer, head, update),
            "training",
            "the largest of a layer's backward, the head's, and the update's copy of what it changes",
        )
    )
    return entries


def _rollout(config: RunConfig, shape: ModelShape, blocks: int) -> list[Entry]:
    if config.rollout.engine != "embedded":
        return []
    rollout, layout, width = config.rollout, config.parallel, _DTYPE_BYTES[config.model.dtype]
    rows = min(rollout.max_batch_size, rollout.prompts_per_step * rollout.group_size)
    length = rollout.max_prompt_tokens + rollout.max_new_tokens
    channels = shape.num_query_groups * shape.kv_channels // layout.tensor_model_parallel_size
    cache = rows * length * 2 * channels * width * blocks
    return [
        Entry("key-value cache", cache, "rollout", f"{rows} rows of {length} tokens"),
        Entry("logits", rows * shape.vocab_size * 8, "rollout", "FP32, twice while sampling"),
    ]


def ledgers(config: RunConfig, shape: ModelShape, *, gpus: int, packed: bool) -> list[Ledger]:
    """One ledger a pipeline stage, each of its worst rank.

    Args:
        config: the run.
        shape: the model.
        gpus: processes of the trainer.
        packed: whether the base is NVFP4.

    Raises:
        ConfigError: the layout does not fit the model.
    """
    layout = config.parallel
    check_layout(shape, layout.tensor_model_parallel_size)
    result = []
    for stage, blocks in enumerate(stage_blocks(shape.num_blocks, layout)):
        entries = _static(config, shape, stage, blocks, gpus, packed)
        entries += _training(config, shape, stage, blocks, gpus) + _rollout(config, shape, blocks)
        result.append(Ledger(stage, tuple(entries)))
    return result


def peak_bytes(config: RunConfig, shape: ModelShape, *, gpus: int, packed: bool) -> int:
    """Peak of the worst rank."""
    return max(ledger.peak_bytes for ledger in ledgers(config, shape, gpus=gpus, packed=packed))


def suggestions(config: RunConfig, shape: ModelShape, *, gpus: int, packed: bool, limit_bytes: int) -> list[str]:
    """Single changes of the config after which the run fits, with the peak that each would have."""
    from megatron_qerl.errors import UserError

    def changed(section: str, **values: object) -> Callable[[], RunConfig]:
        part = getattr(config, section)
        return lambda: config.model_copy(update={section: part.model_copy(update=values)})

    train, layout = config.train, config.parallel
    batch = max(1, config.rollout.max_batch_size // 4)
    candidates = [
        ("train.recompute: full", changed("train", recompute="full")),
        ("train.recompute: full_offload", changed("train", recompute="full_offload")),
        (f"rollout.max_batch_size: {batch}", changed("rollout", max_batch_size=batch)),
    ]
    for tokens in (train.microbatch_tokens // 2, train.microbatch_tokens // 4):
        candidates.append((f"train.microbatch_tokens: {tokens}", changed("train", microbatch_tokens=max(1, tokens))))
    for size in (2, 4, 8):
        if layout.tensor_model_parallel_size < size <= gpus:
            text = f"parallel.tensor_model_parallel_size: {size}"
            candidates.append((text, changed("parallel", tensor_model_parallel_size=size)))
    fitting = []
    for text, make in candidates:
        try:
            peak = peak_bytes(make(), shape, gpus=gpus, packed=packed)
        except UserError:
            continue
        if peak <= limit_bytes:
            fitting.append(f"{text} ({peak / 2**30:.1f} GiB)")
    return fitting
