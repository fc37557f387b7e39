"""The Megatron model is the Hugging Face model: same bytes, same logits, same adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_qerl.config.schema import LoraSection, NoiseSection, QuantizeConfig
from megatron_qerl.layers.packing import pack
from megatron_qerl.models.adapter_state import collect, restore
from megatron_qerl.models.export import write_adapter
from megatron_qerl.models.policy import LogprobQuery
from megatron_qerl.models.to_hf import base_tensors
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from tests.support.loaded import Loaded, load, randomize_adapters
from tests.support.tiny_model import write_model

CASES = [
    ("llama", True, {}),
    ("llama", False, {"num_key_value_heads": 4}),
    ("llama", True, {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}),
    ("qwen2", True, {}),
    ("qwen2", False, {"num_key_value_heads": 1}),
    ("qwen3", True, {"head_dim": 32}),
    ("qwen3", False, {}),
]
CPU = torch.device("cpu")


def case_id(case: object) -> str:
    return str(case).replace(" ", "")


@pytest.fixture(scope="module", params=CASES, ids=case_id)
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, tied, sizes = request.param
    return write_model(tmp_path_factory.mktemp("model"), family, tied=tied, scale=0.1, **sizes)


def hf_logits(path: Path, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)(ids).logits


def last_logits(loaded: Loaded, ids: Tensor) -> Tensor:
    """[S, V] logits of every position of one sequence, by asking for each prefix's last."""
    with torch.no_grad():
        return torch.cat([loaded.model(ids[:, : n + 1], torch.arange(n + 1)[None]) for n in range(ids.shape[1])])


def random_ids(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 80, (1, n), generator=torch.Generator().manual_seed(seed))


def test_logits_equal_transformers(model_folder: Path) -> None:
    ids = random_ids(13)
    ours, theirs = last_logits(load(model_folder), ids), hf_logits(model_folder, ids)[0]
    assert theirs.abs().max() > 0.1
    assert (ours - theirs).abs().max() <= 1e-5


def test_hf_to_megatron_to_hf_is_bit_equal(model_folder: Path) -> None:
    loaded = load(model_folder)
    back = dict(base_tensors(loaded.model, loaded.shape))
    assert sorted(back) == sorted(loaded.folder.names())
    for name, tensor in back.items():
        assert torch.equal(tensor, loaded.folder.read(name).to(tensor.dtype)), name


def test_every_tensor_of_the_folder_matters(model_folder: Path) -> None:
    """Each layer-1 tensor changes the logits when it changes: no name is mapped to nothing."""
    ids = random_ids(9)
    loaded = load(model_folder)
    clean = last_logits(loaded, ids)
    real = loaded.folder.read
    for name in loaded.folder.names():
        if ".layers.0." in name:
            continue
        loaded.folder.read = lambda n, *a, _w=name, **k: real(n, *a, **k) + (0.1 if n == _w else 0)  # type: ignore[method-assign]
        try:
            from megatron_qerl.models.load import load_base

            load_base(loaded.model, loaded.shape, loaded.folder, resident=False)
        finally:
            loaded.folder.read = real  # type: ignore[method-assign]
        moved = (last_logits(loaded, ids) - clean).abs().max()
        # A constant added to k shifts every score alike, so softmax forgets it.
        assert name.endswith("k_proj.bias") or moved > 1e-4, name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_nvfp4_bytes_are_held_verbatim_and_mean_the_dequantised_model(family: str, tmp_path: Path) -> None:
    from megatron_qerl.nvfp4.format import decode
    from megatron_qerl.nvfp4.quantize import quantize

    source = write_model(tmp_path / "source", family, tied=False, dtype=torch.bfloat16, scale=0.1)
    folder = quantize(QuantizeConfig(source=source, output=tmp_path / "nvfp4", device="cpu"))
    loaded = load(folder)
    back = dict(base_tensors(loaded.model, loaded.shape))
    stored = ModelFolder.open(folder)
    packed = [n for n in stored.names() if stored.dtype(n) == torch.uint8]
    assert len(packed) == 7 * 2
    for name in stored.names():
        ours, theirs = back[name], stored.read(name)
        assert ours.shape == theirs.shape, name
        ours, theirs = ours.reshape(-1), theirs.to(ours.dtype).reshape(-1)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name

    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for module in (n.removesuffix(".weight") for n in packed):
        part = stored.read_nvfp4(module)
        matrix = decode(part.packed, part.block_scale, part.tensor_scale, torch.float32)
        reference.get_submodule(module).weight.data.copy_(matrix)
    ids = random_ids(11)
    with torch.no_grad():
        expected = reference(ids).logits[0]
    for resident in (False, True):
        assert (last_logits(load(folder, resident=resident), ids) - expected).abs().max() <= 1e-5


def packed_logprobs(loaded: Loaded, *, share: bool, seed: int = 0) -> Tensor:
    groups = [
        (random_ids(5, seed)[0].tolist(), [random_ids(n, seed + n)[0].tolist() for n in (4, 1, 7)]),
        (random_ids(8, seed + 1)[0].tolist(), [random_ids(n, seed + 10 + n)[0].tolist() for n in (2, 3)]),
    ]
    tokens = pack(groups, CPU, share_prefix=share)
    query = LogprobQuery(tokens.logit_rows, tokens.targets, 0.8, 4)
    logprobs, _ = loaded.model(tokens.token_ids, tokens.position_ids, packed_seq_params=tokens.params, query=query)
    return logprobs


def test_shared_prefix_equals_separate_sequences_in_value_and_gradient(model_folder: Path) -> None:
    loaded = load(model_folder, lora=LoraSection(rank=4, alpha=8.0))
    randomize_adapters(loaded.model)
    gradients = []
    values = []
    for share in (True, False):
        loaded.model.zero_grad()
        logprobs = packed_logprobs(loaded, share=share)
        (logprobs * torch.arange(1, logprobs.numel() + 1)).sum().backward()
        values.append(logprobs.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in loaded.model.parameters() if p.requires_grad]))  # type: ignore[union-attr]
    assert torch.allclose(values[0], values[1], atol=1e-5)
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-5 * gradients[0].abs().max()


def test_full_recomputation_gives_the_same_gradient(model_folder: Path) -> None:
    gradients = []
    for recompute in ("none", "full"):
        loaded = load(model_folder, lora=LoraSection(rank=4, alpha=8.0), recompute=recompute)
        randomize_adapters(loaded.model)
        loaded.model.train()
        with loaded.registry.applied(loaded.registry.state(50, 100)):
            packed_logprobs(loaded, share=True).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in loaded.model.parameters() if p.requires_grad]))  # type: ignore[union-attr]
    assert torch.equal(gradients[0], gradients[1])


def test_adapter_gradient_matches_finite_differences(tmp_path: Path) -> None:
    loaded = load(write_model(tmp_path, "qwen2", scale=0.1), lora=LoraSection(rank=4, alpha=8.0))
    randomize_adapters(loaded.model)
    packed_logprobs(loaded, share=True).double().sum().backward()
    parameters = [p for p in loaded.model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        p = parameters[int(torch.randint(len(parameters), (1,), generator=generator))]
        i = int(torch.randint(p.numel(), (1,), generator=generator))
        flat, step = p.data.view(-1), 1e-2
        values = []
        for sign in (1, -1):
            flat[i] += sign * step
            with torch.no_grad():
                values.append(float(packed_logprobs(loaded, share=True).double().sum()))
            flat[i] -= sign * step
        assert p.grad is not None
        # Truncation is O(step^2); float32 sums of 17 log-probabilities carry about 1e-5, so 1e-3 after division.
        assert float(p.grad.view(-1)[i]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-2, abs=3e-3)


def test_exported_adapter_loads_into_peft_and_gives_the_same_logits(model_folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lora = LoraSection(rank=4, alpha=12.0)
    loaded = load(model_folder, lora=lora)
    randomize_adapters(loaded.model)
    ids = random_ids(10)
    base = last_logits(load(model_folder), ids)
    ours = last_logits(loaded, ids)
    write_adapter(collect(loaded.model, loaded.shape), lora, model_folder, tmp_path / "adapter")
    with_adapter = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32), tmp_path / "adapter"
    )
    with torch.no_grad():
        theirs = with_adapter(ids).logits[0]
    assert (ours - base).abs().max() > 1e-2
    assert (ours - theirs).abs().max() <= 2e-5


def test_fresh_adapter_changes_nothing_and_starts_alike_from_the_same_seed(model_folder: Path) -> None:
    ids = random_ids(6)
    one = load(model_folder, lora=LoraSection(rank=4))
    assert torch.equal(last_logits(one, ids), last_logits(load(model_folder), ids))
    a, b = collect(one.model, one.shape), collect(load(model_folder, lora=LoraSection(rank=4)).model, one.shape)
    other = collect(load(model_folder, lora=LoraSection(rank=4), seed=2).model, one.shape)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert any(not torch.equal(a[n], other[n]) for n in a)


def test_adapter_targets_are_respected_and_state_round_trips(model_folder: Path) -> None:
    lora = LoraSection(rank=4, targets=("k_proj", "up_proj", "down_proj"))
    loaded = load(model_folder, lora=lora)
    tensors = collect(loaded.model, loaded.shape)
    assert {n.split(".")[-2] for n in tensors} == set(lora.targets)
    assert len(tensors) == 2 * 2 * 3
    randomize_adapters(loaded.model)
    changed = collect(loaded.model, loaded.shape)
    restore(loaded.model, loaded.shape, tensors, "test")
    again = collect(loaded.model, loaded.shape)
    assert all(torch.equal(again[n], tensors[n]) for n in tensors)
    assert any(not torch.equal(changed[n], tensors[n]) for n in tensors)


def test_noise_roles_of_every_family_act(model_folder: Path) -> None:
    roles = ["input", "post_attention", "final"]
    if "qwen3" in (model_folder / "config.json").read_text():
        roles += ["q_norm", "k_norm"]
    ids = random_ids(6)
    for role in roles:
        loaded = load(model_folder, noise=NoiseSection(roles=(role,), sigma_start=0.05))  # type: ignore[arg-type]
        clean = last_logits(loaded, ids)
        with loaded.registry.applied(loaded.registry.state(10, 100)):
            noisy = last_logits(loaded, ids)
        assert (noisy - clean).abs().max() > 1e-4, role
        assert torch.equal(last_logits(loaded, ids), clean), role
