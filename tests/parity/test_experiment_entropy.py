"""The probe's entropies against transformers' logits: at other temperatures, and under noise added by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_qerl.config.loader import load_config
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.experiment.entropy import _opened
from megatron_qerl.metrics.entropy import token_entropy
from tests.support.tiny_run import write_run

NORMS = {"input": "input_layernorm", "post_attention": "post_attention_layernorm"}


def test_the_probes_entropy_is_that_of_transformers_logits_with_and_without_noise(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config: RunConfig = load_config(write_run(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)

    def reference(groups, temperature: float) -> float:
        entropies = []
        for group in groups:
            (response,) = group.responses
            ids = torch.tensor([[*group.prompt_ids, *response.token_ids]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(group.prompt_ids) - 1 : -1].double().numpy()
            entropies.append(token_entropy(logits, temperature))
        return float(np.concatenate(entropies).mean())

    with _opened(config) as probe:
        draws = probe.contexts(4, 1)
        assert [draw.noise.stage for draw in draws] == [0, 1, 2]
        assert draws[0].nats == pytest.approx(reference(draws[0].groups, 1.0), abs=2e-5)
        assert probe.entropy(draws[1].groups, None, 1.3) == pytest.approx(reference(draws[1].groups, 1.3), abs=2e-5)
        clean = reference(draws[1].groups, 1.0)
        for layer, role in probe.session.registry.expected:
            scale = getattr(model.model.layers[layer], NORMS[role]).weight
            scale.data += probe.session.registry.displacement(draws[1].noise, (layer, role))
        noisy = reference(draws[1].groups, 1.0)
    assert draws[1].nats == pytest.approx(noisy, abs=2e-5)
    assert abs(noisy - clean) > 1e-3, "the noise must matter, or the comparison says nothing"
