"""The calibration tokens' way through the decoder, one layer in memory at a time.

The hidden state of every calibration token is kept between layers, in memory or, when it is large, in a mapped file
that the operating system pages. A layer is built from the tensors the quantiser holds anyway, run once and dropped.

Each layer runs with its original weights, and its output is what the next one sees, as in ModelOpt's own AWQ. A
layer's statistics then say what the original model computes, they do not depend on errors made in earlier layers,
and one pass a layer is enough.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_qerl.errors import UserError
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.layout import GROUPS
from megatron_qerl.nvfp4.sketch import ActivationSketch, SketchBuilder, token_signs

_IN_MEMORY_BYTES = 2 << 30
_BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


class DecoderActivations:
    """Feeds calibration tokens through a model layer by layer and sketches what each linear group reads.

    Args:
        source: the model.
        tokens: [sequences, length].
        device: where the layers run.
        scratch: folder for the hidden states when they are too large for memory.
        seed: seed of the sketches' signs.
    """

    def __init__(self, source: ModelFolder, tokens: Tensor, device: torch.device, scratch: Path, seed: int) -> None:
        self._device, self._dtype = device, _DTYPE[device.type]
        self._config = _hf_config(source, tokens.shape[1])
        self._layer_class, rotary_class = _classes(self._config.model_type)
        self._signs = token_signs(tokens.numel(), seed, device)
        self._next_layer = 0
        self._file = scratch / "hidden_states.tmp"
        self._hidden = _hidden_states((*tokens.shape, self._config.hidden_size), self._dtype, self._file)
        embedding = source.read("model.embed_tokens.weight")
        for row, ids in enumerate(tokens):
            self._hidden[row] = embedding[ids].to(self._dtype)
        positions = torch.arange(tokens.shape[1], device=device).unsqueeze(0)
        rotary = rotary_class(config=self._config, device=device)
        probe = torch.empty(1, dtype=self._dtype, device=device)
        with torch.no_grad():
            self._rope = rotary(probe, position_ids=positions)
        self._positions = positions

    @torch.no_grad()
    def run(self, layer: int, tensors: Mapping[str, Tensor]) -> dict[str, ActivationSketch]:
        """Run one layer on all tokens and move the hidden states past it.

        Args:
            layer: must be called in order, from 0.
            tensors: the layer's original tensors, by name inside the layer.
        Returns:
            group name -> sketch of the group's input.
        """
        assert layer == self._next_layer, (layer, self._next_layer)
        self._next_layer += 1
        module = self._build(layer, tensors)
        builders = {g.name: SketchBuilder(tensors[f"{g.members[0]}.weight"].shape[1], self._signs) for g in GROUPS}
        sequences, length, _ = self._hidden.shape
        at_once = max(1, _BATCH_TOKENS[self._device.type] // length)
        with ExitStack() as hooks:
            for group in GROUPS:
                first = module.get_submodule(group.members[0])
                handle = first.register_forward_pre_hook(_collector(builders[group.name]))
                hooks.callback(handle.remove)
            for start in range(0, sequences, at_once):
                batch = self._hidden[start : start + at_once].to(self._device)
                out = module(batch, attention_mask=None, position_ids=self._positions, position_embeddings=self._rope)
                self._hidden[start : start + at_once] = out.to(self._hidden.device)
        return {name: builder.finish() for name, builder in builders.items()}

    def _build(self, layer: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        with torch.device("meta"):
            module: nn.Module = self._layer_class(self._config, layer)
        state = {name: tensor.to(self._device, self._dtype) for name, tensor in tensors.items()}
        module.load_state_dict(state, strict=True, assign=True)
        return module.eval()

    def close(self) -> None:
        """Drop the hidden states and their file."""
        self._hidden = torch.empty(0)
        self._file.unlink(missing_ok=True)


def _collector(builder: SketchBuilder) -> Any:
    return lambda module, inputs: builder.add(inputs[0])


def _hidden_states(shape: tuple[int, ...], dtype: torch.dtype, file: Path) -> Tensor:
    """A tensor in memory, or in a file mapped into memory when it is large."""
    elements = torch.Size(shape).numel()
    size_bytes = elements * dtype.itemsize
    if size_bytes <= _IN_MEMORY_BYTES:
        return torch.empty(shape, dtype=dtype)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # A mapped write into a file without room kills the process, so the room is taken first.
        os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)
    return torch.from_file(str(file), shared=True, size=elements, dtype=dtype).view(shape)


def _hf_config(source: ModelFolder, length: int) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source.path, local_files_only=True)
    config._attn_implementation = "sdpa"
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if sliding and length > config.sliding_window:
        rule = f"the model has layers that attend to {config.sliding_window} tokens"
        remedy = f"Set calibration.sequence_length to at most {config.sliding_window}"
        raise UserError("calibration.sequence_length", length, rule, remedy)
    return config


def _classes(family: str) -> tuple[Any, Any]:
    """Decoder layer and rotary embedding of a family."""
    if family == "llama":
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        return LlamaDecoderLayer, LlamaRotaryEmbedding
    if family == "qwen2":
        from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

        return Qwen2DecoderLayer, Qwen2RotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    assert family == "qwen3", family
    return Qwen3DecoderLayer, Qwen3RotaryEmbedding
