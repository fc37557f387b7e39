"""Which path a product takes, and the table that says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_extensions import dispatch, nvfp4_linear
from te_extensions.dispatch import (
    ENVIRONMENT_VARIABLE,
    Rule,
    Table,
    build_table,
    choose_path,
    parse_table,
    table_from_files,
)
from te_extensions.humming import humming_linear, humming_refusal
from tests.unit.test_kernels_reference import make_weight

ROOT = Path(__file__).parents[2]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ANY_DEQUANTIZE = Rule(0, None, 0, None, None, "dequantize")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(dispatch, "_choices", {})
    dispatch._table_for.cache_clear()


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_device_name", lambda index: "NVIDIA H200")


def test_without_cuda_it_is_the_reference() -> None:
    assert choose_path(CPU, 4, 64, 64) == "reference"


def test_rules_are_read_in_order_and_bounds_are_inclusive() -> None:
    table = Table("g", None, "s", (Rule(64, 64, 32, 48, 8, "fused"), Rule(0, 64, 0, None, 4, "fused"), ANY_DEQUANTIZE))
    cases = {(8, 64, 32): "fused", (8, 64, 48): "fused", (9, 64, 48): "dequantize", (8, 64, 49): "dequantize"}
    cases |= {(4, 64, 49): "fused", (4, 65, 49): "dequantize", (8, 63, 48): "dequantize"}
    assert {case: table.path(*case) for case in cases} == cases


def test_a_table_that_leaves_a_shape_out_is_refused() -> None:
    with pytest.raises(ValueError, match="last rule must cover"):
        Table("g", None, "s", (Rule(0, None, 0, None, 1024, "fused"),))
    with pytest.raises(ValueError, match="'humming' is never automatic"):
        Table("g", None, "s", (Rule(0, 64, 0, None, 1024, "humming"), ANY_DEQUANTIZE))


def test_the_committed_file_is_what_dumps_writes() -> None:
    text = dispatch.TABLE_FILE.read_text()
    table = parse_table(text)
    assert table.dumps() == text
    assert set(json.loads(text)["rules"][0]) == {"n_min", "n_max", "k_min", "k_max", "m_max", "path"}


def test_the_committed_table_is_what_its_source_gives() -> None:
    table = parse_table(dispatch.TABLE_FILE.read_text())
    if table.measured is None:
        # Until a GPU has been measured the rules are the stated estimate, and nothing else.
        assert table.rules == (Rule(0, None, 0, None, 1024, "fused"), ANY_DEQUANTIZE)
        return
    assert table_from_files(ROOT, table.source.split(", ")) == table


def test_environment_beats_the_table_and_an_argument_beats_both(on_h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight(64, 64)
    monkeypatch.setattr(dispatch, "refusal", lambda *_: None)

    def resolve(requested: str) -> str:
        return dispatch.resolve_path(requested, 4, weight, torch.bfloat16, GPU)

    assert resolve("auto") == "fused"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "dequantize")
    assert resolve("auto") == "dequantize"
    assert resolve("reference") == "reference"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fats")
    with pytest.raises(ValueError, match=f"{ENVIRONMENT_VARIABLE} = 'fats' is not a path"):
        resolve("auto")


def test_a_named_path_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = make_weight(64, 64), torch.zeros(2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="path = 'fused' cannot compute M=2 N=64 K=64: device cpu"):
        nvfp4_linear(x, weight, path="fused")
    with pytest.raises(ValueError, match=r"x is torch\.float32"):
        nvfp4_linear(x.float(), weight, path="humming")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fused")
    with pytest.raises(ValueError, match=f"{ENVIRONMENT_VARIABLE} = 'fused' cannot compute"):
        nvfp4_linear(x, weight)


def test_auto_gives_way_with_a_logged_reason(
    on_h200: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = SimpleNamespace(fused_refusal=lambda rows, weight, device: "K = 72 is not a multiple of 64")
    monkeypatch.setitem(__import__("sys").modules, "te_extensions.fused", fake)
    weight = make_weight(64, 64)
    with caplog.at_level(logging.INFO, logger="te_extensions.dispatch"):
        for _ in range(3):
            assert dispatch.resolve_path("auto", 4, weight, torch.bfloat16, GPU) == "dequantize"
            assert dispatch.resolve_path("auto", 4, weight, torch.float32, GPU) == "dequantize"
    reasons = [r.getMessage() for r in caplog.records if "instead of fused" in r.getMessage()]
    assert len(reasons) == 2
    assert "K = 72 is not a multiple of 64" in reasons[0]
    assert "torch.float32" in reasons[1]


def test_each_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    weight = make_weight(64, 64)
    with caplog.at_level(logging.INFO, logger="te_extensions.dispatch"):
        for rows in (2, 3):
            nvfp4_linear(torch.zeros(rows, 64), weight)
            nvfp4_linear(torch.zeros(rows, 64), weight, path="dequantize")
    assert [r.getMessage() for r in caplog.records] == [
        "dispatch: N=64 K=64 -> reference (first at M=2, by the table)",
        "dispatch: N=64 K=64 -> dequantize (first at M=2, by path = 'dequantize')",
    ]


def test_another_gpu_uses_the_table_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_device_name", lambda index: "NVIDIA H100")
    with caplog.at_level(logging.INFO, logger="te_extensions.dispatch"):
        assert choose_path(GPU, 4, 64, 64) == "fused"
        assert choose_path(GPU, 5, 64, 64) == "fused"
    notes = [r.getMessage() for r in caplog.records if "NVIDIA H100" in r.getMessage()]
    assert len(notes) == 1


def row(n: int, k: int, m: int, path: str, us: float, pass_: str = "forward") -> dict[str, Any]:
    return {"layer": "l", "tp": 1, "n": n, "k": k, "m": m, "pass": pass_, "path": path, "us": us}


def results(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"environment": {"date": "2026-01-02T03:04:05+00:00", "hardware": {"gpu": "G"}}, "rows": rows}


# fused, dequantize at M = 1, 64, 512, 2048.
CURVES = {
    (64, 32): [(1, 9), (2, 9), (8, 10), (40, 20)],
    (32, 64): [(9, 8), (9, 8), (11, 8), (40, 20)],
    # A tie lost to noise at M = 64 must not make three changes of path.
    (128, 32): [(1, 4), (4.01, 4), (4, 8), (40, 20)],
    # Nor is a hair's gain at M = 512 worth the loss at 64.
    (256, 32): [(1, 2), (10, 5), (9.9, 10), (40, 20)],
    (16, 16): [(1, 2), (1, 2), (1, 2), (1, 2)],
}


def curve_rows(shapes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    return [
        row(*shape, m, path, us)
        for shape in shapes
        for m, pair in zip((1, 64, 512, 2048), CURVES[shape], strict=True)
        for path, us in zip(("fused", "dequantize"), pair, strict=True)
    ]


def test_a_measured_shape_gets_one_crossover() -> None:
    table = build_table(results(curve_rows(list(CURVES))), "r.json")
    assert (table.device, table.measured, table.source) == ("G", "2026-01-02", "r.json")
    assert [r for r in table.rules if r.n_max == 64] == [
        Rule(64, 64, 32, 32, 512, "fused"),
        Rule(64, 64, 32, 32, None, "dequantize"),
    ]
    assert [r for r in table.rules if r.n_max == 32] == [Rule(32, 32, 64, 64, None, "dequantize")]
    assert [r.m_max for r in table.rules if r.n_max == 128] == [512, None]
    assert [r.m_max for r in table.rules if r.n_max == 256] == [1, None]
    assert [r for r in table.rules if r.n_max == 16] == [Rule(16, 16, 16, 16, None, "fused")]
    assert table.path(600, 64, 32) == "dequantize"
    assert table.path(600, 16, 16) == "fused"


def test_other_shapes_get_the_typical_crossover() -> None:
    table = build_table(results(curve_rows([(64, 32), (32, 64)])), "r.json")
    # Geometric means: fused 3, 4.2, 9.4, 40; dequantize 8.5, 8.5, 8.9, 20.
    assert table.rules[-2:] == (Rule(0, None, 0, None, 64, "fused"), ANY_DEQUANTIZE)


def test_the_order_of_rows_and_other_rows_do_not_matter() -> None:
    rows = curve_rows(list(CURVES))
    other = [row(64, 32, 1, "cublas", 0.1), row(64, 32, 1, "humming", 0.1), row(64, 32, 1, "dequantize", 0.1, "dgrad")]
    assert build_table(results(rows[::-1] + other), "r").dumps() == build_table(results(rows), "r").dumps()
    table = build_table(results(rows), "r")
    assert parse_table(table.dumps()) == table


def test_fused_is_not_assumed_where_only_the_other_was_measured() -> None:
    rows = curve_rows([(16, 16)])
    for r in rows:
        if r["path"] == "fused" and r["m"] == 2048:
            r["us"] = None
    assert build_table(results(rows), "r").rules[:2] == (
        Rule(16, 16, 16, 16, 512, "fused"),
        Rule(16, 16, 16, 16, None, "dequantize"),
    )


def test_rebuild_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "TABLE_FILE", tmp_path / "table.json")
    source = tmp_path / "r.json"
    source.write_text(json.dumps(results(curve_rows(list(CURVES)))))
    dispatch.rebuild(str(source))
    assert parse_table((tmp_path / "table.json").read_text()) == build_table(
        results(curve_rows(list(CURVES))), str(source)
    )


def test_a_table_from_several_files_has_the_rows_of_all(tmp_path: Path) -> None:
    all_rows = curve_rows(list(CURVES))
    for name, rows in (("a.json", all_rows[::2]), ("b.json", all_rows[1::2])):
        (tmp_path / name).write_text(json.dumps(results(rows)))
    table = table_from_files(tmp_path, ["a.json", "b.json"])
    assert table.source == "a.json, b.json"
    assert table.rules == build_table(results(all_rows), "r").rules
    other = results(all_rows)
    other["environment"]["hardware"]["gpu"] = "another"
    (tmp_path / "c.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"a\.json, c\.json: measured on .*another"):
        table_from_files(tmp_path, ["a.json", "c.json"])


def test_results_that_compare_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no shape has forward times of both"):
        build_table(results([row(64, 32, 1, "fused", 1.0), row(64, 64, 1, "dequantize", 1.0)]), "r")


def test_humming_says_what_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_extensions import humming

    weight = make_weight(128, 64)
    assert humming_refusal(2, weight, CPU) == "device cpu is not a CUDA device"
    monkeypatch.setattr(humming, "_installed", lambda: True)
    assert humming_refusal(2, weight, GPU) is None
    assert "128 x 64" in str(humming_refusal(2, make_weight(64, 64), GPU))
    monkeypatch.setattr(humming, "_installed", lambda: False)
    assert "pip install humming-kernels==0.1.20" in str(humming_refusal(2, weight, GPU))
    with pytest.raises(ValueError, match="use path='dequantize'"):
        humming_linear(torch.zeros(2, 64), weight)


def test_humming_keeps_one_copy_a_live_weight_and_repacks_after_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_extensions import humming

    made: list[object] = []
    monkeypatch.setattr(humming, "_prepared", {})
    monkeypatch.setattr(humming, "humming_refusal", lambda *_: None)
    monkeypatch.setattr(humming, "_prepare", lambda weight: made.append(weight.tensor_scale) or (lambda x: x))
    first, x = make_weight(64, 64), torch.zeros(2, 64)
    for _ in range(2):
        humming_linear(x, first)
    assert len(made) == 1
    first.packed.bitwise_xor_(1)
    humming_linear(x, first)
    assert len(made) == 2
    del first
    humming_linear(x, make_weight(64, 64, seed=1))
    assert len(made) == 3
    assert len(humming._prepared) == 1
