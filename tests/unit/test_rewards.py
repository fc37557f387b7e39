"""Verdicts through the real verifier process, and what happens when such a process hangs, dies or loses its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_qerl.config.schema import RewardSection
from megatron_qerl.errors import DataError, FaultError
from megatron_qerl.rewards.math import MathVerifier
from megatron_qerl.rewards.outcome import OutcomeCounts
from megatron_qerl.rewards.process import VerifierProcess, default_command
from megatron_qerl.types import Judgement, Outcome, Problem

FAKE = (sys.executable, str(Path(__file__).parents[1] / "support" / "fake_verifier.py"))


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(RewardSection(timeout_s=30.0)) as opened:
        yield opened


def fake_verifier(section, workers=1):
    """The real verifier around processes that start at once and compare text."""
    verifier = MathVerifier(section)
    verifier._processes = [VerifierProcess(FAKE) for _ in range(workers)]
    return verifier


def outcomes(verifier, pairs):
    return [j.outcome.value for j in verifier.judge_all([(text, answer, "stop") for text, answer in pairs])]


def is_alive(pid):
    """Whether a process runs. One that has ended but was not reaped by its parent (a zombie) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid, limit_s=10.0):
    deadline_s = time.monotonic() + limit_s
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not is_alive(pid)


# Verdicts ------------------------------------------------------------------------------------------------------------

CORRECT = [
    ("3 + 4 = 7.", "7"),
    ("The answer is 7", "7"),
    (r"\boxed{3 + 4 = 7}", "7"),
    ("$3 + 4 = 7$", "7"),
    (r"\boxed{x = 7}", "7"),
    (r"\boxed{\approx 7}", "7"),
    ("7.0", "7"),
    ("007", "7"),
    ("-7", "-7"),
    ("1,234", "1234"),
    ("1234", "1,234"),
    (r"\boxed{1,234}", "1234"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1\,234}", "1234"),
    (r"\boxed{10,\!236}", "10236"),
    ("#### 1,234", "1234"),
    ("27", "27.0"),
    ("1/2", "0.5"),
    ("0.5", r"\frac{1}{2}"),
    (r"\boxed{\frac{3}{6}}", r"\frac{1}{2}"),
    ("1 1/2", "1.5"),
    ("0.333333", "1/3"),
    ("50%", "0.5"),
    ("50%", "50"),
    ("1.5e3", "1500"),
    (r"\boxed{7 dollars}", "7"),
    (r"\boxed{7\text{ cm}}", "7"),
    (r"\boxed{\text{7 apples}}", "7"),
    (r"\boxed{\$7.50}", "7.5"),
    (r"\boxed{7.}", "7"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{2^{10}}", "2^{10}"),
    (r"\boxed{1024}", "2^{10}"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{(3,\frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\boxed{3,2,1}", "1,2,3"),
    (r"\boxed{Evelyn}", r"\text{Evelyn}"),
    (r"\boxed{C}", r"\text{(C)}"),
]
WRONG = [
    ("8", "7"),
    ("7 or 8", "7"),
    ("-7", "7"),
    ("7.5", "7"),
    ("7.001", "7"),
    ("0.33", "1/3"),
    ("3 + 4", "7"),
    ("$3 + 4$", "7"),
    (r"\boxed{3 + 4}", "7"),
    (r"\boxed{7 = 3 + 4}", "7"),
    (r"\boxed{\sqrt{49}}", "7"),
    (r"\boxed{\frac{14}{2}}", "7"),
    ("14/2", "7"),
    (r"\boxed{7!}", "5040"),
    (r"\boxed{7x}", "7"),
    (r"\boxed{7 \text{ or } 8}", "7"),
    (r"\boxed{\{7\}}", "7"),
    (r"\boxed{(3,\frac{\pi}{3})}", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\boxed{Alice}", r"\text{Evelyn}"),
]
UNPARSABLE = [("", "7"), ("seven", "7"), (r"\boxed{}", "7"), (r"\boxed{7", "7"), (r"\boxed{\frac{}", "7")]


def test_verdicts(verifier):
    for pairs, expected in ((CORRECT, "correct"), (WRONG, "wrong"), (UNPARSABLE, "unparsable")):
        found = outcomes(verifier, pairs)
        assert [(pair, verdict) for pair, verdict in zip(pairs, found, strict=True) if verdict != expected] == []


def test_judgements_carry_score_and_extract():
    with fake_verifier(RewardSection(correct_score=2.0, wrong_score=-1.0)) as scored:
        unparsable, right, wrong = scored.judge_all([("?", "7", "stop"), ("=7", "7", "stop"), ("=8", "7", "stop")])
    assert right == Judgement(Outcome.CORRECT, 2.0, "7")
    assert wrong == Judgement(Outcome.WRONG, -1.0, "8")
    assert unparsable == Judgement(Outcome.UNPARSABLE, -1.0, None)


@pytest.mark.parametrize("finish_reason", ["length", "abort"])
def test_a_cut_response_is_judged_or_not_as_configured(verifier, finish_reason):
    texts = ["3 + 4 = 7, and", "3 + 4 = 8, and", "I think"]
    items = [(text, "7", finish_reason) for text in texts]
    assert [(j.outcome, j.score) for j in verifier.judge_all(items)] == [
        (Outcome.CORRECT, 1.0),
        (Outcome.TRUNCATED, 0.0),
        (Outcome.TRUNCATED, 0.0),
    ]
    with MathVerifier(RewardSection(truncated_counts_as="wrong")) as strict:
        assert {j.outcome for j in strict.judge_all(items)} == {Outcome.TRUNCATED}
        assert {j.score for j in strict.judge_all(items)} == {0.0}


def test_an_unreadable_reference_is_an_error_that_names_it(verifier):
    with pytest.raises(DataError, match=r"frac\{.*cannot read the reference"):
        verifier.judge_all([("7", "7", "stop"), ("7", r"\frac{", "stop")])


def test_references_are_checked_by_problem(verifier):
    good = Problem("a:1", "?", r"\frac{1}{2}", "a", "demo")
    bad = Problem("a:2", "?", r"\frac{", "a", "demo")
    verifier.check_references([good])
    with pytest.raises(DataError, match=r"a:2 \(demo\)"):
        verifier.check_references([good, bad])


def test_sixty_four_short_answers_take_less_than_three_tenths_of_a_second(verifier):
    items = [(f"{a} + {b} = {a + b}.", str(a + b), "stop") for a in range(1, 9) for b in range(1, 9)]
    verifier.judge_all(items)
    durations_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        judgements = verifier.judge_all(items)
        durations_s.append(time.perf_counter() - start_s)
        assert {j.outcome for j in judgements} == {Outcome.CORRECT}
    assert min(durations_s) < 0.3


def test_absurdly_long_numbers_cost_no_worker(verifier):
    long = "9" * 6000  # longer than Python converts to an integer
    texts = [long, f"{long}/3", rf"\boxed{{\frac{{{long}}}{{3}}}}", f"1e{long}", f"1.{long}", f"\\boxed{{{long}}}"]
    judgements = verifier.judge_all([(text, "7", "stop") for text in texts])
    assert {j.outcome for j in judgements} <= {Outcome.WRONG, Outcome.UNPARSABLE}
    assert verifier.restarts == 0


def test_several_workers_keep_the_order():
    items = [(str(n), str(n if n % 3 else n + 1), "stop") for n in range(1, 40)]
    with fake_verifier(RewardSection(), workers=3) as pool:
        judgements = pool.judge_all(items)
    assert [j.outcome is Outcome.CORRECT for j in judgements] == [n % 3 != 0 for n in range(1, 40)]
    assert [j.extracted for j in judgements] == [str(n) for n in range(1, 40)]


def test_no_answers_need_no_process():
    with MathVerifier(RewardSection()) as idle:
        assert idle.judge_all([]) == []
        assert idle._processes[0].pid is None


# The process ---------------------------------------------------------------------------------------------------------


def test_a_real_hang_is_a_timeout_and_the_next_answer_is_judged():
    # Python computes 9^9^9^9 in C and sees no signal while it does; nothing but killing the process ends it.
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # the parent has torch's threads when the worker starts
    with MathVerifier(RewardSection(timeout_s=3.0)) as impatient:
        impatient.judge_all([("1", "1", "stop")])
        first = impatient._processes[0].pid
        hung, next_one = impatient.judge_all(
            [(r"\boxed{9^{9^{9^{9}}}}", "2^{10}", "stop"), (r"\boxed{1024}", "2^{10}", "stop")]
        )
        assert hung == Judgement(Outcome.TIMEOUT, 0.0, "9^{9^{9^{9}}}")
        assert next_one.outcome is Outcome.CORRECT
        assert impatient.restarts == 1
        assert not is_alive(first)
        second = impatient._processes[0].pid
    assert wait_until_gone(second)


def test_a_timeout_counts_as_one_even_if_the_response_was_cut():
    with fake_verifier(RewardSection(timeout_s=0.3)) as verifier:
        items = [(r"\boxed{hang}", "7", "length"), (r"\boxed{hang}", "7", "stop"), ("7", "7", "stop")]
        found = [j.outcome for j in verifier.judge_all(items)]
    assert found == [Outcome.TIMEOUT, Outcome.TIMEOUT, Outcome.CORRECT]


def test_a_crash_during_an_answer_is_no_verdict_and_the_worker_is_replaced():
    process = VerifierProcess(FAKE)
    assert process.ask("7", "7", limit_s=30.0) == "correct"
    first = process.pid
    assert process.ask("die", "7", limit_s=30.0) is None
    assert process.ask("7", "7", limit_s=30.0) == "correct"
    assert process.pid != first
    assert process.restarts == 1
    process.close()


def test_a_crash_between_two_answers_costs_no_verdict():
    process = VerifierProcess(FAKE)
    assert process.ask("die afterwards", "die afterwards", limit_s=30.0) == "correct"
    assert wait_until_gone(process.pid)
    assert process.ask("7", "7", limit_s=30.0) == "correct"
    assert process.restarts == 1
    process.close()


def test_an_idle_worker_that_was_killed_costs_no_verdict():
    process = VerifierProcess(FAKE)
    assert process.ask("7", "7", limit_s=30.0) == "correct"
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until_gone(process.pid)
    assert process.ask("7", "7", limit_s=30.0) == "correct"
    process.close()


def test_a_reply_to_another_request_is_never_taken_for_this_one():
    process = VerifierProcess(FAKE)
    with pytest.raises(FaultError, match="to request 1"):
        process.ask("confuse", "7", limit_s=30.0)
    assert process.pid is None


def test_a_worker_that_cannot_start_says_why():
    process = VerifierProcess((sys.executable, "-c", "import nonsuch_module"))
    with pytest.raises(FaultError, match="No module named 'nonsuch_module'"):
        process.ask("7", "7", limit_s=30.0)


def test_a_worker_that_is_never_ready_is_given_up():
    process = VerifierProcess((sys.executable, "-c", "import time; time.sleep(600)"), start_limit_s=0.5)
    with pytest.raises(FaultError, match=r"not ready within 0\.5 s"):
        process.ask("7", "7", limit_s=30.0)
    assert process.pid is None


def test_closing_ends_the_worker_and_closing_twice_is_fine():
    process = VerifierProcess(FAKE)
    process.ask("7", "7", limit_s=30.0)
    pid = process.pid
    process.close()
    process.close()
    assert not is_alive(pid)


def test_a_verifier_that_is_forgotten_takes_its_worker_along():
    process = VerifierProcess(FAKE)
    process.ask("7", "7", limit_s=30.0)
    pid = process.pid
    del process
    assert not is_alive(pid)


def test_a_forked_child_does_not_end_its_parents_worker():
    process = VerifierProcess(FAKE)
    process.ask("7", "7", limit_s=30.0)
    child = os.fork()
    if child == 0:
        process.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert process.ask("7", "7", limit_s=30.0) == "correct"
    assert process.restarts == 0
    process.close()


@pytest.mark.parametrize("end", ["return", "SIGKILL", "SIGKILL while the worker hangs"])
def test_no_worker_outlives_its_trainer(end, tmp_path):
    """The parent ends without closing; the worker reads the end of its input, or its own alarm rings."""
    code = """
        import os, signal, sys, threading
        from megatron_qerl.rewards.process import VerifierProcess, default_command
        process = VerifierProcess(sys.argv[2:])
        process.ask("7", "7", limit_s=30.0)
        print(process.pid, flush=True)
        if sys.argv[1] == "SIGKILL while the worker hangs":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
            process.ask("9^{9^{9^{9}}}", "2^{10}", limit_s=1.0)
        if sys.argv[1] == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    lines = "\n".join(line[8:] for line in code.splitlines())
    worker = FAKE if end == "return" else default_command()
    trainer = subprocess.run([sys.executable, "-c", lines, end, *worker], capture_output=True, text=True, check=False)
    pid = int(trainer.stdout)
    assert trainer.returncode == (0 if end == "return" else -signal.SIGKILL)
    assert wait_until_gone(pid, limit_s=10.0)


def test_the_worker_speaks_json_lines_alone_and_loads_no_torch():
    """JSON alone also when something it loads prints: its standard output is set aside before the first request."""
    requests = "".join(
        json.dumps({"id": n, "answer": answer, "reference": "7", "limit_s": 30.0}) + "\n"
        for n, answer in enumerate(["7", "8", "\\frac{", None])
    )
    code = (
        "import megatron_qerl.rewards.worker as w; judge = w.judge; "
        "w.judge = lambda *a: (print('noise'), judge(*a))[1]; w.main(); "
        "import sys; print('loaded', sorted({'torch', 'pydantic', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], input=requests, capture_output=True, text=True, check=True)
    replies = [json.loads(line) for line in shown.stdout.splitlines()]
    assert replies[0] == {"ready": True}
    assert [reply["verdict"] for reply in replies[1:]] == ["correct", "wrong", "unparsable", "correct"]
    assert "noise" in shown.stderr
    assert "loaded []" in shown.stderr


# Counts --------------------------------------------------------------------------------------------------------------


def test_outcomes_are_counted_apart_and_add_up():
    judgements = [Judgement(outcome, 0.0, None) for outcome in (*Outcome, Outcome.WRONG)]
    counts = OutcomeCounts.of(judgements)
    assert counts == OutcomeCounts(correct=1, wrong=2, unparsable=1, truncated=1, timeout=1)
    assert (counts + OutcomeCounts(correct=4)).total == 10
    fractions = (counts + OutcomeCounts(correct=4)).fractions()
    assert fractions["outcome/correct_fraction"] == 0.5
    assert sum(fractions.values()) == pytest.approx(1.0)
    assert OutcomeCounts().fractions() == {}


def test_outcome_fractions_are_registered_metrics():
    from megatron_qerl.metrics.names import METRICS

    assert set(OutcomeCounts(correct=1).fractions()) <= set(METRICS)
