"""Parameters of a model on one rank, counted from its sizes: what ``ledger`` turns into bytes.

Linear weights are counted as the loader cuts them: linear_qkv and linear_fc1 by rows, linear_proj and linear_fc2 by
columns, over the tensor-parallel ranks; an expert's over the expert-tensor-parallel ranks, and experts themselves over
the expert-parallel ranks. Blocks go to pipeline stages as ``models.build.layer_pattern`` deals them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_qerl.config.schema import LoraSection, ParallelSection
from megatron_qerl.models.shape import ModelShape


@dataclass(frozen=True)
class Linear:
    """One frozen matrix of a block on one rank.

    Attributes:
        rows, cols: N and K here.
        parts: Hugging Face projections in it, with their rows here.
        split: which side tensor parallelism cuts.
        copies: how many such matrices a block has on this rank (local experts).
    """

    rows: int
    cols: int
    parts: tuple[tuple[str, int], ...]
    split: str
    copies: int = 1

    @property
    def weights(self) -> int:
        """Elements of all copies."""
        return self.rows * self.cols * self.copies


def block_linears(shape: ModelShape, layout: ParallelSection) -> list[Linear]:
    """The frozen matrices of one block on one rank."""
    t, hidden, head = layout.tensor_model_parallel_size, shape.hidden_size, shape.kv_channels
    q, kv = shape.num_attention_heads * head // t, shape.num_query_groups * head // t
    linears = [
        Linear(q + 2 * kv, hidden, (("q_proj", q), ("k_proj", kv), ("v_proj", kv)), "rows"),
        Linear(hidden, q, (("o_proj", hidden),), "cols"),
    ]
    width, copies, cut = shape.ffn_hidden_size, 1, t
    if shape.experts is not None:
        width, copies = shape.experts.ffn_hidden_size, shape.experts.count // layout.expert_model_parallel_size
        cut = layout.expert_tensor_parallel_size or t
    width //= cut
    linears.append(Linear(2 * width, hidden, (("gate_proj", width), ("up_proj", width)), "rows", copies))
    linears.append(Linear(hidden, width, (("down_proj", hidden),), "cols", copies))
    return linears


def adapter_split(linear: Linear, lora: LoraSection) -> tuple[int, int]:
    """Elements of A and B of one matrix's adapters: (what all data-parallel ranks hold alike, the experts' own)."""
    adapted = [rows for name, rows in linear.parts if name in lora.targets]
    a, b = len(adapted) * lora.rank * linear.cols, sum(adapted) * lora.rank
    if linear.copies == 1:
        return a + b, 0
    if lora.expert_mode == "none":
        return 0, 0
    if lora.expert_mode == "shared_outer":
        # The factor on the side of the hidden size is one for all experts.
        outer, inner = (a, b) if linear.split == "rows" else (b, a)
        return outer, inner * linear.copies
    return 0, (a + b) * linear.copies


def adapter_parameters(linear: Linear, lora: LoraSection) -> int:
    """Elements of A and B of one matrix's adapter, all copies."""
    return sum(adapter_split(linear, lora))


def stage_blocks(num_blocks: int, layout: ParallelSection) -> list[int]:
    """Blocks of each pipeline stage; remainders go to the first segments."""
    stages, virtual = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size or 1
    base, extra = divmod(num_blocks, stages * virtual)
    return [sum(base + (v * stages + s < extra) for v in range(virtual)) for s in range(stages)]


def vocabulary_parameters(shape: ModelShape, layout: ParallelSection, stage: int) -> int:
    """Elements of embedding and head on one rank of a stage."""
    last = layout.pipeline_model_parallel_size - 1
    table = -(-shape.vocab_size // layout.tensor_model_parallel_size) * shape.hidden_size
    tables = (stage == 0) + (stage == last and not (shape.tied and last == 0))
    return table * tables


def block_norms(shape: ModelShape) -> int:
    """FP32 scales of a block's norms."""
    return 2 * shape.hidden_size + (2 * shape.kv_channels if shape.family.qk_norm else 0)
