"""Tensor, sequence and data parallelism compute what one rank computes, from the file's bytes to the second update.

In FP32 on random models. Two layouts differ only in the order of sums, so differences are roundings: of a sum of n
terms about 2^-24 sqrt(n) of its terms' size, 1e-5 for n = 200 tokens times 128 features, if they do not cancel. Bounds
are relative to the largest element of what is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_qerl.config.schema import QuantizeConfig
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from tests.multiprocess import tensor_data_cases as cases
from tests.support.distributed import launch
from tests.support.tiny_model import write_model

TARGET = "tests.multiprocess.tensor_data_cases:run_cases"
#: Response lengths: nine groups whose packs make several micro-batches of uneven size.
LENGTHS = [[1 + (5 * g + 3 * r) % 9 for r in range(4)] for g in range(9)]
TWO = ("tp2", "tp2_sp", "dp", "dp_distributed")
FOUR = ("tp4", "tp4_sp", "tp2_dp", "tp2_sp_dp_distributed", "dp_distributed")
ROLES = ("input", "post_attention", "q_norm", "k_norm")
#: name -> (family, tied, packed in NVFP4, sizes, config changes)
MODELS: dict[str, tuple[str, bool, bool, dict[str, Any], dict[str, Any]]] = {
    "llama_tied_nvfp4": ("llama", True, True, {}, {}),
    # 77 rows of vocabulary split over no rank count evenly: the last rank has padding.
    "qwen2_untied_dense": ("qwen2", False, False, {"vocab_size": 77}, {"algorithm__loss_aggregation": "sequence_mean"}),
    "qwen2_tied_nvfp4": ("qwen2", True, True, {"vocab_size": 77}, {"train__recompute": "full"}),
    "qwen3_untied_dense": ("qwen3", False, False, {}, {"noise__roles": ROLES}),
}
#: Four ranks get the two models that differ most; this one is also loaded, saved and resumed.
MODELS_OF_FOUR = ("qwen2_tied_nvfp4", "qwen3_untied_dense")
SAVED = "qwen2_tied_nvfp4"
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from megatron_qerl.nvfp4.quantize import quantize

    result = {}
    for name, (family, tied, packed, sizes, _) in MODELS.items():
        root = tmp_path_factory.mktemp(name)
        dtype = torch.bfloat16 if packed else torch.float32
        # Four heads of keys and eight blocks of 16 in the MLP: four ranks can share them.
        cut = {"num_key_value_heads": 4, "intermediate_size": 128} | sizes
        source = write_model(root / "source", family, tied=tied, dtype=dtype, scale=0.1, **cut)
        if packed:
            source = quantize(QuantizeConfig(source=source, output=root / "nvfp4", device="cpu"))
        result[name] = source
    return result


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What one rank found, by model; by dtype: a checkpoint after one update, and the adapter after the second."""
    result = {name: cases.two_updates(path, "one", LENGTHS, None, MODELS[name][4]) for name, path in folders.items()}
    rollout = result[SAVED]["rollout"]
    groups = cases.groups_of(LENGTHS, rollout)
    for dtype in DTYPES:
        loaded, trainer = cases.prepare(folders[SAVED], "one", {"model__dtype": dtype})
        noise = loaded.registry.state(5, 10)
        trainer.train_step(groups, noise)
        saved = cases.save(loaded, trainer, folders[SAVED].parent / dtype)
        trainer.train_step(groups, noise)
        adapter = cases.collect(loaded.model, loaded.shape)
        result[dtype] = {"rollout": rollout, "saved": saved, "adapter": adapter}
    return result


def _run(
    world: int, layouts: tuple[str, ...], folders: dict[str, Path], references: dict[str, Any], folder: Path
) -> list[dict[str, Any]]:
    arguments: dict[str, tuple[str, dict[str, Any]]] = {}
    for layout in layouts:
        for model in MODELS if world == 2 else MODELS_OF_FOUR:
            common = {"path": folders[model], "layout": layout, "lengths": LENGTHS, "changes": MODELS[model][4]}
            arguments[f"{model} {layout}"] = "two_updates", common | {"logprobs": references[model]["rollout"]}
        common = {"path": folders[SAVED], "layout": layout}
        arguments[f"bytes {layout}"] = "bytes_read", common | {"changes": {}}
        for dtype in DTYPES:
            saved, rollout = references[dtype]["saved"], references[dtype]["rollout"]
            options = {"lengths": LENGTHS, "logprobs": rollout, "changes": {"model__dtype": dtype}}
            options |= {"saved": saved, "root": folder / layout / dtype}
            arguments[f"{dtype} {layout}"] = "resumed", common | options
    if world == 2:
        common = {"path": folders["qwen2_untied_dense"], "layout": "tp2_sp", "lengths": LENGTHS[:3]}
        arguments["quotients"] = "difference_quotients", common | {"entries": 20, "step": 0.02}
    results = launch(world, TARGET, arguments, folder, timeout_s=540)
    return [result | {"folder": folder} for result in results]


@pytest.fixture(scope="module")
def ranks(
    folders: dict[str, Path], references: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, Any]]]:
    """World size -> results of its ranks."""
    return {
        2: _run(2, TWO, folders, references, tmp_path_factory.mktemp("two")),
        4: _run(4, FOUR, folders, references, tmp_path_factory.mktemp("four")),
    }


def assert_near(reference: dict[str, torch.Tensor], found: dict[str, torch.Tensor], bound: float) -> None:
    """Tensors of the same names and shapes, and differences of at most ``bound`` times the largest element."""
    assert {n: t.shape for n, t in reference.items()} == {n: t.shape for n, t in found.items()}
    size = max(float(t.abs().max()) for t in reference.values())
    assert size > 0
    for name, tensor in reference.items():
        assert float((tensor - found[name]).abs().max()) <= bound * size, name


def check(reference: dict[str, Any], results: list[dict[str, Any]], layout: str) -> None:
    """That the ranks of one layout found what one rank found."""
    tensor_size = cases.LAYOUTS[layout].get("tensor_model_parallel_size", 1)
    replicas = results[::tensor_size]  # each has its own share of the batch
    assert sum(r["normaliser"] for r in replicas) == reference["normaliser"]
    assert len({r["microbatches"] for r in results}) == 1
    assert abs(sum(r["loss"] for r in replicas) - reference["loss"]) <= 1e-6 * reference["normaliser"]
    for found in results:
        assert found["start"] == reference["start"]
        assert float((found["logprobs"] - reference["logprobs"]).abs().max()) <= 1e-5
        assert_near(reference["gradient"], found["gradient"], 1e-5)
        for name, tensor in reference["gradient"].items():
            # No adapter may hide behind a larger one.
            assert float((tensor - found["gradient"][name]).abs().max()) <= 1e-4 * float(tensor.abs().max()), name
        for kind in ("adapter", "master", "exp_avg", "exp_avg_sq"):
            assert_near(reference[kind], found[kind], 1e-5)
            assert all(torch.equal(t, results[0][kind][n]) for n, t in found[kind].items()), "ranks drift apart"
        for ours, theirs in zip(found["norms"], reference["norms"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


CASES = [(2, model, layout) for model in MODELS for layout in TWO]
CASES += [(4, model, layout) for model in MODELS_OF_FOUR for layout in FOUR]


@pytest.mark.parametrize(("world", "model", "layout"), CASES)
def test_a_layout_computes_what_one_rank_computes(
    ranks: dict[int, list[dict[str, Any]]], references: dict[str, Any], world: int, model: str, layout: str
) -> None:
    check(references[model], [r[f"{model} {layout}"] for r in ranks[world]], layout)


LAYOUTS = [(2, layout) for layout in TWO] + [(4, layout) for layout in FOUR]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_any_layout_goes_on_from_a_checkpoint_of_one_rank(
    ranks: dict[int, list[dict[str, Any]]], references: dict[str, Any], world: int, layout: str
) -> None:
    """Saved again, every byte of every tensor is what it was, also in BF16, where masters are apart."""
    for dtype in DTYPES:
        saved: Path = references[dtype]["saved"]
        again = ranks[world][0]["folder"] / layout / dtype / "checkpoints" / saved.name
        for kind in ("adapter", "master", "exp_avg", "exp_avg_sq"):
            assert (again / f"{kind}.safetensors").read_bytes() == (saved / f"{kind}.safetensors").read_bytes(), kind
    # In BF16 the update itself tells little: activations round at 2^-8 and Adam divides by what is left of a gradient.
    for found in (r[f"float32 {layout}"] for r in ranks[world]):
        assert_near(references["float32"]["adapter"], found, 1e-5)


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_a_rank_reads_its_part_of_the_file(
    ranks: dict[int, list[dict[str, Any]]], folders: dict[str, Path], world: int, layout: str
) -> None:
    """What all share is norms and tensor scales; the rest is read once by the ranks of a copy together."""
    folder = ModelFolder.open(folders[SAVED])
    sizes = {name: folder.spec(name).size_bytes for name in folder.names()}
    shared = sum(size for name, size in sizes.items() if "norm" in name or name.endswith("weight_scale_2"))
    split = sum(sizes.values()) - shared
    assert 10 * shared < split
    tensor_size = cases.LAYOUTS[layout].get("tensor_model_parallel_size", 1)
    read = [r[f"bytes {layout}"] for r in ranks[world]]
    for begin in range(0, world, tensor_size):
        assert sum(read[begin : begin + tensor_size]) == split + tensor_size * shared
    # Of 77 rows of vocabulary in BF16 the last of four ranks has 17, and the others 20.
    assert max(read) <= split / tensor_size + shared + 64 * 2


def test_replicas_share_the_work(ranks: dict[int, list[dict[str, Any]]], references: dict[str, Any]) -> None:
    loads = [r["llama_tied_nvfp4 dp"]["tokens"] for r in ranks[2]]
    assert max(loads) <= 1.1 * min(loads)
    # A cut of a group between responses would repeat its prompt.
    assert sum(loads) == references["llama_tied_nvfp4"]["tokens"]


def test_the_distributed_optimizer_spreads_its_state(ranks: dict[int, list[dict[str, Any]]]) -> None:
    plain = ranks[2][0]["llama_tied_nvfp4 dp"]["state_bytes"]
    for world, model in ((2, "llama_tied_nvfp4"), (4, SAVED)):
        spread = [r[f"{model} dp_distributed"]["state_bytes"] for r in ranks[world]]
        gradients = plain // 3  # gradient and two moments of an FP32 adapter are a third each
        assert sum(s - gradients for s in spread) == pytest.approx(plain - gradients, rel=0.02)
        assert max(spread) < 0.8 * plain


def test_gradients_are_difference_quotients(ranks: dict[int, list[dict[str, Any]]]) -> None:
    """Under tensor and sequence parallelism, against nothing but the forward pass.

    A mean of log-probabilities near 4 nats has a rounding of about 4e-7, so a quotient with steps of 0.02 is uncertain
    by some 2e-5, beside the fourth-order remainder.
    """
    quotients = ranks[2][0]["quotients"]
    assert len(quotients) == 20
    assert max(abs(gradient) for _, gradient, _ in quotients) > 2e-3
    for name, gradient, quotient in quotients:
        assert abs(gradient - quotient) <= 5e-5 + 0.01 * abs(gradient), name
