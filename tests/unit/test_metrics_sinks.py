"""The sinks: a record that stays strict and free of duplicates, a terminal line, and real offline wandb files."""

from __future__ import annotations

import io
import json
import re
import struct
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_qerl.config.schema import MetricsSection, WandbSection
from megatron_qerl.errors import BackendUnavailableError, CheckpointError, FaultError, NonFiniteError, UserError
from megatron_qerl.metrics.sinks import ConsoleSink, JsonlSink, SinkGroup, build_sinks
from megatron_qerl.metrics.sinks.console import format_duration, format_step
from megatron_qerl.types import NoiseState, Outcome, StepMetrics


def _line(step: int, reward: float = 0.5) -> StepMetrics:
    return StepMetrics(step, {"reward/mean": reward, "time/step_s": 2.0})


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def _started(path: Path) -> JsonlSink:
    sink = JsonlSink(path)
    sink.start()
    return sink


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = _started(path)
    noise = NoiseState(1, 0.01, 7, 1, "rollout", ("input",), "ab")
    sink.log(StepMetrics(1, {"reward/mean": 0.25, "optimizer/updates": 3}, {"noise": noise, "path": tmp_path}))
    document = json.loads(path.read_text())
    assert document["values"] == {"reward/mean": 0.25, "optimizer/updates": 3}
    assert document["info"]["noise"]["roles"] == ["input"]
    assert document["info"]["path"] == str(tmp_path)
    assert path.read_text().endswith("\n")


def test_a_resumed_run_has_no_step_twice_and_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = _started(path)
    for step in (1, 2, 3):
        sink.log(_line(step))
    position = sink.checkpoint_position()
    for step in (4, 5):
        sink.log(_line(step, reward=0.1))
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 6, "val')  # killed while writing
    resumed = JsonlSink(path)
    resumed.resume(position)
    assert resumed.checkpoint_position() == 3
    for step in (4, 5, 6):
        resumed.log(_line(step, reward=0.9))
    resumed.close()
    assert _steps(path) == [1, 2, 3, 4, 5, 6]
    assert [json.loads(line)["values"]["reward/mean"] for line in path.read_text().splitlines()][3:] == [0.9] * 3


def test_a_run_resumed_from_before_its_first_line_starts_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = _started(path)
    sink.log(_line(1))
    sink.close()
    resumed = JsonlSink(path)
    resumed.resume(0)
    resumed.log(_line(1))
    resumed.close()
    assert _steps(path) == [1]


def test_a_record_shorter_than_the_checkpoint_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "values": {}}\n{"step": 2, "val')
    with pytest.raises(CheckpointError, match="made after 2 lines"):
        JsonlSink(path).resume(2)
    assert path.read_text().count("\n") == 1  # nothing was cut off
    with pytest.raises(CheckpointError, match="made after 1 lines"):
        JsonlSink(tmp_path / "absent.jsonl").resume(1)


def test_a_new_run_does_not_append_to_an_old_record(tmp_path: Path) -> None:
    sink = _started(tmp_path / "metrics.jsonl")
    sink.log(_line(1))
    sink.close()
    with pytest.raises(UserError, match=r"run\.name"):
        build_sinks(MetricsSection(console=False), tmp_path, 10, run_name="again")


def test_a_step_that_was_logged_already_is_refused_also_after_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = _started(path)
    sink.log(_line(5))
    with pytest.raises(FaultError, match="step 5 after step 5"):
        sink.log(_line(5))
    sink.close()
    resumed = JsonlSink(path)
    resumed.resume(1)
    with pytest.raises(FaultError, match="step 4 after step 5"):
        resumed.log(_line(4))
    resumed.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_strict_json_refuses_what_is_not_finite_and_writes_nothing(tmp_path: Path, value: float) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = _started(path)
    with pytest.raises(NonFiniteError, match="reward/mean"):
        sink.log(_line(1, reward=value))
    with pytest.raises(FaultError, match="info cannot be written"):
        sink.log(StepMetrics(1, {}, {"probe": {"deep": [value]}}))
    with pytest.raises(FaultError, match="info cannot be written"):
        sink.log(StepMetrics(1, {}, {"probe": object()}))
    sink.log(_line(1))
    sink.close()
    assert _steps(path) == [1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_a_fault_that_names_the_file() -> None:
    sink = _started(Path("/dev/full"))
    with pytest.raises(FaultError, match=r"step 1 to /dev/full.*No space left"):
        sink.log(_line(1))
    sink.close()


def test_a_folder_that_cannot_be_written_is_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.output_dir"):
        build_sinks(MetricsSection(console=False), tmp_path / "absent", 10, run_name="x")


@dataclass
class _FailingSink:
    closed: bool = False

    def log(self, metrics: StepMetrics) -> None:
        raise FaultError("service", "it answers", "Wait")

    def close(self) -> None:
        self.closed = True
        raise FaultError("closing the service", "it answers", "Wait")


def test_the_record_is_written_and_closed_even_when_another_sink_fails(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    failing = _FailingSink()
    group = SinkGroup(_started(path), (failing,))
    with pytest.raises(FaultError, match="service"):
        group.log(_line(1))
    with pytest.raises(FaultError, match="closing the service"):
        group.close()
    assert _steps(path) == [1]
    assert failing.closed
    with pytest.raises(AssertionError):
        group.record.log(_line(2))


def test_the_group_refuses_a_misspelt_name_before_any_sink_sees_it(tmp_path: Path) -> None:
    with build_sinks(MetricsSection(console=False), tmp_path, 10, run_name="x") as group:
        with pytest.raises(FaultError, match="did you mean reward/mean"):
            group.log(StepMetrics(1, {"reward/meen": 0.0}))
        group.log(_line(1))
    assert _steps(tmp_path / "metrics.jsonl") == [1]


def test_the_line_shows_what_was_measured_and_a_dash_for_what_was_not() -> None:
    values = {
        "reward/mean": 0.3125,
        "groups/mixed_fraction": 0.625,
        "noise/sigma_nominal": 0.01,
        "length/mean_tokens": 143.2,
        "time/step_s": 8.44,
    }
    assert format_step(StepMetrics(7, values), 7, 200) == (
        "step   7/200 | reward 0.312 | mixed 62 % | sigma 1.0e-02 | length 143 tokens | 8.4 s"
    )
    assert format_step(StepMetrics(7, {}), 7, 200).count("-") == 5


def test_a_log_file_gets_one_plain_line_a_step_with_the_time_left() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(total_steps=12, completed_steps=9, stream=stream)
    for step in (10, 11, 12):
        sink.log(_line(step))
    sink.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 10/12", "step 11/12", "step 12/12"]
    assert lines[0].endswith("ETA 4 s")
    assert lines[1].endswith("ETA 2 s")
    assert "ETA" not in lines[2]
    assert "\x1b" not in stream.getvalue()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    stream = _Terminal()
    sink = ConsoleSink(total_steps=4, stream=stream)
    sink.log(_line(1))
    sink.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "step 1/4 | reward 0.500" in shown
    assert "1/4 ETA 6 s" in shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (425, "7 min 05 s"), (12_000, "3 h 20 min"), (187_200, "2 d 04 h")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


_WANDB_RUN = """
import os, socket, sys
from pathlib import Path
from megatron_qerl.config.schema import MetricsSection, WandbSection
from megatron_qerl.metrics.sinks import build_sinks
from megatron_qerl.types import StepMetrics

def refuse(*args, **kwargs):
    raise AssertionError("the network was used")
socket.getaddrinfo = socket.create_connection = refuse
run_dir, first, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
config = MetricsSection(console=False, sinks=("wandb",), wandb=WandbSection(project="probe"))
position = None if resume == "new" else int(resume)
with build_sinks(config, run_dir, 4, run_name="demo", run_config={"seed": 3}, resume_position_lines=position) as sinks:
    for step in (first, first + 1):
        sinks.log(StepMetrics(step, {"reward/mean": step / 4, "tokens/trained": 10}))
print("finished", os.environ["WANDB_ERROR_REPORTING"])
"""


def _wandb_payloads(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: 7 bytes of header, then LevelDB's log format in blocks of 32 KiB.

    Each piece is checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last) and payload.
    """
    position, parts = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if kind == 0:
            return
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def _history(file: Path) -> tuple[list[dict[str, float]], set[str], str]:
    """Logged rows, names with a metric definition, and the run id, read back from wandb's own binary record."""
    from wandb.proto import wandb_internal_pb2

    rows, defined, run_id = [], set(), ""
    for payload in _wandb_payloads(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        if record.HasField("metric"):
            defined.add(record.metric.name)
        if record.HasField("run"):
            run_id = record.run.run_id
    return rows, defined, run_id


def test_wandb_offline_writes_real_records_in_the_run_folder_and_nowhere_else(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_dir, home = tmp_path / "run", tmp_path / "home"
    run_dir.mkdir()
    home.mkdir()
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "WANDB_MODE": "disabled", "TMPDIR": str(tmp_path)}
    for first, resume in ((1, "new"), (3, "2")):
        done = subprocess.run(
            [sys.executable, "-c", _WANDB_RUN, str(run_dir), str(first), resume],
            capture_output=True,
            text=True,
            env=environment,
            cwd=home,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "finished false\n"
    assert list(home.rglob("*")) == []
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    histories = [_history(file) for file in files]
    rewards = [row["reward/mean"] for rows, _, _ in histories for row in rows]
    assert rewards == [0.25, 0.5, 0.75, 1.0]
    assert [row["step"] for rows, _, _ in histories for row in rows] == [1, 2, 3, 4]
    assert {"step", "reward/mean", "time/rollout_s"} <= histories[0][1]
    assert histories[0][2] == histories[1][2] != ""
    assert _steps(run_dir / "metrics.jsonl") == [1, 2, 3, 4]


def test_a_missing_wandb_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    from megatron_qerl.metrics.sinks.wandb import WandbSink

    with pytest.raises(BackendUnavailableError, match=r"metrics\.sinks.*megatron-qerl\[wandb\]"):
        WandbSink(WandbSection(), tmp_path, "x")


def test_a_leftover_folder_called_wandb_is_not_taken_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    from megatron_qerl.metrics.sinks.wandb import WandbSink

    with pytest.raises(BackendUnavailableError, match="not installed"):
        WandbSink(WandbSection(), tmp_path, "x")


def test_outcomes_in_info_are_plain_strings(tmp_path: Path) -> None:
    sink = _started(tmp_path / "metrics.jsonl")
    sink.log(StepMetrics(1, {}, {"first": Outcome.TIMEOUT}))
    sink.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["info"] == {"first": "timeout"}
