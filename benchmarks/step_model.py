"""The models, weights and batches of ``benchmarks.step``: real shapes, random numbers made on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron_qerl.config.schema import RunConfig
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
    sequence: int = 1024
    steps: int = 3
    rank: int = 32
    attention: str = "auto"
    recompute: str = "full_offload"
    logprob_chunk: int = 256
    profile: bool = False


def random_weight(rows: int, cols: int, generator: torch.Generator) -> NVFP4Weight:
    """A random packed matrix on the generator's device, no element zero, standard deviation 0.018."""
    import torch

    from megatron_qerl.layers.kernels import NVFP4Weight

    def draw(low: int, high: int, shape: tuple[int, int]) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=generator.device, generator=generator)

    half = (rows, cols // 2)
    # A nibble is sign and magnitude 1..7; zeros would make a GPU draw less power and run faster than it does.
    packed = draw(1, 8, half) | draw(0, 2, half) << 3 | draw(1, 8, half) << 4 | draw(0, 2, half) << 7
    # E4M3 bytes 0x38..0x3f are 1 to 1.875.
    scale = draw(0x38, 0x40, (rows, cols // 16)).view(torch.float8_e4m3fn)
    return NVFP4Weight(packed, scale, 2.0**-8)


def install_random(model: PolicyChunks, arm: str, seed: int) -> None:
    """Random base, embedding, head and adapters, the same numbers in every arm."""
    import torch

    from megatron_qerl.layers.frozen import DenseFrozen, NVFP4Frozen
    from megatron_qerl.layers.kernels import nvfp4_materialize
    from megatron_qerl.layers.linear import FrozenColumnParallelLinear

    generator = torch.Generator(device=model.inv_freq.device).manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "install"):
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
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                parameter.normal_(0.0, 0.02, generator=generator)
            elif name.endswith("lora_A"):
                bound = 1.0 / math.sqrt(parameter.shape[1])
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
            "lora": {"rank": settings.rank, "alpha": float(settings.rank)},
            "data": {"train": {"kind": "arithmetic"}, "eval": {"kind": "arithmetic", "split": "heldout"}},
            "rollout": {
                "max_prompt_tokens": settings.sequence // 4,
                "max_new_tokens": settings.sequence - settings.sequence // 4 + 1,
            },
            "algorithm": {"name": "dapo", "likelihood": "replay"},
            "optimizer": {"learning_rate": 1e-5},
            "train": {
                "steps": 100,
                "microbatch_tokens": settings.tokens,
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
