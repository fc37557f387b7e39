"""A mixture of experts is the Hugging Face model: same bytes, same logits, same adapter, and routes that replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_qerl.config.schema import LoraSection, ParallelSection, QuantizeConfig
from megatron_qerl.errors import CheckpointError, ConfigError, UserError
from megatron_qerl.layers.experts import _WeightedGate
from megatron_qerl.layers.grouped import DenseExperts, NVFP4Experts, grouped_product
from megatron_qerl.layers.packing import pack
from megatron_qerl.layers.routing import RoutingRecord
from megatron_qerl.models.adapter_state import collect, restore
from megatron_qerl.models.expert_names import repeat_shared, stack_experts
from megatron_qerl.models.export import write_adapter
from megatron_qerl.models.load import load_base
from megatron_qerl.models.policy import LogprobQuery
from megatron_qerl.models.shape import check_experts, read_shape
from megatron_qerl.models.to_hf import base_tensors
from megatron_qerl.nvfp4.checkpoint import ModelFolder, read_json
from megatron_qerl.nvfp4.quantize import quantize
from megatron_qerl.nvfp4.verify import verify
from megatron_qerl.parallel.layout import check_world
from tests.parity.test_models import hf_logits, last_logits, random_ids
from tests.support.loaded import Loaded, load, randomize_adapters
from tests.support.tiny_model import write_model

CASES: list[dict[str, Any]] = [
    {},
    {"norm_topk_prob": False, "num_experts": 4, "num_experts_per_tok": 1},
    {"moe_intermediate_size": 48, "num_experts_per_tok": 8, "head_dim": 32},
]
CPU = torch.device("cpu")
MODES = ("per_expert", "shared_outer")
EXPERTS, TOP_K, BLOCKS = 8, 3, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", tied=False, scale=0.1)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("nvfp4")
    source = write_model(path / "source", "qwen3_moe", tied=False, scale=0.1, dtype=torch.bfloat16)
    return source, quantize(QuantizeConfig(source=source, output=path / "nvfp4", device="cpu"))


def packed_logprobs(loaded: Loaded, *, share: bool = True, routing: RoutingRecord | None = None) -> Tensor:
    """Log-probabilities of two packed groups; ``routing`` is the record that the pack carries."""
    groups = [
        (random_ids(5, 0)[0].tolist(), [random_ids(n, n)[0].tolist() for n in (4, 1, 7)]),
        (random_ids(8, 1)[0].tolist(), [random_ids(n, 10 + n)[0].tolist() for n in (2, 3)]),
    ]
    tokens = pack(groups, CPU, share_prefix=share)
    tokens.params.routing = routing
    query = LogprobQuery(tokens.logit_rows, tokens.targets, 0.8, 4)
    logprobs: Tensor = loaded.model(
        tokens.token_ids, tokens.position_ids, packed_seq_params=tokens.params, query=query
    )[0]
    return logprobs


def adapted(path: Path, mode: str = "per_expert", **arguments: Any) -> Loaded:
    loaded = load(path, lora=LoraSection(rank=4, alpha=8.0, expert_mode=mode), **arguments)  # type: ignore[arg-type]
    randomize_adapters(loaded.model)
    return loaded


def gradients(loaded: Loaded, loss: Tensor) -> dict[str, Tensor]:
    loaded.model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in loaded.model.named_parameters() if p.requires_grad}  # type: ignore[union-attr]


# -- the base ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_logits_equal_transformers_and_bytes_come_back(sizes: dict[str, Any], tmp_path: Path) -> None:
    path = write_model(tmp_path, "qwen3_moe", tied=False, scale=0.1, **sizes)
    loaded, ids = load(path), random_ids(13)
    ours, theirs = last_logits(loaded, ids), hf_logits(path, ids)[0]
    assert theirs.abs().max() > 0.1
    assert (ours - theirs).abs().max() <= 1e-5
    back = dict(base_tensors(loaded.model, loaded.shape))
    assert sorted(back) == sorted(loaded.folder.names())
    for name, tensor in back.items():
        assert torch.equal(tensor, loaded.folder.read(name).to(tensor.dtype)), name


def test_every_tensor_of_a_block_matters(folder: Path) -> None:
    """No name is mapped to nothing, and no expert's tensor into another expert."""
    ids = random_ids(24)
    loaded = load(folder)
    with loaded.model.routing.recording() as kept:
        loaded.model(ids, torch.arange(24)[None])
    used = kept.record().experts[1].unique().tolist()
    assert len(used) > EXPERTS // 2
    clean = loaded.model(ids, torch.arange(24)[None])
    real = loaded.folder.read
    for name in loaded.folder.names():
        if ".layers.0." in name or "mlp" not in name or ("experts" in name and int(name.split(".")[5]) not in used):
            continue

        def changed(n: str, *a: Any, _w: str = name, **k: Any) -> Tensor:
            tensor = real(n, *a, **k)
            # A constant would move all router logits alike, and softmax forgets that.
            return tensor + 0.3 * torch.linspace(-1, 1, tensor.shape[0])[:, None] if n == _w else tensor

        loaded.folder.read = changed  # type: ignore[method-assign]
        load_base(loaded.model, loaded.shape, loaded.folder, resident=False)
        loaded.folder.read = real  # type: ignore[method-assign]
        moved = (loaded.model(ids, torch.arange(24)[None]) - clean).abs().max()
        chosen = "experts" not in name or int(name.split(".")[5]) in kept.record().experts[1][-1]
        assert (moved > 1e-4) == chosen, name


def test_a_packed_expert_means_the_decoded_reference(quantised: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    source, path = quantised
    loaded = load(path)
    back, stored = dict(base_tensors(loaded.model, loaded.shape)), ModelFolder.open(path)
    assert len(stored.nvfp4_modules) == BLOCKS * (4 + 3 * EXPERTS)
    for name in stored.names():
        ours, theirs = back[name].reshape(-1), stored.read(name).reshape(-1)
        if theirs.dtype == torch.bfloat16:
            theirs = theirs.to(ours.dtype)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for module in stored.nvfp4_modules:
        matrix = stored.read_nvfp4(module).decode(torch.float32)
        experts, _, projection = module.rpartition(".")
        if "experts" not in module:
            reference.get_submodule(module).weight.data.copy_(matrix)
            continue
        inside, _, expert = experts.rpartition(".")
        stack = reference.get_submodule(inside)
        width = stack.gate_up_proj.shape[1] // 2
        target = {
            "gate_proj": stack.gate_up_proj.data[int(expert), :width],
            "up_proj": stack.gate_up_proj.data[int(expert), width:],
            "down_proj": stack.down_proj.data[int(expert)],
        }[projection]
        target.copy_(matrix)
    ids = random_ids(11)
    with torch.no_grad():
        expected = reference(ids).logits[0]
    for resident in (False, True):
        assert (last_logits(load(path, resident=resident), ids) - expected).abs().max() <= 1e-5


def test_the_quantiser_packs_experts_and_nothing_else(quantised: tuple[Path, Path]) -> None:
    source, path = quantised
    report = verify(path, source)
    assert report.ok, report.render()
    folder = ModelFolder.open(path)
    for block in range(BLOCKS):
        prefix = f"model.layers.{block}.mlp"
        assert not folder.is_nvfp4(f"{prefix}.gate")
        scales = [
            [float(folder.read(f"{prefix}.experts.{e}.{p}.weight_scale_2")) for p in ("gate_proj", "up_proj")]
            for e in range(EXPERTS)
        ]
        assert all(gate == up for gate, up in scales)
    listed = read_json(path / "hf_quant_config.json")["quantization"]["exclude_modules"]
    assert {f"model.layers.{i}.mlp.gate" for i in range(BLOCKS)} <= set(listed)
    # An engine that matched the list as prefixes would leave experts unpacked if an entry were one of theirs.
    assert not any(module.startswith(tuple(listed)) for module in folder.nvfp4_modules)


def test_awq_is_refused_for_experts(quantised: tuple[Path, Path], tmp_path: Path) -> None:
    config = QuantizeConfig.model_validate(
        {"source": quantised[0], "output": tmp_path / "out", "calibration": {"method": "awq"}}
    )
    with pytest.raises(UserError, match=r"calibration\.method.*qwen3_moe"):
        quantize(config)


def test_experts_of_one_block_are_stored_alike(quantised: tuple[Path, Path]) -> None:
    loaded = load(quantised[1])
    real = ModelFolder.is_nvfp4
    loaded.folder.is_nvfp4 = lambda name: "experts.5.up_proj" not in name and real(loaded.folder, name)  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"experts\.5\.up_proj"):
        load_base(loaded.model, loaded.shape, loaded.folder, resident=False)


# -- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(3, 0, 4, 2), (0, 0, 0, 9), (0, 0, 0, 0)])
@pytest.mark.parametrize("kind", ["packed", "resident", "dense", "trainable"])
def test_products_of_a_stack(kind: str, counts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (4, 24, 16), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0x30, 0x40, (4, 24, 2), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    nvfp4 = NVFP4Experts(packed, scale, (0.25, 0.1, 0.5, 0.125), torch.float32, resident=kind == "resident")
    stack = torch.stack([nvfp4.expert(e).matrix(torch.float32) for e in range(4)])
    trained = stack.clone().requires_grad_(kind == "trainable")
    x = torch.randn(sum(counts), 32, generator=generator, requires_grad=True)
    rows = torch.tensor(counts)
    if kind == "trainable":
        y = grouped_product(x, trained, rows)
    else:
        y = (DenseExperts(stack) if kind == "dense" else nvfp4).multiply(x, rows)
    expert = torch.repeat_interleave(torch.arange(4), rows)
    exact, wide = x.detach().double().requires_grad_(True), stack.double().requires_grad_(True)
    expected = torch.einsum("tk,tnk->tn", exact, wide[expert])
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    grad = torch.randn(y.shape, generator=generator)
    assert y.grad_fn is not None  # also without rows: the all-to-all before must run its backward
    y.backward(grad)
    expected.backward(grad.double())
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)
    if kind == "trainable":
        torch.testing.assert_close(trained.grad.double(), wide.grad, atol=1e-5, rtol=1e-5)


def test_weighted_gate_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(5, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    p = torch.rand(5, generator=generator, dtype=torch.float64, requires_grad=True)
    gate, up = y.chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up * p[:, None]
    found = _WeightedGate.apply(y, p)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), (y, p)),
        torch.autograd.grad((wanted * weights).sum(), (y, p)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # the weight's gradient is summed in float32


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_adapter_gradient_matches_finite_differences(mode: str, folder: Path) -> None:
    loaded = adapted(folder, mode)
    with loaded.model.routing.recording() as kept:
        base = packed_logprobs(loaded)
    # A step may flip a route, where the function jumps and has no derivative: the set of experts is held.
    routing = kept.record()
    found = gradients(loaded, base.double().sum())
    parameters = {n: p for n, p in loaded.model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(0)
    for name, p in parameters.items():
        flat, step = found[name].view(-1), 1e-2
        # Some at random, where a forgotten gradient would be zero, and the largest.
        drawn = torch.randperm(p.numel(), generator=generator)[:4].tolist()
        for i in (*drawn, int(flat.abs().argmax())):
            values = []
            for sign in (1, -1):
                p.data.view(-1)[i] += sign * step
                with torch.no_grad():
                    values.append(float(packed_logprobs(loaded, routing=routing).double().sum()))
                p.data.view(-1)[i] -= sign * step
            # Truncation is O(step^2); float32 sums of 17 log-probabilities carry about 1e-5, so 1e-3 after division.
            wanted = (values[0] - values[1]) / (2 * step)
            assert float(flat[i]) == pytest.approx(wanted, rel=2e-2, abs=3e-3), name


@pytest.mark.parametrize("mode", MODES)
def test_exported_adapter_loads_into_peft_and_gives_the_same_logits(mode: str, folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = adapted(folder, mode)
    ids = random_ids(10)
    base, ours = last_logits(load(folder), ids), last_logits(loaded, ids)
    lora = LoraSection(rank=4, alpha=8.0, expert_mode=mode)  # type: ignore[arg-type]
    write_adapter(collect(loaded.model, loaded.shape), lora, folder, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad():
        theirs = model(ids).logits[0]
    assert (ours - base).abs().max() > 1e-2
    assert (ours - theirs).abs().max() <= 2e-5


@pytest.mark.parametrize("mode", [*MODES, "none"])
def test_adapter_state_round_trips_and_names_are_the_documented_ones(mode: str, folder: Path) -> None:
    loaded = adapted(folder, mode)
    tensors = collect(loaded.model, loaded.shape)
    experts = "model.layers.1.mlp.experts"
    inner = {f"{experts}.{e}.{p}" for e in range(EXPERTS) for p in ("gate_proj", "up_proj", "down_proj")}
    wanted = {
        "per_expert": {f"{path}.{f}" for path in inner for f in ("lora_A", "lora_B")},
        "shared_outer": {f"{path}.{'lora_A' if 'down' in path else 'lora_B'}" for path in inner}
        | {f"{experts}.gate_proj.lora_A", f"{experts}.up_proj.lora_A", f"{experts}.down_proj.lora_B"},
        "none": set(),
    }[mode]
    assert {n for n in tensors if n.startswith(experts)} == wanted
    fresh = load(folder, lora=LoraSection(rank=4, alpha=8.0, expert_mode=mode))  # type: ignore[arg-type]
    ids = random_ids(9)
    assert not torch.equal(last_logits(fresh, ids), last_logits(loaded, ids))
    restore(fresh.model, fresh.shape, tensors, "test")
    assert torch.equal(last_logits(fresh, ids), last_logits(loaded, ids))
    again = collect(fresh.model, fresh.shape)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[n], tensors[n]) for n in tensors)


@pytest.mark.parametrize("mode", MODES)
def test_stacked_form_holds_every_expert(mode: str, folder: Path) -> None:
    """The names and shapes that SGLang reads, multiplied out, are the adapter of each expert."""
    tensors = collect(adapted(folder, mode).model, load(folder).shape)
    stacked, own = stack_experts(tensors), repeat_shared(tensors)
    shared = 1 if mode == "shared_outer" else EXPERTS
    for slot, projection in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        a, b = (stacked[f"model.layers.0.mlp.experts.{slot}.{f}"] for f in ("lora_A", "lora_B"))
        assert (a.shape[0], b.shape[0]) == ((EXPERTS, shared) if slot == "w2" else (shared, EXPERTS))
        for e in range(EXPERTS):
            path = f"model.layers.0.mlp.experts.{e}.{projection}"
            product = own[f"{path}.lora_B"] @ own[f"{path}.lora_A"]
            assert torch.equal(b[e % len(b)] @ a[e % len(a)], product)
    assert {n for n in stacked if "experts" not in n} == {n for n in tensors if "experts" not in n}


@pytest.mark.parametrize("mode", MODES)
def test_recomputation_and_shared_prompts_give_the_same_gradient(mode: str, folder: Path) -> None:
    found = {}
    for recompute in ("none", "full"):
        for share in (True, False):
            loaded = adapted(folder, mode, recompute=recompute)
            loaded.model.train()
            with loaded.registry.applied(loaded.registry.state(50, 100)):
                found[recompute, share] = gradients(loaded, packed_logprobs(loaded, share=share).sum())
    plain = found["none", True]
    assert all(torch.equal(g, found["full", True][n]) for n, g in plain.items())
    for name, g in plain.items():
        assert (g - found["none", False][name]).abs().max() <= 1e-5 * max(1.0, float(g.abs().max())), name


# -- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"expert_model_parallel_size": 3}, r"expert_model_parallel_size = 3.*num_experts = 8.*\[1, 2, 4, 8\]"),
        (
            {"expert_tensor_parallel_size": 4},
            r"expert_tensor_parallel_size = 4.*size / 16 = 2.*\[1, 2\]",
        ),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, r"sequence_parallel"),
        ({"token_dispatcher": "allgather", "pipeline_model_parallel_size": 2}, r"token_dispatcher.*alltoall"),
    ],
)
def test_layouts_that_cannot_be_are_refused(layout: dict[str, Any], message: str, folder: Path) -> None:
    shape = read_shape(ModelFolder.open(folder).config, folder)
    with pytest.raises(ConfigError, match=message):
        check_experts(shape, ParallelSection(**layout))


@pytest.mark.parametrize(
    ("world", "layout", "message"),
    [
        (3, {"expert_model_parallel_size": 2}, r"expert 2 x expert tensor 1 = 2.*stage, 3"),
        (2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, r"expert tensor 2 = 4.*stage, 2"),
        (4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4}, r"stage, 2.*multiple of 8"),
        (
            6,
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 3, "expert_tensor_parallel_size": 1},
            r"tensor x context = 2",
        ),
    ],
)
def test_experts_must_fit_the_processes(world: int, layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_world(ParallelSection(**layout), world)


def test_a_dense_model_has_no_experts_to_spread(tmp_path: Path) -> None:
    path = write_model(tmp_path, "qwen3")
    shape = read_shape(ModelFolder.open(path).config, path)
    with pytest.raises(ConfigError, match=r"expert_model_parallel_size = 2.*qwen3 model has no experts"):
        check_experts(shape, ParallelSection(expert_model_parallel_size=2))


@pytest.mark.parametrize(
    ("key", "value"), [("mlp_only_layers", [1]), ("decoder_sparse_step", 2), ("num_experts_per_tok", 9)]
)
def test_a_model_that_the_table_does_not_cover_is_refused(key: str, value: object, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=key):
        read_shape(ModelFolder.open(folder).config | {key: value}, folder)
