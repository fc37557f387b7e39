"""Pipeline and context parallelism compute what one rank computes.

Bounds. Everything is FP32, whose unit roundoff u is 6e-8. Pipeline stages alone run the same operations on the same
numbers in the same order, so log-probabilities and gradients are equal bit for bit. Where a layout also sums in another
order (keys of other ranks, tensor-parallel partial sums, data-parallel gradients), a log-probability is at the end of
about 4 blocks x 8 operations on numbers of size 1 to 10, which gives 30 x 10 x u = 2e-5 at most, and a gradient, a sum
of a hundred products of such numbers, may lose another digit to cancellation: 5e-5 of its tensor's largest entry. Seen:
2e-6 and 5e-6. A wrong mask, offset or factor shows at 1e-2 or more.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_qerl.config.schema import ParallelSection, QuantizeConfig
from megatron_qerl.errors import ConfigError
from megatron_qerl.models.build import check_pipeline, layer_pattern
from megatron_qerl.models.shape import read_shape
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.quantize import quantize
from tests.support.distributed import launch
from tests.support.layouts import layout
from tests.support.tiny_model import write_model
from tests.support.tiny_run import write_run

LOGPROB_BOUND, GRADIENT_BOUND = 2e-5, 5e-5
CASES = "tests.multiprocess.pipeline_context_cases:run_cases"

# family, tied, packed, sizes. Five blocks do not divide by two stages; four fill four.
MODELS: dict[str, tuple[str, bool, bool, dict[str, Any]]] = {
    "llama_tied": ("llama", True, False, {"num_hidden_layers": 5, "vocab_size": 77}),
    "qwen2_tied_nvfp4": ("qwen2", True, True, {"num_hidden_layers": 4}),
    "qwen3_untied_nvfp4": ("qwen3", False, True, {"num_hidden_layers": 4}),
    "experts": ("qwen3_moe", False, False, {"num_hidden_layers": 4}),
}
FIRST = "qwen2_tied_nvfp4"
# Three micro-batches of different lengths on one rank: an odd number leaves a hole in an interleaved round.
LENGTHS = [[5, 3, 9, 1], [4, 4], [12, 2, 7], [8, 1], [3, 6, 1]]
SHARED = {"train__microbatch_tokens": 32}


TWO: dict[str, dict[str, Any]] = {
    "pp2": layout(pp=2),
    "pp2_vpp2": layout(pp=2, vpp=2),
    "pp2_recompute": layout(pp=2) | {"train__recompute": "full"},
    "pp2_vpp2_offload": layout(pp=2, vpp=2) | {"train__recompute": "full_offload"},
    "cp2": layout(cp=2),
    "cp2_recompute": layout(cp=2) | {"train__recompute": "full"},
    "cp2_ep2": layout(cp=2, ep=2),
}
FOUR: dict[str, dict[str, Any]] = {
    "pp4": layout(pp=4),
    "tp2_pp2": layout(tp=2, pp=2),
    "tp2_pp2_sp": layout(tp=2, pp=2, sp=True),
    "tp2_pp2_vpp2_sp": layout(tp=2, pp=2, vpp=2, sp=True),
    "pp2_dp2": layout(pp=2),
    "pp2_vpp2_dp2_distributed": layout(pp=2, vpp=2, do=True),
    "cp4": layout(cp=4),
    "cp2_tp2": layout(cp=2, tp=2),
    "cp2_tp2_sp": layout(cp=2, tp=2, sp=True),
    "cp2_pp2": layout(cp=2, pp=2),
    "cp2_pp2_vpp2": layout(cp=2, pp=2, vpp=2),
    "cp2_dp2_distributed": layout(cp=2, do=True),
    "pp2_vpp2_ep2": layout(pp=2, vpp=2, ep=2),
}
EXACT = {"pp2", "pp2_vpp2", "pp2_recompute", "pp2_vpp2_offload", "pp4"}
ALL = {**TWO, **FOUR}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    result = {}
    for name, (family, tied, packed, sizes) in MODELS.items():
        root = tmp_path_factory.mktemp(name)
        dtype = torch.bfloat16 if packed else torch.float32
        source = write_model(root / "source", family, tied=tied, dtype=dtype, scale=0.1, **sizes)
        result[name] = (
            quantize(QuantizeConfig(source=source, output=root / "nvfp4", device="cpu")) if packed else source
        )
    return result


def fits(model: str, name: str) -> bool:
    """Each model on the plain layouts, one on every combination that needs no experts."""
    if "ep2" in name:
        return model == "experts"
    return model == FIRST or name in {"pp2", "pp2_vpp2", "cp2", "tp2_pp2_sp", "cp2_tp2_sp", "cp2_pp2"}


@pytest.fixture(scope="module")
def one(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank computes, by model and by whether responses share their prompt."""
    arguments: dict[str, Any] = {}
    for model, path in folders.items():
        plain = {"path": path, "lengths": LENGTHS, "rollout": None}
        arguments[model] = ("everything", plain | {"changes": SHARED})
        arguments[f"{model}/decode"] = ("decode", {"path": path, "changes": {}})
    arguments["bad"] = (
        "non_finite", {"path": folders[FIRST], "changes": SHARED, "lengths": LENGTHS, "response": 6}
    )  # fmt: skip
    separate = SHARED | {"train__share_prompt_prefix": False}
    arguments["separate"] = (
        "everything", {"path": folders[FIRST], "lengths": LENGTHS, "rollout": None, "changes": separate}
    )  # fmt: skip
    return launch(1, CASES, arguments, tmp_path_factory.mktemp("one"))[0]


def ranks(
    world: int, layouts: dict[str, dict[str, Any]], folders: dict[str, Path], one: dict[str, Any], root: Path
) -> list[dict[str, Any]]:
    arguments: dict[str, Any] = {}
    for name, changes in layouts.items():
        for model, path in folders.items():
            if not fits(model, name):
                continue
            options = {"path": path, "lengths": LENGTHS, "rollout": one[model]["rollout"], "changes": SHARED | changes}
            arguments[f"{model}/{name}"] = ("everything", options)
            arguments[f"{model}/{name}/bytes"] = ("layer_bytes", {"path": path, "changes": changes})
            if "sequence_parallel" not in str(changes):
                arguments[f"{model}/{name}/decode"] = ("decode", {"path": path, "changes": changes})
            if model == FIRST:
                bad = {"path": path, "changes": SHARED | changes, "lengths": LENGTHS, "response": 6}
                arguments[f"{name}/bad"] = ("non_finite", bad)
    if world == 2:
        options = {"path": folders[FIRST], "lengths": LENGTHS, "rollout": one["separate"]["rollout"]}
        changes = SHARED | layout(cp=2) | {"train__share_prompt_prefix": False}
        arguments["separate/cp2"] = ("everything", options | {"changes": changes})
    return launch(world, CASES, arguments, root, timeout_s=600)


@pytest.fixture(scope="module")
def many(
    folders: dict[str, Path], one: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """Case -> what each rank found."""
    found = [ranks(w, ls, folders, one, tmp_path_factory.mktemp(f"ranks{w}")) for w, ls in ((2, TWO), (4, FOUR))]
    return {name: [rank[name] for rank in part] for part in found for name in part[0]}


PARITY = [(model, name) for model in MODELS for name in ALL if fits(model, name)]


def check(found: dict[str, Any], wanted: dict[str, Any], name: str) -> None:
    """One rank's results against one rank alone."""
    exact = name in EXACT
    assert found["start"] == wanted["start"]
    for key in ("logprobs", "entropies"):
        difference = float((found[key] - wanted[key]).abs().max())
        assert difference <= (0.0 if exact else LOGPROB_BOUND), (key, difference)
    assert found["gradient"].keys() == wanted["gradient"].keys()
    for tensor, value in wanted["gradient"].items():
        assert value.abs().max() > 0, tensor
        difference = float((found["gradient"][tensor] - value).abs().max() / value.abs().max())
        assert difference <= (0.0 if exact else GRADIENT_BOUND), (tensor, difference)
    assert found["noise"][:2] == wanted["noise"][:2]
    assert found["noise"][2] == pytest.approx(wanted["noise"][2], rel=1e-12)
    assert found["engine"] == pytest.approx(wanted["engine"], rel=1e-3, abs=LOGPROB_BOUND)
    for tensor, value in wanted["adapter"].items():
        # Adam with an epsilon near the gradients: an update of 1e-2 is as continuous in them as they are in rounding.
        assert (found["adapter"][tensor] - value).abs().max() <= 1e-2 * 2 * GRADIENT_BOUND, tensor


def flat(statistics: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested sums as one level."""
    result: dict[str, float] = {}
    for key, value in statistics.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            result[prefix + key] = float(value)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), PARITY)
def test_every_rank_agrees_with_one_rank(model: str, name: str, one: dict[str, Any], many: dict[str, Any]) -> None:
    for found in many[f"{model}/{name}"]:
        check(found, one[model], name)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), PARITY)
def test_every_rank_reports_the_statistics_of_the_whole_batch(
    model: str, name: str, one: dict[str, Any], many: dict[str, Any]
) -> None:
    wanted = flat(one[model]["statistics"])
    assert wanted["tokens"] == sum(map(sum, LENGTHS))
    for found in many[f"{model}/{name}"]:
        assert flat(found["statistics"]) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
        (update,), (reference,) = found["statistics"]["updates"], one[model]["statistics"]["updates"]
        assert update == pytest.approx(reference, rel=1e-4)
    statistics = [f["statistics"] for f in many[f"{model}/{name}"]]
    assert all(s == statistics[0] for s in statistics)


@pytest.mark.slow
def test_packs_of_whole_sequences_agree_too(one: dict[str, Any], many: dict[str, Any]) -> None:
    for found in many["separate/cp2"]:
        check(found, one["separate"], "separate")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), [c for c in PARITY if "sp" not in c[1].split("_")])
def test_generation_through_stages_gives_every_rank_the_logits(
    model: str, name: str, one: dict[str, Any], many: dict[str, Any]
) -> None:
    for found in many[f"{model}/{name}/decode"]:
        assert (found - one[f"{model}/decode"]).abs().max() <= LOGPROB_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if fits(FIRST, name)])
def test_a_loss_that_is_not_finite_stops_every_rank_alike(name: str, one: dict[str, Any], many: dict[str, Any]) -> None:
    assert "responses [6]" in one["bad"]["message"]
    for found in many[f"{name}/bad"]:
        assert found == one["bad"] == {"message": found["message"], "changed": False}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), PARITY)
def test_each_stage_holds_the_checkpoints_bytes_of_its_blocks(
    model: str, name: str, folders: dict[str, Path], many: dict[str, Any]
) -> None:
    """By hash against the file, block number by block number; sizes that tensor parallelism cuts are left out."""
    folder = ModelFolder.open(folders[model])
    sizes = ALL[name]
    if sizes.get("parallel__tensor_model_parallel_size", 1) > 1:
        pytest.skip("slices of tensors are test_tensor_data's")
    pipeline = sizes.get("parallel__pipeline_model_parallel_size", 1)
    virtual = sizes.get("parallel__virtual_pipeline_model_parallel_size", 1)
    num_blocks = int(folder.config["num_hidden_layers"])
    segments = [len(s) // 2 for s in layer_pattern(num_blocks, pipeline, virtual).split("|")]
    owner = [s % pipeline for s, blocks in enumerate(segments) for _ in range(blocks)]
    per_stage = len(many[f"{model}/{name}/bytes"]) // pipeline
    embedding = stored_digest(folder, "model.embed_tokens.weight")
    for rank, found in enumerate(many[f"{model}/{name}/bytes"]):
        stage = rank // per_stage
        head = found.pop("head", None)
        assert (head is not None) == (stage == pipeline - 1)
        if head is not None:
            assert head == (embedding if folder.config["tie_word_embeddings"] else found["lm_head.weight"])
        blocks = {int(n.split(".")[2]) for n in found if n.startswith("model.layers.")}
        assert blocks == {b for b in range(num_blocks) if owner[b] == stage}
        for tensor, value in found.items():
            assert value == stored_digest(folder, tensor), tensor


def stored_digest(folder: ModelFolder, name: str) -> str:
    """SHA-256 of a tensor as the model keeps it: packed bytes verbatim, everything else in FP32."""
    module = name.removesuffix(".weight")
    value = folder.read_nvfp4(module).packed if folder.is_nvfp4(module) else folder.read(name).float()
    return hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_a_whole_run_over_stages_or_context_is_the_run_of_one_rank(tmp_path: Path) -> None:
    """Six steps of rollout, noise and updates: the same tokens are drawn, so the same numbers are reported."""
    layouts = {
        "one": [],
        "pp2": ["parallel.pipeline_model_parallel_size=2"],
        "cp2": ["parallel.context_parallel_size=2"],
    }
    path = write_run(tmp_path)
    lines = {}
    for name, overrides in layouts.items():
        arguments = {name: (path, [f"run.name={name}", *overrides])}
        world = 1 if name == "one" else 2
        codes = launch(world, "tests.multiprocess.training_cases:run_cases", arguments, tmp_path / name)
        assert codes == [{name: 0}] * world
        text = (tmp_path / "runs" / name / "metrics.jsonl").read_text()
        lines[name] = [json.loads(line)["values"] for line in text.splitlines() if '"values"' in line]
    assert len(lines["one"]) == 6
    kept = [k for k in lines["one"][-1] if not k.startswith(("time/", "memory/", "throughput/", "phase/"))]
    assert {"loss/policy", "noise/sigma_effective", "tokens/completion"} <= set(kept)
    for name in ("pp2", "cp2"):
        for ours, theirs in zip(lines[name], lines["one"], strict=True):
            wanted = {k: theirs[k] for k in kept if k in theirs and not k.startswith("parity/")}
            assert {k: ours[k] for k in wanted} == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def test_remainders_go_to_the_first_stages() -> None:
    assert layer_pattern(5, 2, 1) == "*-*-*-|*-*-"
    assert layer_pattern(5, 2, 2) == "*-*-|*-|*-|*-"


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"pipeline_model_parallel_size": 6}, "pipeline_model_parallel_size"),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3}, "pipeline_model_parallel"),
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size"),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1}, "virtual_pipeline"),
    ],
)
def test_layouts_that_cannot_be_filled_are_refused(sizes: dict[str, Any], key: str, folders: dict[str, Path]) -> None:
    path = folders["llama_tied"]
    shape = read_shape(ModelFolder.open(path).config, path)
    with pytest.raises(ConfigError, match=key):
        check_pipeline(shape, ParallelSection(**sizes))
