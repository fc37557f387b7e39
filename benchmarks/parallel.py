"""Several GPUs against one: python -m benchmarks.parallel --output PATH [--parity] [--steps CASE,CASE | all]

``--parity`` repeats the comparisons of tests/multiprocess on two GPUs over NCCL: log-probabilities, loss, every adapter
gradient and the adapter after an update, of a dense model and a mixture of experts, against one GPU. In FP32 the bounds
are those of the tests. In BF16, with Transformer Engine's attention and the fused kernels, two layouts round at
different places; the bound is then twice what BF16 itself does on one GPU, measured in the same run against FP32.

``--steps`` times whole training steps (``benchmarks.step``: random weights of real shapes, full recomputation with
checkpoints in host memory, rank-32 adapters on everything) under the layouts of ``STEPS``; ``speedup`` is against the
one-GPU case of the same model and tokens in the same run. Every case is a ``torchrun`` of its own and has a time limit;
one that fails is recorded with its last words. The file is written after every case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.step import run_arm, surroundings
from benchmarks.step_model import Settings
from tests.support.layouts import difference, layout

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
#: name -> (model, GPUs, layout, settings). Fixed work for strong scaling: 7B on 16384 tokens.
STEPS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "7B": ("7B", 1, {}, {"tokens": 16384}),
    "7B dp2": ("7B", 2, {"use_distributed_optimizer": True}, {"tokens": 16384}),
    "7B tp2": ("7B", 2, TP2, {"tokens": 16384}),
    "7B pp2": ("7B", 2, {"pipeline_model_parallel_size": 2}, {"tokens": 16384, "microbatch": 2048}),
    "32B": ("32B", 1, {}, {}),
    "32B tp2": ("32B", 2, TP2, {}),
    "30B-A3B": ("30B-A3B", 1, {}, {"tokens": 16384}),
    "30B-A3B ep2": ("30B-A3B", 2, EP2, {"tokens": 16384}),
    "235B-A22B ep2": ("235B-A22B", 2, EP2, {"expert_mode": "shared_outer", "tokens": 16384, "steps": 1}),
    "tiny": ("tiny", 1, {}, {"tokens": 64, "sequence": 16, "rank": 4}),
    "tiny tp2": ("tiny", 2, TP2, {"tokens": 64, "sequence": 16, "rank": 4}),
    "tiny_moe ep2": ("tiny_moe", 2, EP2, {"tokens": 64, "sequence": 16, "rank": 4, "expert_mode": "shared_outer"}),
}
BASES = {"7B dp2": "7B", "7B tp2": "7B", "7B pp2": "7B", "32B tp2": "32B", "30B-A3B ep2": "30B-A3B", "tiny tp2": "tiny"}

#: name -> (family, sizes). Large enough for the fused kernel's 128 columns a K-tile when split in two.
PARITY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen2", {"intermediate_size": 512}),
    "experts": ("qwen3_moe", {"moe_intermediate_size": 256, "head_dim": 32}),
}
PARITY_SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
DENSE: tuple[dict[str, Any], ...] = (
    {"tp": 2}, {"tp": 2, "sp": True}, {"do": False}, {"do": True}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2},
)  # fmt: skip
EXPERTS: tuple[dict[str, Any], ...] = (
    {"ep": 2}, {"ep": 2, "via": "allgather"}, {"ep": 2, "tp": 2, "sp": True, "etp": 1}, {"tp": 2, "sp": True, "etp": 2},
    {"pp": 2}, {"cp": 2, "ep": 2},
)  # fmt: skip
#: Of these, the layouts that are repeated in BF16.
IN_BF16: tuple[dict[str, Any], ...] = (
    {"tp": 2, "sp": True}, {"do": True}, {"pp": 2}, {"cp": 2}, {"ep": 2},
)  # fmt: skip
LENGTHS = [[5, 13, 9, 21], [14, 4], [30, 2, 17], [8, 11], [3, 26, 1]]
BOUNDS = {"loss": 1e-6, "logprob": 2e-5, "gradient": 5e-5, "adapter": 5e-5}
DTYPES: dict[str, dict[str, Any]] = {
    "float32": {"model__dtype": "float32", "model__attention": "sdpa"},
    "bfloat16": {
        "model__dtype": "bfloat16", "model__attention": "transformer_engine", "train__share_prompt_prefix": False,
    },
}  # fmt: skip


def case_name(model: str, sizes: dict[str, Any], dtype: str) -> str:
    """Such as ``dense tp2 sp float32``."""
    parts = [k if v is True else f"no {k}" if v is False else f"{k}{v}" for k, v in sizes.items()]
    return " ".join((model, *parts, dtype))


def changes_of(sizes: dict[str, Any], dtype: str, *, device: str) -> dict[str, Any]:
    """Config changes of a case."""
    dtypes = DTYPES[dtype] if device == "cuda" else DTYPES[dtype] | {"model__attention": "sdpa"}
    return {"train__microbatch_tokens": 128, **dtypes, **layout(**sizes)}


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """What differs between two layouts of one policy, or between two dtypes."""
    one, other = found["statistics"], wanted["statistics"]
    return {
        "loss": abs(one["loss_sum"] - other["loss_sum"]) / other["normaliser"],
        "logprob": float((found["logprobs"] - wanted["logprobs"]).abs().max()),
        "gradient": difference(found["gradient"], wanted["gradient"]),
        "adapter": difference(found["adapter"], wanted["adapter"]),
    }


def parity(device: str, dtypes: tuple[str, ...], timeout_s: float) -> list[dict[str, Any]]:
    """Rows of the comparison; a launch that fails gives one row with its last words.

    ``dtypes`` includes float32, which the bounds of the others are measured against.
    """
    import torch

    from megatron_qerl.config.schema import QuantizeConfig
    from megatron_qerl.nvfp4.quantize import quantize
    from tests.support.tiny_model import write_model

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folders = {}
        for model, (family, sizes) in PARITY_MODELS.items():
            source = write_model(
                root / model, family, tied=False, dtype=torch.bfloat16, scale=0.05, **PARITY_SIZES, **sizes
            )
            folders[model] = quantize(QuantizeConfig(source=source, output=root / f"{model}_nvfp4", device="cpu"))
        ones = _run_parity(1, folders, {m: [{}] for m in folders}, None, dtypes, device, root / "1", timeout_s)[0]
        rows = []
        for model, layouts in {"dense": DENSE, "experts": EXPERTS}.items():
            here = root / f"2 {model}"
            try:
                ranks = _run_parity(2, folders, {model: list(layouts)}, ones, dtypes, device, here, timeout_s)
            except AssertionError as error:  # a rank failed alone or the time ran out; the other model still counts
                rows.append({"case": model, "ok": False, "error": str(error)[-3000:]})
                print(rows[-1]["error"], flush=True)
                continue
            rows += [_parity_row(model, sizes, dtype, ones, ranks) for sizes, dtype in _cases(layouts, dtypes)]
            print(*rows[-len(_cases(layouts, dtypes)) :], sep="\n", flush=True)
    return rows


def _cases(layouts: Iterable[dict[str, Any]], dtypes: tuple[str, ...]) -> list[tuple[dict[str, Any], str]]:
    return [(s, d) for s in layouts for d in dtypes if d == "float32" or not s or s in IN_BF16]


def _parity_row(
    model: str, sizes: dict[str, Any], dtype: str, ones: dict[str, Any], ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    name, wanted = case_name(model, sizes, dtype), ones[case_name(model, {}, dtype)]
    failed = [found for found in (wanted, *(found[name] for found in ranks)) if isinstance(found, str)]
    if failed:
        return {"case": name, "ok": False, "error": failed[0]}
    bounds = BOUNDS
    if dtype != "float32":
        # Of the dense model also for experts: there BF16 sends some tokens elsewhere than FP32, layouts must not.
        rounding = compare(ones[case_name("dense", {}, dtype)], ones[case_name("dense", {}, "float32")])
        bounds = {k: max(2 * v, BOUNDS[k]) for k, v in rounding.items()}
        # A token's loss moves with its log-probability times an advantage of 1.5 at most, 0.7 on average.
        bounds["loss"] = bounds["logprob"]
    worst: dict[str, float] = {}
    for found in ranks:
        for key, value in compare(found[name], wanted).items():
            worst[key] = max(worst.get(key, 0.0), value)
    names = {"loss": "loss_diff", "logprob": "logprob_diff", "gradient": "grad_rel_diff", "adapter": "adapter_rel_diff"}
    same = all(found[name]["start"] == wanted["start"] for found in ranks)
    ok = same and all(worst[k] <= bounds[k] for k in worst)
    return {"case": name, **{names[k]: v for k, v in worst.items()}, "bound": bounds, "ok": ok}


def _run_parity(
    world: int,
    folders: dict[str, Path],
    layouts: dict[str, list[dict[str, Any]]],
    ones: dict[str, Any] | None,
    dtypes: tuple[str, ...],
    device: str,
    folder: Path,
    timeout_s: float,
) -> list[dict[str, Any]]:
    from tests.support.distributed import launch

    arguments: dict[str, Any] = {}
    for model, wanted in layouts.items():
        for sizes, dtype in _cases(wanted, dtypes):
            one = None if ones is None else ones[case_name(model, {}, dtype)]
            if isinstance(one, str):
                continue
            arguments[case_name(model, sizes, dtype)] = {
                "path": folders[model],
                "lengths": LENGTHS,
                "rollout": None if one is None else one["rollout"],
                "changes": changes_of(sizes, dtype, device=device),
            }
    target = "benchmarks.parallel:run_parity_cases"
    return launch(world, target, arguments, folder, timeout_s=timeout_s, gpus=device == "cuda")


def run_parity_cases(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: name -> what ``everything`` finds, or the traceback of a case that raised on every rank."""
    from megatron_qerl.parallel import setup
    from tests.multiprocess.pipeline_context_cases import everything

    results: dict[str, Any] = {}
    for name, options in arguments.items():
        begin = time.perf_counter()
        try:
            results[name] = everything(**options)
        # One layout that does not run must not hide what the others do.
        except Exception:
            results[name] = traceback.format_exc()[-1500:]
        setup.shutdown()
        print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
    return results


def run_worker(name: str, output: Path) -> None:
    """One rank of a timed step."""
    import torch.distributed as dist

    from megatron_qerl.config.schema import ParallelSection

    model, gpus, layout, changes = STEPS[name]
    found = run_arm(model, "nvfp4", replace(Settings(), **changes), ParallelSection(**layout))
    everywhere: list[Any] = [None] * gpus
    dist.all_gather_object(everywhere, found)
    if int(os.environ.get("RANK", "0")) == 0:
        keys = ("peak_bytes", "resting_bytes", "static_bytes", "activations_bytes")
        output.write_text(json.dumps(found | {"ranks": [{k: f[k] for k in keys} for f in everywhere]}))
    dist.destroy_process_group()


def time_step(name: str, timeout_s: float) -> dict[str, Any]:
    """A case in processes of its own."""
    model, gpus, layout, changes = STEPS[name]
    row: dict[str, Any] = {"case": name, "model": model, "layout": layout, "gpus": gpus}
    row["settings"] = asdict(replace(Settings(), **changes))
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={gpus}", "--standalone"]
        command += ["-m", "benchmarks.parallel", "--worker", name, "--output", str(result)]
        # Its own session: a timeout must end the ranks too, not torchrun alone.
        with log.open("w") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
            try:
                code: int | None = process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, 9)
                process.wait()
        if code != 0 or not result.is_file():
            error = f"timed out after {timeout_s:g} s" if code is None else f"exit status {code}"
            return row | {"error": error, "log": log.read_text(errors="replace").splitlines()[-40:]}
        found = json.loads(result.read_text())
    return row | {
        "step_s": found["step_ms"] / 1e3,
        "tokens_per_s": found["tokens_per_s"],
        "peak_bytes": max(rank["peak_bytes"] for rank in found["ranks"]),
        "found": found,
    }


def with_speedup(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its speed against its one-GPU case, where both ran."""
    by_name = {row["case"]: row for row in rows}
    for row in rows:
        base = by_name.get(BASES.get(row["case"], ""), {})
        row["speedup"] = base["step_s"] / row["step_s"] if "step_s" in base and "step_s" in row else None
    return rows


def main() -> int:
    """Run what is asked for; exit status 1 if a comparison failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parity", action="store_true")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the parity")
    parser.add_argument("--steps", default="", help=f"comma-separated, of {', '.join(STEPS)}")
    parser.add_argument("--timeout-s", type=float, default=150.0, help="limit of one case, or of one parity launch")
    parser.add_argument("--worker", help="case to run in this process; used by the script itself")
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker, options.output)
        return 0
    import torch

    result: dict[str, Any] = {"environment": surroundings() | {"gpus": torch.cuda.device_count()}}
    result |= {"parity": [], "step": []}

    def write() -> None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")

    if options.parity:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        result["parity"] = parity(device, tuple(options.dtypes.split(",")), options.timeout_s)
        write()
    for name in filter(None, options.steps.split(",")):
        row = time_step(name, options.timeout_s)
        result["step"] = with_speedup([*result["step"], row])
        line = {k: row.get(k) for k in ("case", "step_s", "tokens_per_s", "peak_bytes", "speedup", "error")}
        print(line, *row.get("log", []), sep="\n  ", flush=True)
        write()
    return 0 if all(row["ok"] for row in result["parity"]) else 1


if __name__ == "__main__":
    sys.exit(main())
