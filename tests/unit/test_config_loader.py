from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import yaml

from megatron_qerl.config import strict_yaml
from megatron_qerl.config.loader import (
    config_from_mapping,
    load_config,
    load_resolved_config,
    resolved_yaml,
)
from megatron_qerl.config.schema import QuantizeConfig, RunConfig
from megatron_qerl.errors import ConfigError
from megatron_qerl.identity import settings_hash

MINIMAL = """\
run: {name: test}
model: {path: some/model}
data: {train: {kind: arithmetic}, eval: {kind: arithmetic, split: heldout}}
algorithm: {name: grpo, likelihood: replay}
train: {steps: 20}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path / "run.yaml", MINIMAL)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def refusal(path: Path, *overrides: str, overlays: tuple[Path, ...] = ()) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overlays, overrides)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_minimal_config_takes_every_other_value_from_the_schema(minimal: Path) -> None:
    config = load_config(minimal)
    assert config.run.output_dir == Path("runs")
    assert config.rollout.group_size == RunConfig.model_fields["rollout"].default.group_size
    assert config.algorithm.likelihood == "replay"


def test_sections_merge_key_by_key_and_lists_replace(tmp_path: Path) -> None:
    write(tmp_path / "common/base.yaml", MINIMAL + "lora: {rank: 8, targets: [q_proj, k_proj, v_proj]}\n")
    run = write(tmp_path / "run.yaml", "base: common/base.yaml\nlora: {targets: [o_proj]}\ntrain: {steps: 30}\n")
    overlay = write(tmp_path / "overlay.yaml", "train: {steps: 40}\n")
    config = load_config(run, [overlay], ["optimizer.learning_rate=1e-4"])
    assert config.lora.rank == 8
    assert config.lora.targets == ("o_proj",)
    assert config.train.steps == 40
    assert config.optimizer.learning_rate == 1e-4


def test_later_overlays_and_overrides_win(minimal: Path, tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "train: {steps: 30}\nlora: {rank: 4}\n")
    second = write(tmp_path / "b.yaml", "train: {steps: 40}\n")
    assert load_config(minimal, [first, second]).train.steps == 40
    assert load_config(minimal, [second, first]).train.steps == 30
    assert load_config(minimal, [first, second]).lora.rank == 4
    assert load_config(minimal, [first], ["train.steps=50", "train.steps=60"]).train.steps == 60


def test_bases_chain_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    write(tmp_path / "deep/bottom.yaml", MINIMAL)
    write(tmp_path / "deep/middle.yaml", "base: bottom.yaml\ntrain: {steps: 25}\n")
    top = write(tmp_path / "top.yaml", "base: deep/middle.yaml\n")
    assert load_config(top).train.steps == 25


def test_a_circle_of_bases_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    circle = write(tmp_path / "b.yaml", "base: a.yaml\n")
    assert "based on itself" in str(refusal(circle))


def test_an_overlay_with_a_base_is_refused(minimal: Path, tmp_path: Path) -> None:
    overlay = write(tmp_path / "o.yaml", "base: run.yaml\ntrain: {steps: 3}\n")
    assert "overlay cannot have a base" in str(refusal(minimal, overlays=(overlay,)))


@pytest.mark.parametrize("base", ["[a.yaml]", "3", "null", "absent.yaml"])
def test_a_base_that_names_no_file_is_refused(tmp_path: Path, base: str) -> None:
    error = refusal(write(tmp_path / "run.yaml", f"base: {base}\n{MINIMAL}"))
    assert error.key == "base"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rollout.group_size=true", "rollout.group_size", "true"),
        ("rollout.group_size=8.0", "rollout.group_size", "8.0"),
        ("rollout.group_size='8'", "rollout.group_size", "'8'"),
        ("rollout.group_size=1e1", "rollout.group_size", "10.0"),
        ("rollout.group_size=0x10", "rollout.group_size", "'0x10'"),
        ("noise.enabled='true'", "noise.enabled", "'true'"),
        ("noise.enabled=on", "noise.enabled", "'on'"),
        ("noise.enabled=1", "noise.enabled", "1"),
        ("optimizer.learning_rate=true", "optimizer.learning_rate", "true"),
        ("optimizer.learning_rate='1e-5'", "optimizer.learning_rate", "'1e-5'"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate", ".nan"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate", ".inf"),
        ("optimizer.learning_rate=null", "optimizer.learning_rate", "null"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate", "-1"),
        ("run.name=7", "run.name", "7"),
        ("run.name=", "run.name", "null"),
        ("model.path=3", "model.path", "3"),
        ("lora.targets=q_proj", "lora.targets", "q_proj"),
        ("lora=null", "lora", "null"),
        ("eval.modes=[greedy, beam]", "eval.modes[1]", "beam"),
    ],
)
def test_a_value_of_another_type_is_refused_by_key_and_value(
    minimal: Path, override: str, key: str, value: str
) -> None:
    error = refusal(minimal, override)
    assert error.key == key
    assert str(error.value) == f"{value} (on the command line)"


def test_values_of_the_right_type_are_taken(minimal: Path) -> None:
    overrides = [
        "optimizer.learning_rate=1",
        "noise.enabled=false",
        "train.steps=1_000",
        "eval.problems=null",
        "eval.modes=[greedy, sampled]",
        'data.system_prompt="a = b: c"',
        "lora={rank: 4, alpha: 8}",
        "noise.sigma_start=5e-2",
    ]
    config = load_config(minimal, overrides=overrides)
    assert config.optimizer.learning_rate == 1.0
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.noise.enabled is False
    assert config.noise.sigma_start == 0.05
    assert config.train.steps == 1000
    assert config.eval.problems is None
    assert config.eval.modes == ("greedy", "sampled")
    assert config.data.system_prompt == "a = b: c"
    assert (config.lora.rank, config.lora.alpha) == (4, 8.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-2e2", -200.0),
        ("010", 10),
        ("+3", 3),
        ("1:30", "1:30"),
        ("on", "on"),
        ("no", "no"),
        ("0o17", "0o17"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("~", None),
        ("", None),
        ("[1e-3, a, 2]", [1e-3, "a", 2]),
    ],
)
def test_yaml_words_mean_what_they_look_like(text: str, value: object) -> None:
    found = strict_yaml.parse(text, "test")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("train:\n  steps: 3\n  steps: 4\n", 3, "'steps' is given twice, first in line 2"),
        ("train:\n  steps: 3\nlora: {}\ntrain: {}\n", 4, "'train' is given twice, first in line 1"),
        ("train:\n\tsteps: 3\n", 2, "a tab is used for indentation"),
        ("train: {steps: 3\n", 2, "expected ',' or '}'"),
        ("train: !!python/object/apply:os.getcwd []\n", 1, "could not determine a constructor"),
        ("? [a, b]\n: 3\n", 1, "a key must be a plain word"),
    ],
)
def test_a_syntax_error_names_file_and_line(tmp_path: Path, text: str, line: int, problem: str) -> None:
    path = write(tmp_path / "bad.yaml", text)
    error = refusal(path)
    assert f"{path}:{line}" in str(error)
    assert problem in str(error)


def test_files_that_hold_no_config_are_refused(tmp_path: Path) -> None:
    assert "no such file" in str(refusal(tmp_path / "absent.yaml"))
    assert "cannot be read" in str(refusal(tmp_path))
    assert "sections of key: value" in str(refusal(write(tmp_path / "list.yaml", "- a\n- b\n")))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    assert "UTF-8" in str(refusal(binary))


def test_a_missing_likelihood_is_named_with_its_choices_and_their_meaning(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", MINIMAL.replace(", likelihood: replay", ""))
    error = refusal(path)
    assert error.key == "algorithm.likelihood"
    for word in ("replay", "clean", "uncorrected", "noise-conditioned", "importance-corrected", "biased"):
        assert word in str(error)
    assert str(path) in str(error)


def test_a_missing_section_is_named_with_what_it_needs(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", MINIMAL.replace("train: {steps: 20}", ""))
    error = refusal(path)
    assert error.key == "train"
    assert "steps" in error.remedy


def test_a_misspelt_required_key_is_reported_once_as_a_spelling(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", MINIMAL.replace("likelihood:", "likelyhood:"))
    error = refusal(path)
    assert error.key == "algorithm.likelyhood"
    assert error.remedy == "Did you mean algorithm.likelihood"


def test_several_mistakes_make_one_line_with_their_number(minimal: Path) -> None:
    error = refusal(minimal, "train.steps=0", "lora.rank=x", "rollout.group_size=1")
    assert "(and 2 more: rollout.group_size, train.steps)" in str(error)


def test_a_mistake_names_the_layer_it_was_made_in(minimal: Path, tmp_path: Path) -> None:
    overlay = write(tmp_path / "over.yaml", "lora: {rank: -1}\n")
    assert f"(in {overlay})" in str(refusal(minimal, overlays=(overlay,)))
    assert "(on the command line)" in str(refusal(minimal, "lora.rank=-1", overlays=(overlay,)))


def test_a_rule_between_sections_keeps_its_words_and_remedy(minimal: Path) -> None:
    error = refusal(minimal, "rollout.top_p=0.9", "algorithm.likelihood=clean")
    assert "rollout.top_p = 0.9" in error.rule
    assert error.remedy.startswith("Set rollout.top_p: 1.0")


def test_a_rule_within_a_section_names_the_section(minimal: Path) -> None:
    error = refusal(minimal, "noise.sigma_end=0")
    assert error.key == "noise"
    assert "sigma_end > 0" in error.rule


@pytest.mark.parametrize("override", ["train.steps", "=3", "train.steps:3", ""])
def test_an_override_without_key_and_value_is_refused(minimal: Path, override: str) -> None:
    assert "section.key=value" in str(refusal(minimal, override))


def test_an_override_into_a_plain_value_is_refused(minimal: Path) -> None:
    assert refusal(minimal, "noise.enabled.deep=1").rule == "unknown key"


def test_the_resolved_config_reads_back_equal(minimal: Path, tmp_path: Path) -> None:
    config = load_config(minimal, overrides=["optimizer.learning_rate=3e-7", "data.system_prompt='[x]: #1'"])
    again = load_config(write(tmp_path / "resolved.yaml", resolved_yaml(config)))
    assert again == config
    assert settings_hash(again) == settings_hash(config), "or a run could not be resumed from its own folder"


@pytest.mark.parametrize(
    "name", ["1e-5", "no", "on", "012", "1:30", "null", "~", "true", "2024-01-01", "<<", "=", "a: b", "# x", " ", "é\n"]
)
def test_text_that_looks_like_something_else_survives_the_round_trip(minimal: Path, tmp_path: Path, name: str) -> None:
    config = config_from_mapping({**strict_yaml.parse(MINIMAL, "m"), "noise": {"source": name}}, RunConfig, "test")
    text = resolved_yaml(config)
    assert load_config(write(tmp_path / "resolved.yaml", text)).noise.source == name
    assert yaml.safe_load(text)["noise"]["source"] == name, "other YAML readers must agree"


def test_the_settings_hash_changes_with_a_value_and_not_with_its_place(minimal: Path, tmp_path: Path) -> None:
    lines = MINIMAL.splitlines(keepends=True)
    reordered = load_config(write(tmp_path / "r.yaml", "".join(reversed(lines))))
    config = load_config(minimal)
    assert settings_hash(reordered) == settings_hash(config)
    assert settings_hash(load_config(minimal, overrides=["lora.rank=16"])) != settings_hash(config)
    assert settings_hash(load_config(minimal, overrides=["checkpoint.keep=3"])) == settings_hash(config)


def test_options_of_a_command_are_the_top_layer() -> None:
    config = load_config(None, (), ["output=from-override"], QuantizeConfig, options={"source": "010", "output": "b"})
    assert (config.source, config.output) == (Path("010"), Path("b"))


def test_a_run_folder_gives_back_its_config(minimal: Path, tmp_path: Path) -> None:
    config = load_config(minimal)
    write(tmp_path / "run/config.yaml", resolved_yaml(config))
    assert load_resolved_config(tmp_path / "run") == config
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        load_resolved_config(tmp_path)
