"""The models, weights and batches of ``benchmarks.step``: real shapes, random numbers made on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron_qerl.config.schema import RunConfig
    from megatron_qerl.layers.grouped import NVFP4Experts
    from megatron_qerl.layers.kernels import NVFP4Weight
    from megatron_qerl.models.policy import PolicyChunks
    from megatron_qerl.trainer.batch import TrainingGroup

_QWEN25 = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "intermediate_size": 6144,
}
MODELS: dict[str, dict[str, Any]] = {
    "7B": _QWEN25
    | {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "32B": _QWEN25
    | {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "30B-A3B": _QWEN3_MOE
    | {"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "moe_intermediate_size": 768},
    "235B-A22B": _QWEN3_MOE
    | {"num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536},
    "tiny_moe": _QWEN3_MOE
    | {
        "vocab_size": 256,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "tiny": _QWEN25
    | {
        "vocab_size": 256,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


@dataclass(frozen=True)
class Settings:
    """What every arm of a run shares."""

    tokens: int = 8192
    microbatch: int = 8192
    sequence: int = 1024
    steps: int = 3
    rank: int = 32
    attention: str = "auto"
    recompute: str = "full_offload"
    logprob_chunk: int = 256
    expert_mode: str = "per_expert"
    profile: bool = False


_TENSOR_SCALE = 2.0**-8


def _random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes, block scales) of matrices [..., N, K]."""
    import torch

    def draw(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=generator.device, generator=generator)

    half = (*shape[:-1], shape[-1] // 2)
    # A nibble is sign and magnitude 1..7; zeros would make a GPU draw less power and run faster than it does.
    packed = draw(1, 8, half) | draw(0, 2, half) << 3 | draw(1, 8, half) << 4 | draw(0, 2, half) << 7
    # E4M3 bytes 0x38..0x3f are 1 to 1.875.
    return packed, draw(0x38, 0x40, (*shape[:-1], shape[-1] // 16)).view(torch.float8_e4m3fn)


def random_weight(rows: int, cols: int, generator: torch.Generator) -> NVFP4Weight:
    """A random packed matrix on the generator's device, no element zero, standard deviation 0.018."""
    from megatron_qerl.layers.kernels import NVFP4Weight

    return NVFP4Weight(*_random_bytes((rows, cols), generator), _TENSOR_SCALE)


def random_experts(experts: int, rows: int, cols: int, generator: torch.Generator) -> NVFP4Experts:
    """As ``random_weight``, one matrix an expert."""
    import torch

    from megatron_qerl.layers.grouped import NVFP4Experts

    packed, scale = _random_bytes((experts, rows, cols), generator)
    return NVFP4Experts(packed, scale, [_TENSOR_SCALE] * experts, torch.bfloat16, resident=False)


def install_random(model: PolicyChunks, arm: str, seed: int) -> None:
    """Random base, embedding, head, routers and adapters, the same numbers in every arm and on every rank."""
    import torch

    from megatron_qerl.layers.experts import ExpertLinear
    from megatron_qerl.layers.frozen import DenseFrozen, NVFP4Frozen
    from megatron_qerl.layers.grouped import DenseExperts
    from megatron_qerl.layers.kernels import nvfp4_materialize
    from megatron_qerl.layers.linear import FrozenColumnParallelLinear

    generator = torch.Generator(device=model.inv_freq.device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, ExpertLinear):
            stack = random_experts(module.num_local, module.layout.rows, module.in_features, generator)
            matrices = (stack.expert(e).matrix(torch.bfloat16) for e in range(module.num_local))
            module.install(stack if arm == "nvfp4" else DenseExperts(torch.stack(list(matrices))))
        elif hasattr(module, "install"):
            column = isinstance(module, FrozenColumnParallelLinear)
            cols = module.input_size if column else module.input_size_per_partition
            rows = module.output_size_per_partition if column else module.output_size
            weight = random_weight(rows, cols, generator)
            if arm == "nvfp4":
                module.install(NVFP4Frozen(weight, torch.bfloat16, resident=False))
            else:
                module.install(DenseFrozen(nvfp4_materialize(weight, torch.bfloat16)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("word_embeddings.weight", "output_layer.weight", "router.weight")):
                parameter.normal_(0.0, 0.02, generator=generator)
            elif name.endswith("lora_A"):
                bound = 1.0 / math.sqrt(parameter.shape[-1])
                parameter.uniform_(-bound, bound, generator=generator)
            elif name.endswith("lora_B"):
                parameter.normal_(0.0, 1e-3, generator=generator)
            elif name.endswith("linear_qkv.bias"):
                parameter.normal_(0.0, 0.1, generator=generator)


def run_config(settings: Settings) -> RunConfig:
    """The run's configuration, as the trainer wants it."""
    from megatron_qerl.config.schema import RunConfig

    return RunConfig.model_validate(
        {
            "run": {"name": "step"},
            "model": {
                "path": Path("random"),
                "attention": settings.attention,
                "max_sequence_length": settings.sequence + 1,
            },
            "lora": {"rank": settings.rank, "alpha": float(settings.rank), "expert_mode": settings.expert_mode},
            "data": {"train": {"kind": "arithmetic"}, "eval": {"kind": "arithmetic", "split": "heldout"}},
            "rollout": {
                "max_prompt_tokens": settings.sequence // 4,
                "max_new_tokens": settings.sequence - settings.sequence // 4 + 1,
            },
            "algorithm": {"name": "dapo", "likelihood": "replay"},
            "optimizer": {"learning_rate": 1e-5},
            "train": {
                "steps": 100,
                "microbatch_tokens": min(settings.tokens, settings.microbatch),
                "share_prompt_prefix": False,
                "recompute": "full",
                "logprob_chunk_tokens": settings.logprob_chunk,
            },
        }
    )


def random_groups(settings: Settings, vocab_size: int, rollout: torch.Tensor | None) -> list[TrainingGroup]:
    """Sequences of ``settings.sequence`` packed tokens each, a quarter of it prompt.

    Args:
        rollout: log-probabilities of all response tokens in order, or None for zeros.
    """
    import numpy as np

    from megatron_qerl.trainer.batch import TrainingGroup, TrainingResponse

    draw = np.random.default_rng(1)
    prompt = settings.sequence // 4
    response = settings.sequence - prompt + 1  # the last token of a response is a target only
    groups = []
    for index in range(settings.tokens // settings.sequence):
        ids = draw.integers(0, vocab_size, prompt + response).tolist()
        part = slice(index * response, (index + 1) * response)
        logprobs = [0.0] * response if rollout is None else rollout[part].tolist()
        advantage = -1.0 if index % 2 else 1.0
        answer = TrainingResponse(tuple(ids[prompt:]), tuple(logprobs), advantage, index)
        groups.append(TrainingGroup(tuple(ids[:prompt]), (answer,)))
    return groups
