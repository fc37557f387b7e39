"""The kernel benchmark proves what it claims to prove, on a CPU: only its times mean nothing there."""

from __future__ import annotations

import json
import sys
import time
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernels, kernels_worker
from benchmarks.kernels_journal import DEVICE_LOST, SECTIONS, Journal, Options, State
from benchmarks.kernels_paths import Contender
from benchmarks.kernels_proof import NORM_BOUND, corrupted, decode, difference, random_weight
from benchmarks.kernels_report import best_rows, table, targets
from benchmarks.shapes import LAYERS, Layer, Slice, slice_of, slices
from te_extensions import dispatch, nvfp4_dequantize, nvfp4_linear
from te_extensions.dispatch import build_table

SMALL = Options(layers=("32B.gate_up",), m=(1, 16), paths=("reference",), device="cpu", shrink=128)


def run(options: Options, path: Path) -> State:
    """A worker in this process."""
    journal = Journal(path / "journal")
    with torch.no_grad():
        kernels_worker.Worker(options, journal, time.monotonic() + 60.0).run()
    return journal.read()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Shapes


def test_layers_are_those_of_the_models() -> None:
    sizes = {name: (layer.n, layer.k) for name, layer in LAYERS.items()}
    assert sizes["7B.qkv"] == (4608, 3584)
    assert sizes["14B.gate_up"] == (27648, 5120)
    assert sizes["32B.gate_up"] == (55296, 5120)
    assert sizes["32B.down"] == (5120, 27648)
    assert sizes["30B-A3B.qkv"] == (5120, 2048)
    assert sizes["30B-A3B.o"] == (2048, 4096)
    assert sizes["30B-A3B.expert_gate_up"] == (1536, 2048)
    assert sizes["30B-A3B.expert_down"] == (2048, 768)
    assert (LAYERS["30B-A3B.expert_down"].experts, LAYERS["30B-A3B.expert_down"].top_k) == (128, 8)


def test_slices_divide_n_or_k_and_say_why_they_are_missing() -> None:
    have, missing = slices(("7B.qkv", "32B.down", "32B.gate_up"), (1, 4, 8))
    assert {s.key: (s.n, s.k) for s in have} == {
        "7B.qkv|tp1": (4608, 3584),
        "7B.qkv|tp4": (1152, 3584),
        "32B.down|tp1": (5120, 27648),
        "32B.down|tp4": (5120, 6912),
        "32B.down|tp8": (5120, 3456),
        "32B.gate_up|tp1": (55296, 5120),
        "32B.gate_up|tp4": (13824, 5120),
        "32B.gate_up|tp8": (6912, 5120),
    }
    assert missing == ["7B.qkv at TP 8: 28 attention heads or KV groups do not divide by 8"]
    odd = slice_of(Layer("odd", (64,), 16 * 3, "row"), 2)
    assert isinstance(odd, str)
    assert "K = 48 / 2 is not a multiple of 16" in odd
    with pytest.raises(ValueError, match=r"--layers 99B: no such layer"):
        slices(("99B",), (1,))


# Proof


@pytest.mark.parametrize("tensor_scale", [2.0**-9, 0.0123])
def test_the_reference_decodes_as_the_library_does(tensor_scale: float) -> None:
    tensor_scale = float(torch.tensor(tensor_scale, dtype=torch.float32))
    weight = random_weight(40, 96, seeded(), tensor_scale=tensor_scale)
    assert torch.equal(decode(weight), nvfp4_dequantize(weight, torch.float64))


def test_difference_finds_nan_one_wrong_element_and_wrong_weights() -> None:
    weight = random_weight(2048, 64, seeded())
    x = torch.randn(64, 64, generator=seeded(1)).bfloat16()
    reference = x.double() @ decode(weight).t()
    right = reference.bfloat16()
    assert difference(right, reference).fault is None
    assert 1e-3 < difference(right, reference).rel_err < 2e-3
    unwritten = right.clone()
    unwritten[63, 2047] = float("nan")
    assert "NaN" in str(difference(unwritten, reference).fault)
    wrong = right.clone()
    wrong[5, 7] += float(reference[5].square().mean().sqrt())
    # One element of 131072: the norm does not see it.
    assert difference(wrong, reference).rel_err < NORM_BOUND
    assert "an element is off" in str(difference(wrong, reference).fault)
    for name, other in corrupted(weight).items():
        assert difference(nvfp4_linear(x, other), reference).rel_err > 10 * NORM_BOUND, name


# The whole run


def test_a_run_has_every_row_and_its_proof(tmp_path: Path) -> None:
    state = run(replace(SMALL, passes=("forward", "dgrad"), paths=("reference", "dequantize")), tmp_path)
    rows = state.sections["rows"]
    assert state.finished
    assert [(r["pass"], r["m"], r["path"]) for r in rows] == [
        (p, m, path) for p in ("forward", "dgrad") for m in (1, 16) for path in ("reference", "dequantize")
    ]
    for row in rows:
        assert 0 < row["rel_err"] < NORM_BOUND
        assert row["us"] > 0
        assert row["ratio_cublas"] == pytest.approx(row["us_cublas"] / row["us"])
        assert row["ratio_humming"] is None
        assert (row["tp"], row["timing"], row["checked_columns"]) == (1, "cpu", None)
        moved = row["n"] * row["k"] * 9 / 16 + 4 + 2 * row["m"] * (row["n"] + row["k"])
        assert row["bytes_per_s"] == pytest.approx(1e6 * moved / row["us"])
    controls = state.sections["negative_controls"]
    assert len(controls) == 8
    assert all(c["as_it_must"] for c in controls)
    assert all((c["rel_err"] > NORM_BOUND) == (c["control"] != "right_weight") for c in controls)
    assert state.sections["errors"] == []
    assert len(table(rows)) == 1 + len(best_rows(rows)) == 5


def test_the_json_of_the_command_feeds_the_dispatch_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "kernels.json"
    small = ["--device", "cpu", "--shrink", "128", "--tp", "1,8", "--m", "1,16", "--paths", "dequantize"]
    assert kernels.main([*small, "--layers", "32B.o,7B.qkv", "--output", str(output)]) == 0
    data = json.loads(output.read_text())
    assert set(SECTIONS) <= data.keys()
    assert data["complete"]
    assert data["environment"]["torch"] == torch.__version__
    assert data["notes"] == ["no slice: 7B.qkv at TP 8: 28 attention heads or KV groups do not divide by 8"]
    printed = capfd.readouterr().out
    assert "32B.o " in printed
    assert "a CPU run: the times mean nothing" in printed
    data["environment"]["hardware"]["gpu"] = "a GPU"
    data["rows"] += [{**row, "path": "fused", "us": row["us"] / 2} for row in data["rows"]]
    assert build_table(data, "here").path(1, 40, 64) == "fused"


def test_a_failing_shape_costs_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = kernels_worker.own_contender

    def fragile(path: str, pass_name: str, weights: Any) -> Contender:
        contender = make(path, pass_name, weights)
        right = contender.call

        def call(x: torch.Tensor, i: int) -> torch.Tensor:
            if path == "dequantize" and x.shape[0] == 1:
                raise RuntimeError("cannot do one row")
            return right(x, i) * (1.01 if path == "dequantize" and x.shape[0] == 16 else 1.0)

        return replace(contender, call=call)

    monkeypatch.setattr(kernels_worker, "own_contender", fragile)
    state = run(replace(SMALL, m=(1, 16, 32), paths=("reference", "dequantize")), tmp_path)
    assert [(r["m"], r["path"]) for r in state.sections["rows"]] == [
        (1, "reference"),
        (16, "reference"),
        (32, "reference"),
        (32, "dequantize"),
    ]
    refused = {r["m"]: r["not_run"] for r in state.sections["not_timed"]}
    assert refused[1] == "failed: see errors"
    assert refused[16].startswith("rel_err 1.0")
    assert [e["where"] for e in state.sections["errors"]] == [
        "32B.gate_up|tp1|forward|m1 check dequantize",
        "32B.gate_up|tp1|forward|m16 check dequantize",
    ]
    assert "cannot do one row" in state.sections["errors"][0]["error"]
    assert "failed: see errors" in "".join(table([*state.sections["rows"], *state.sections["not_timed"]]))


def test_a_worker_leaves_out_what_is_done_and_what_took_the_last_one_down(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    unit = "32B.gate_up|tp1|forward|m"
    for key in ("controls|reference", "controls|dequantize", f"{unit}1"):
        journal.done(key)
    journal.begin(f"{unit}16", "check dequantize")
    journal.lost(f"{unit}16", "check dequantize", "illegal address")
    state = run(replace(SMALL, paths=("reference", "dequantize")), tmp_path)
    assert [(r["m"], r["path"]) for r in state.sections["rows"]] == [(16, "reference")]
    assert [(r["m"], r["path"]) for r in state.sections["not_timed"]] == [(16, "dequantize")]
    assert state.sections["negative_controls"] == []
    assert len(state.sections["errors"]) == 1


def test_a_blind_check_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(y: torch.Tensor, reference: torch.Tensor, columns: int | None = None) -> Any:
        return difference(reference.bfloat16(), reference, columns)

    monkeypatch.setattr(kernels_worker, "difference", blind)
    state = run(replace(SMALL, m=(1,)), tmp_path)
    assert [c["as_it_must"] for c in state.sections["negative_controls"]] == [True, False, False, False]
    assert len(state.sections["errors"]) == 3


def test_a_failing_yardstick_is_not_our_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(weights: Any, *, search: bool) -> Contender:
        return Contender(lambda x, i: 1.01 * nvfp4_linear(x, weights[i % len(weights)]), len(weights))

    monkeypatch.setattr(kernels_worker, "humming_contender", wrong)
    monkeypatch.setattr(kernels_worker.Worker, "_compile_humming", lambda self, parts: None)
    state = run(replace(SMALL, humming=True), tmp_path)
    assert len(state.sections["rows"]) == 2
    for row in state.sections["rows"]:
        assert row["us_humming"] is None
        assert row["yardsticks_not_run"]["humming"].startswith("rel_err 1.0")
    assert len(state.sections["yardstick_errors"]) == 2
    assert state.sections["errors"] == []


def test_lora_is_proved_and_its_cost_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Adapter:
        a: torch.Tensor
        b: torch.Tensor
        scale: float

    def fused_linear(x: torch.Tensor, weight: Any, lora: Adapter | None = None) -> torch.Tensor:
        y = x.float() @ nvfp4_dequantize(weight, torch.float32).t()
        if lora is None:
            return y.bfloat16()
        u = (lora.scale * x.float() @ lora.a.float().t()).bfloat16()
        return (y + u.float() @ lora.b.float().t()).bfloat16()

    stub = types.ModuleType("te_extensions.fused")
    stub.__dict__.update(
        fused_linear=fused_linear,
        FusedAdapter=Adapter,
        FusedLora=None,
        adapter_refusal=lambda rows, rank: None,
        fused_refusal=lambda m, weight, device: None,
    )
    monkeypatch.setattr(dispatch, "refusal", lambda *_: None)
    monkeypatch.setitem(sys.modules, "te_extensions.fused", stub)
    options = replace(SMALL, layers=("32B.qkv", "32B.o"), paths=("fused",), m=(16,), lora=True)
    state = run(options, tmp_path)
    assert state.sections["errors"] == []
    assert [(r["layer"], r["rank"]) for r in state.sections["lora"]] == [("32B.qkv", 96), ("32B.o", 32)]
    for row in state.sections["lora"]:
        assert 0 < row["rel_err"] < NORM_BOUND
        assert row["overhead"] == pytest.approx(row["us_lora"] / row["us"] - 1.0)
    # A kernel that forgets the adapter is found.
    stub.__dict__["fused_linear"] = lambda x, weight, lora=None: fused_linear(x, weight)
    (tmp_path / "2").mkdir()
    state = run(options, tmp_path / "2")
    assert state.sections["lora"] == []
    assert "rel_err" in state.sections["errors"][0]["error"]


def test_a_run_that_is_out_of_time_says_what_is_missing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    kernels_worker.Worker(SMALL, journal, time.monotonic() - 1.0).run()
    state = journal.read()
    assert state.skipped == ["32B.gate_up|tp1|forward|m1", "32B.gate_up|tp1|forward|m16"]
    assert not kernels.result(state, SMALL)["complete"]


def test_memory_sections_are_filled_and_fail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import kernels_memory

    def broken(device: str, shrink: int) -> list[dict[str, Any]]:
        raise RuntimeError("no room")

    monkeypatch.setattr(kernels_memory, "dequantize_rows", lambda device, shrink: [{"us": 1.0, "bad": float("nan")}])
    monkeypatch.setattr(kernels_memory, "norm_rows", broken)
    monkeypatch.setattr(kernels_memory, "logprob_rows", lambda device, shrink: [{"device": device, "shrink": shrink}])
    state = run(replace(SMALL, m=(1,), memory=True), tmp_path)
    assert state.sections["dequantize"] == [{"us": 1.0, "bad": None}]
    assert state.sections["logprob"] == [{"device": "cpu", "shrink": 128}]
    assert [(e["where"], e["error"]) for e in state.sections["errors"]] == [
        ("memory|norm run", "RuntimeError: no room")
    ]


# The supervisor

WORKER = """
import json, os, sys, time
journal, left, options = sys.argv[1:]
lines = [json.loads(line) for line in open(journal)] if os.path.exists(journal) else []
lost = [x["key"] for x in lines if x["event"] == "lost"]
done = [x["key"] for x in lines if x["event"] == "done"]
def write(event, **values):
    with open(journal, "a") as file:
        file.write(json.dumps({"event": event, **values}) + "\\n")
for key in ("a", "crash", "b", "hang", "lost", "c"):
    if key in lost + done:
        continue
    write("begin", key=key, step="check")
    if key == "crash":
        os._exit(139)
    if key == "hang":
        time.sleep(60)
    if key == "lost":
        write("row", section="errors", row={"where": "lost check", "error": "illegal address"})
        os._exit(int(options))
    write("row", section="rows", row={"key": key})
    write("done", key=key)
write("finish")
"""


def test_crashes_and_hangs_cost_one_unit_each(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    journal = Journal(tmp_path / "journal")
    state = kernels.supervise([sys.executable, str(script)], str(DEVICE_LOST), journal, 60.0, 3.0)
    assert state.finished
    assert [r["key"] for r in state.sections["rows"]] == ["a", "b", "c"]
    assert [(e["where"], e["error"]) for e in state.sections["errors"]] == [
        ("crash check", "the worker ended with status 139"),
        ("hang check", "no progress for 3 s"),
        ("lost check", "illegal address"),
    ]


def test_a_worker_that_cannot_start_is_not_tried_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    state = kernels.supervise([sys.executable, "-c", "raise SystemExit(3)"], "", journal, 60.0, 5.0)
    assert not state.finished
    assert [e["error"] for e in state.sections["errors"]] == ["the worker ended with status 3, outside any step"]


# Targets


def test_targets_use_the_best_path_and_name_the_worst_row() -> None:
    def row(m: int, path: str, us: float) -> dict[str, Any]:
        case = {"layer": "32B.gate_up", "tp": 1, "pass": "forward", "m": m, "path": path, "us": us}
        return {**case, "ratio_cublas": 150.0 / us, "ratio_humming": 60.0 / us}

    lines = targets(
        [row(1, "dequantize", 300.0), row(1, "fused", 40.0), row(16, "fused", 49.0), row(64, "fused", 65.0)]
    )
    assert lines[0].startswith("met ")
    assert "worst 3.06 at 32B.gate_up tp1 M=16" in lines[0]
    assert lines[1].startswith("not measured")
    assert lines[2].startswith("met ")
    assert lines[-1].startswith("MISSED")
    assert "worst 0.92 at 32B.gate_up tp1 M=64 forward (1 of 3 rows below)" in lines[-1]


def test_unknown_words_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.parse(["--output", str(tmp_path / "x"), "--paths", "fusd"])
    assert "--paths fusd: not one of reference, dequantize, fused" in capsys.readouterr().err
    options, _ = kernels.parse(["--output", "x", "--quick", "--m", "1,2", "--humming"])
    assert options.m == (1, 2)
    assert options.humming
    assert Options.from_json(options.to_json()) == options
    assert isinstance(slice_of(LAYERS[options.layers[0]], 1), Slice)
