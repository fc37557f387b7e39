"""Do trainer, embedded engine and transformers compute the same numbers?

python -m benchmarks.parity_cpu   (after make demo has made models/smollm2-hf and models/smollm2-nvfp4)

Writes results/parity_cpu.json. ``engine``: |engine - trainer| log-probability of sampled tokens, in float32 and
bfloat16, clean and under noise, with a random adapter. ``transformers``: largest difference of logits on the
unquantised model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import RESULTS, write
from megatron_qerl.config.schema import LoraSection, ModelSection, NoiseSection, ParallelSection
from megatron_qerl.layers.packing import pack
from megatron_qerl.models.build import build_policy
from megatron_qerl.models.load import initialize_adapters, load_base
from megatron_qerl.models.policy import LogprobQuery
from megatron_qerl.models.shape import read_shape
from megatron_qerl.models.walk import expected_norms, norms
from megatron_qerl.noise.registry import NoiseRegistry
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.parallel.setup import initialize
from megatron_qerl.rollout.engine import GenerationRequest
from megatron_qerl.rollout.engines.embedded import EmbeddedEngine
from megatron_qerl.session import load_tokenizer
from megatron_qerl.types import PolicyVersion, Problem, Prompt, SamplingParams

QUESTIONS = ("What is 3 + 4?", "Write a sentence about rivers.", "How much is 7 times 8?", "Name three colours.")


def load(path: Path, dtype: str, lora: LoraSection | None) -> Any:
    """(model, shape, registry) of a folder."""
    folder = ModelFolder.open(path)
    shape = read_shape(folder.config, path)
    section = ModelSection(path=path, dtype=dtype)  # type: ignore[arg-type]
    model = build_policy(folder.config, section, ParallelSection(), lora, seed=1)
    load_base(model, shape, folder, resident=True)
    initialize_adapters(model, shape)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    return model, shape, NoiseRegistry(norms(model, shape), expected_norms(shape), NoiseSection(), 1)


def engine_rows(path: Path) -> list[dict[str, Any]]:
    """Engine against trainer."""
    tokenizer = load_tokenizer(path)
    prompts = []
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        prompts.append(Prompt(Problem(question, question, "", question, "parity"), ids))
    rows = []
    for dtype in ("float32", "bfloat16"):
        model, _, registry = load(path, dtype, LoraSection(rank=16))
        for step, label in ((0, "clean"), (15, "sigma 1e-2"), (95, "sigma 5e-4")):
            state = registry.state(step, 100)
            engine = EmbeddedEngine(model, registry, 64)
            engine.publish(PolicyVersion("base", 0, "random", state, 1.0, 1.0, 0))
            sampling = SamplingParams(1.0, 48, (int(tokenizer.eos_token_id),), 1)
            groups = engine.generate([GenerationRequest(p, 8, 0) for p in prompts], sampling)
            packs = [(p.token_ids, [c.token_ids for c in g]) for p, g in zip(prompts, groups, strict=True)]
            tokens = pack(packs, torch.device("cpu"), share_prefix=True)
            query = LogprobQuery(tokens.logit_rows, tokens.targets, 1.0, 256)
            with torch.no_grad(), registry.applied(state):
                ours, _ = model(tokens.token_ids, tokens.position_ids, packed_seq_params=tokens.params, query=query)
            theirs = torch.tensor([x for g in groups for c in g for x in c.logprobs])
            difference = (ours - theirs).abs()
            rows.append(
                {
                    "dtype": dtype,
                    "noise": label,
                    "tokens": theirs.numel(),
                    "mean_abs": float(difference.mean()),
                    "max_abs": float(difference.max()),
                }
            )
    return rows


def transformers_row(path: Path) -> dict[str, float]:
    """Our float32 logits against transformers' on one sequence of 64 random tokens."""
    from transformers import AutoModelForCausalLM

    model, shape, _ = load(path, "float32", None)
    ids = torch.randint(0, shape.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        theirs, truth = reference(ids).logits[0, -1], exact(ids).logits[0, -1]
        ours = model(ids, torch.arange(64)[None])[0]
    return {
        "max_abs_difference": float((ours - theirs).abs().max()),
        "max_abs_logit": float(theirs.abs().max()),
        "ours_to_float64": float((ours - truth).abs().max()),
        "transformers_to_float64": float((theirs - truth).abs().max()),
    }


if __name__ == "__main__":
    initialize(ParallelSection(), "auto", 1)
    torch.set_num_threads(1)
    write(
        RESULTS / "parity_cpu.json",
        {
            "engine": engine_rows(Path("models/smollm2-nvfp4")),
            "transformers": transformers_row(Path("models/smollm2-hf")),
        },
    )
