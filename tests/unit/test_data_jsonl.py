"""JSONL datasets: three layouts, and a precise complaint for everything else."""

from __future__ import annotations

import json

import pytest

from megatron_qerl.config.schema import DatasetSection
from megatron_qerl.data import load_dataset, require_disjoint
from megatron_qerl.data.jsonl import read_problems
from megatron_qerl.errors import DataError


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows, name="train.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write_rows


def test_plain_rows(write, tmp_path):
    path = write(
        {"question": " What is 3 + 4? ", "answer": "7", "uid": "mine", "cluster": "c", "level": 3},
        {"question": "Half?", "answer": 0.5},
    )
    first, second = read_problems(path, "jsonl")
    assert (first.uid, first.question, first.answer, first.cluster) == ("mine", "What is 3 + 4?", "7", "c")
    assert first.source == f"{tmp_path.name}/train"
    assert second.answer == "0.5"
    assert second.uid == second.cluster != ""


def test_a_file_of_several_benchmarks_names_them(write, tmp_path):
    path = write({"problem": "P1", "answer": "1", "benchmark": "aime24"}, {"problem": "P2", "answer": "2"})
    assert [problem.source for problem in read_problems(path, "math")] == ["aime24", f"{tmp_path.name}/train"]


def test_gsm8k_rows(write):
    path = write(
        {"question": "How many?", "answer": "16 - 3 = <<16-3=13>>13\n#### 13"},
        {"question": "How much?", "answer": "so #### 1,234\n"},
        {"question": "Less?", "answer": "#### -5"},
    )
    assert [problem.answer for problem in read_problems(path, "gsm8k")] == ["13", "1234", "-5"]


def test_math_rows(write):
    path = write(
        {"problem": "P1", "solution": "not this \\boxed{3}", "answer": "\\frac{1}{2}"},
        {"problem": "P2", "solution": "first \\boxed{1}, so $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}$."},
        {"question": "P3", "answer": 27.0},
    )
    answers = [problem.answer for problem in read_problems(path, "math")]
    assert answers == ["\\frac{1}{2}", "\\left( 3, \\frac{\\pi}{2} \\right)", "27"]


def test_uids_survive_reordering_and_renaming(write):
    rows = [{"question": f"Q{n}", "answer": str(n)} for n in range(5)]
    before = {p.question: p.uid for p in read_problems(write(*rows), "jsonl")}
    after = {p.question: p.uid for p in read_problems(write(*rows[::-1], name="other.jsonl"), "jsonl")}
    assert before == after


def test_copies_of_a_question_have_their_own_uid_and_a_common_cluster(write):
    rows = [{"question": "Q", "answer": "1"}] * 3
    problems = read_problems(write(*rows), "jsonl")
    assert len({p.uid for p in problems}) == 3
    assert len({p.cluster for p in problems}) == 1


def test_blank_lines_and_line_separators_inside_strings_are_fine(write):
    path = write("", '{"question": "a\u2028b", "answer": "1"}', "  ")
    assert read_problems(path, "jsonl")[0].question == "a\u2028b"


def complaint(path, kind):
    with pytest.raises(DataError) as caught:
        read_problems(path, kind)
    return str(caught.value)


GOOD = {"question": "Q", "answer": "1"}


@pytest.mark.parametrize(
    ("kind", "row", "fragments"),
    [
        (
            "jsonl",
            "{'question': 1}",
            [":2 = {'question': 1}", "not JSON", "column 2", "one complete JSON object a line"],
        ),
        ("jsonl", "[", ["not JSON", "jq -c '.[]'"]),
        ("jsonl", "[1, 2]", [":2 = list", "must hold a JSON object"]),
        ("jsonl", {"answer": "1"}, [":2: question = None", "found ['answer']", "add question"]),
        ("jsonl", {"question": "Q2"}, [":2: answer = None", "add answer"]),
        ("jsonl", {"question": "Q2", "answer": " "}, [":2: answer"]),
        ("jsonl", {"question": "Q2", "answer": None}, [":2: answer = None"]),
        ("jsonl", {"question": "Q2", "answer": ["7"]}, [":2: answer = ['7']", "as text"]),
        ("jsonl", {"question": "Q2", "answer": True}, [":2: answer = True"]),
        ("jsonl", {}, ["found no field"]),
        ("gsm8k", {"question": "Q2", "answer": "it is 18"}, [":2: answer = it is 18", "'#### 18'", "kind: jsonl"]),
        ("math", {"problem": "Q2"}, [":2: answer or solution", "add answer or solution"]),
        ("math", {"problem": "Q2", "solution": "so 7"}, [":2: solution", "no \\boxed{...}", "add an answer field"]),
        ("math", {"problem": "Q2", "solution": "\\boxed{7"}, [":2: solution"]),
        ("math", {"answer": "7"}, [":2: problem or question"]),
    ],
)
def test_a_bad_row_is_named_by_file_line_key_rule_and_remedy(write, kind, row, fragments):
    good = {"question": "Q", "answer": "#### 1"} if kind == "gsm8k" else GOOD
    path = write(good, row)
    message = complaint(path, kind)
    assert str(path) in message
    for fragment in fragments:
        assert fragment in message


def test_a_uid_that_occurs_twice_is_named_with_both_lines(write):
    path = write({**GOOD, "uid": "u"}, GOOD, {**GOOD, "uid": "u"})
    message = complaint(path, "jsonl")
    assert f"{path}:3: uid = u" in message
    assert "line 1" in message


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_dataset_is_an_error(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    assert "the dataset is empty" in complaint(path, "jsonl")


def test_a_missing_file_is_an_error(tmp_path):
    assert "no such file" in complaint(tmp_path / "nowhere.jsonl", "jsonl")
    assert "no such file" in complaint(tmp_path, "jsonl")


def test_a_file_that_is_not_utf8_is_an_error(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"question": "\xe9", "answer": "1"}\n')
    assert "not UTF-8 at byte 14" in complaint(path, "jsonl")


# From a config section -----------------------------------------------------------------------------------------------


def test_loading_shuffles_by_seed_limits_and_appends_the_suffix(write):
    path = write(*({"question": f"Q{n}", "answer": str(n)} for n in range(50)))

    def load(seed, **keys):
        return load_dataset(DatasetSection(kind="jsonl", path=path, **keys), seed)

    everything = load(1)
    assert [p.question for p in everything] != [f"Q{n}" for n in range(50)]
    assert sorted(int(p.answer) for p in everything) == list(range(50))
    assert load(1) == everything
    assert load(2) != everything
    assert load(1, limit=7) == everything[:7]
    assert [p.question for p in load(1, limit=2, prompt_suffix=" Now.")] == [
        f"{p.question} Now." for p in everything[:2]
    ]
    assert [p.uid for p in load(1, prompt_suffix=" Now.")] == [p.uid for p in everything]


def test_adding_a_problem_moves_none_of_the_others(write):
    rows = [{"question": f"Q{n}", "answer": str(n)} for n in range(30)]
    section = DatasetSection(kind="jsonl", path=write(*rows))
    before = [p.uid for p in load_dataset(section, 1)]
    write({"question": "new", "answer": "0"}, *rows)
    after = [p.uid for p in load_dataset(section, 1)]
    assert [uid for uid in after if uid in before] == before


def test_a_training_question_in_the_evaluation_is_refused(write):
    train = read_problems(write({"question": "A", "answer": "1"}, {"question": "B", "answer": "2"}), "jsonl")
    leaked = read_problems(write({"question": "B", "answer": "2"}, name="test.jsonl"), "jsonl")
    clean = read_problems(write({"question": "C", "answer": "2"}, name="test.jsonl"), "jsonl")
    require_disjoint(train, clean)
    with pytest.raises(DataError, match="share problems"):
        require_disjoint(train, leaked)
