"""The same path on a GPU: same numbers as on a CPU, same proofs. docs/verified.md records the last run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_qerl.config.schema import LoraSection, NoiseSection, QuantizeConfig, RunConfig
from megatron_qerl.layers.packing import pack
from megatron_qerl.models.policy import LogprobQuery
from megatron_qerl.rollout.engine import GenerationRequest
from megatron_qerl.types import PolicyVersion, Problem, Prompt, SamplingParams
from tests.support.loaded import Loaded, load, randomize_adapters
from tests.support.tiny_model import write_model

pytestmark = pytest.mark.gpu
PROMPTS = ((5, 9, 11), (20, 21, 22, 23, 24, 25, 26), (40,))


def scored(loaded: Loaded, responses: list[list[tuple[int, ...]]], noise: object = None) -> torch.Tensor:
    device = loaded.model.inv_freq.device
    tokens = pack(list(zip(PROMPTS, responses, strict=True)), device, share_prefix=True)
    query = LogprobQuery(tokens.logit_rows, tokens.targets, 1.0, 16)
    with torch.no_grad(), loaded.registry.applied(noise):  # type: ignore[arg-type]
        return loaded.model(tokens.token_ids, tokens.position_ids, packed_seq_params=tokens.params, query=query)[
            0
        ].cpu()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("quantized", [False, True])
def test_logprobs_on_a_gpu_equal_transformers_on_a_cpu(family: str, quantized: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from megatron_qerl.nvfp4.checkpoint import ModelFolder
    from megatron_qerl.nvfp4.quantize import quantize

    source = write_model(tmp_path / "source", family, dtype=torch.bfloat16, scale=0.1)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    folder = source
    if quantized:
        folder = quantize(QuantizeConfig(source=source, output=tmp_path / "nvfp4", device="cpu"))
        stored = ModelFolder.open(folder)
        for module in stored.nvfp4_modules:
            reference.get_submodule(module).weight.data.copy_(stored.read_nvfp4(module).decode(torch.float32))
    loaded = load(folder)
    assert loaded.model.inv_freq.is_cuda
    responses = [[(7, 8, 9), (30,)], [(1, 2)], [(60, 61, 62, 63)]]
    expected = []
    for prompt, group in zip(PROMPTS, responses, strict=True):
        for response in group:
            with torch.no_grad():
                logits = reference(torch.tensor([[*prompt, *response]])).logits[0].log_softmax(-1)
            expected += [float(logits[len(prompt) - 1 + i, t]) for i, t in enumerate(response)]
    assert (scored(loaded, responses) - torch.tensor(expected)).abs().max() <= 2e-5


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.25)])
def test_engine_and_trainer_agree_under_noise(dtype: str, bound: float, tmp_path: Path) -> None:
    from megatron_qerl.rollout.engines.embedded import EmbeddedEngine

    path = write_model(tmp_path, "qwen2", scale=0.15)
    loaded = load(path, dtype=dtype, lora=LoraSection(rank=4), noise=NoiseSection(sigma_start=0.05))
    randomize_adapters(loaded.model)
    state = loaded.registry.state(10, 100)
    engine = EmbeddedEngine(loaded.model, loaded.registry, 64)
    engine.publish(PolicyVersion("b", 0, "a", state, 1.0, 1.0, 0))
    prompts = [Prompt(Problem(str(i), "", "", "", ""), p) for i, p in enumerate(PROMPTS)]
    groups = engine.generate([GenerationRequest(p, 8, 0) for p in prompts], SamplingParams(1.0, 12, (1,), 3))
    rollout = torch.tensor([x for g in groups for c in g for x in c.logprobs])
    responses = [[c.token_ids for c in g] for g in groups]
    assert (scored(loaded, responses, state) - rollout).abs().max() <= bound
    assert (scored(loaded, responses) - rollout).abs().mean() > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_training_step_updates_the_adapter(dtype: str, recompute: str, tmp_path: Path) -> None:
    from megatron_qerl.trainer.batch import TrainingGroup, TrainingResponse
    from megatron_qerl.trainer.optimizer import AdapterOptimizer
    from megatron_qerl.trainer.step import Trainer

    path = write_model(tmp_path, "llama", scale=0.1)
    config = RunConfig.model_validate(
        {
            "run": {"name": "gpu"},
            "model": {"path": path, "dtype": dtype, "max_sequence_length": 64},
            "lora": {"rank": 4},
            "noise": {"sigma_start": 0.05, "sigma_end": 0.01, "stages": 3},
            "data": {"train": {"kind": "arithmetic"}, "eval": {"kind": "arithmetic", "split": "heldout"}},
            "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 16},
            "algorithm": {"name": "dapo", "likelihood": "replay"},
            "train": {"steps": 4, "recompute": recompute},
        }
    )
    loaded = load(path, dtype=dtype, lora=config.lora, noise=config.noise, recompute=recompute)
    randomize_adapters(loaded.model)
    optimizer = AdapterOptimizer(loaded.model, config.optimizer, 4)
    trainer = Trainer(loaded.model, loaded.registry, optimizer, config)
    noise = loaded.registry.state(2, 4)
    responses = [[(7, 8, 9), (30,)], [(1, 2)], [(60, 61, 62, 63)]]
    pieces = iter(scored(loaded, responses, noise).split([len(r) for g in responses for r in g]))
    groups = [
        TrainingGroup(
            p, tuple(TrainingResponse(r, tuple(next(pieces).tolist()), (-1.0) ** i, i) for i, r in enumerate(g))
        )
        for p, g in zip(PROMPTS, responses, strict=True)
    ]
    loaded.model.train()
    for _ in range(3):
        stats = trainer.train_step(groups, noise)
        assert stats.updates[0].update_norm > 0
        assert stats.updates[0].gradient_norm > 0
    assert optimizer.updates == 3
    assert trainer.optimizer.state.whole(optimizer.parameters()[0][1], "exp_avg").abs().max() > 0
