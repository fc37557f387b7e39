"""What the kernels are measured against: cuBLAS on a resident BF16 matrix, and humming-kernels on the same NVFP4 bytes.

cuBLAS gets the very matrix that the NVFP4 bytes stand for, decoded to BF16. Its values have few significant bits, which
switches fewer transistors than a trained BF16 weight would: cuBLAS is, if anything, a little faster here than in life.

humming (PyPI ``humming-kernels``, Apache-2.0) compiles a kernel a (layer, schedule) with NVRTC at first use. Left to
itself it compiles the schedules of all row counts of a layer, some ninety kernels. Here it is asked for the schedule of
each measured M alone, by the same tuned policy (``get_heuristics_config``), and all of them are compiled at once in
parallel. Its schedules may reduce in an order that depends on M ("stream-K"), which is faster and not batch-invariant;
that is what it is measured with. ``search`` also tries neighbours of its schedule and keeps the fastest.

It needs jinja2, filelock and cuda-bindings, and CUDA's headers with libnvrtc (a toolkit in /usr/local/cuda or the
``nvidia`` wheels). Unzipped by hand, ``humming/_native/*/nvrtc_compile`` needs its run bit. HUMMING_CACHE_DIR keeps the
compiled kernels between processes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_proof import decode
from te_extensions.weight import NVFP4Weight

#: Single changes to humming's schedule that ``search`` tries; illegal ones refuse to compile and drop out.
NEIGHBOURS: tuple[dict[str, Any], ...] = (
    {"evict_weights_first": True},
    {"num_ctas_per_sm": 1},
    {"num_ctas_per_sm": 2},
    {"num_stages": 3},
    {"num_stages": 6},
    {"use_pdl": True},
)


class Cublas:
    """torch.mm with BF16 matrices that stay in memory.

    Args:
        weights: the matrices, N x K; ``copies`` BF16 ones are kept, made from as many different weights.
        copies: at most len(weights).
    """

    def __init__(self, weights: Sequence[NVFP4Weight], copies: int) -> None:
        self.matrices = [decode(weight, torch.bfloat16) for weight in weights[:copies]]

    def forward(self, x: Tensor, i: int) -> Tensor:
        """x [M, K] -> [M, N]."""
        return torch.mm(x, self.matrices[i % len(self.matrices)].t())

    def dgrad(self, dy: Tensor, i: int) -> Tensor:
        """dy [M, N] -> [M, K]."""
        return torch.mm(dy, self.matrices[i % len(self.matrices)])


@dataclass(frozen=True)
class _Prepared:
    """A weight in humming's layout."""

    tensors: dict[str, Tensor]


class Humming:
    """humming's dense W4A16 GEMM for one (N, K).

    Args:
        weights: ModelOpt NVFP4 matrices of one shape; repacked once, as humming requires.

    Raises:
        ImportError: the package, or one that it needs, is not there.
    """

    def __init__(self, weights: Sequence[NVFP4Weight]) -> None:
        from humming.schema.modelopt import ModeloptNvfp4WeightSchema
        from humming.transform import prepare_and_transform_humming_tensors

        n, k = weights[0].shape
        device = weights[0].packed.device
        self.weights: list[_Prepared] = []
        for weight in weights:
            source = {
                "weight": weight.packed.contiguous(),
                "weight_scale": weight.block_scale.contiguous(),
                "weight_scale_2": torch.tensor([weight.tensor_scale], dtype=torch.float32, device=device),
            }
            schema, tensors = ModeloptNvfp4WeightSchema(quant_algo="nvfp4").convert_humming(
                source, shape_n_stacks=[n], shape_k_stacks=[k], param_dtype=torch.bfloat16, device=device
            )
            self.config, tensors = prepare_and_transform_humming_tensors(
                tensors,
                n,
                k,
                schema,
                # Its tiles are at least 128 x 64; narrower slices are padded with zeros.
                pad_n_to_multiple=128,
                pad_k_to_multiple=64,
                torch_dtype=torch.bfloat16,
                device=device,
            )
            self.weights.append(_Prepared(tensors))
        # Partial tiles of one launch synchronise through these; launches here follow each other on one stream.
        self.locks = torch.zeros(2048, dtype=torch.int32, device=device)
        self.schedules: dict[int, str] = {}

    def forward(self, x: Tensor, i: int) -> Tensor:
        """x [M, K] -> [M, N]; M must have been prepared."""
        from humming.forward import humming_forward

        tensors = self.weights[i % len(self.weights)].tensors
        return humming_forward(
            self.config,
            inputs=x,
            weight=tensors["weight"],
            weight_scale=tensors["weight_scale"],
            weight_scale_2=tensors.get("weight_scale_2"),
            locks=self.locks,
            tuning_config=self.schedules[x.shape[0]],
        )

    def prepare(self, m_values: Sequence[int]) -> None:
        """Compile the tuned schedules of the row counts that have none yet, all at once."""
        wanted = {m: schedule(self.config, m) for m in m_values if m not in self.schedules}
        compile_schedules([(self.config, s) for s in wanted.values()])
        self.schedules |= {m: json.dumps(s) for m, s in wanted.items()}

    def neighbours(self, m: int) -> list[str]:
        """The schedule of M and those next to it that compile, each as ``schedules`` holds them."""
        tuned = json.loads(self.schedules[m])
        found = [self.schedules[m]]
        for change in NEIGHBOURS:
            candidate = tuned | change
            if candidate == tuned:
                continue
            try:
                compile_schedules([(self.config, candidate)])
            except (AssertionError, ValueError, RuntimeError):
                # humming checks a schedule's legality with asserts while it makes the kernel.
                continue
            found.append(json.dumps(candidate))
        return found


def schedule(config: Any, m: int) -> dict[str, Any]:
    """The schedule that humming's policy for this GPU chooses for ``m`` rows."""
    from humming.tune import get_heuristics_config

    found: dict[str, Any] = get_heuristics_config(config, m)
    return found


def layer_config(n: int, k: int) -> Any:
    """humming's description of an NVFP4 layer with BF16 activations, without any weight."""
    from humming.schema.modelopt import ModeloptNvfp4WeightSchema
    from humming.transform import prepare_layer_config

    schema = ModeloptNvfp4WeightSchema(quant_algo="nvfp4").to_humming_schema(torch.bfloat16)
    return prepare_layer_config(n, k, schema, pad_n_to_multiple=128, pad_k_to_multiple=64, torch_dtype=torch.bfloat16)


def compile_schedules(wanted: Sequence[tuple[Any, dict[str, Any]]]) -> None:
    """Compile (layer config, schedule) pairs in parallel; compiled ones are found again by their contents."""
    from humming.kernel.humming import HummingKernel

    specs = {}
    for config, chosen in wanted:
        layer, compute, tuning = HummingKernel._resolve_configs(config.to_str(), None, chosen)
        merged = layer | compute | tuning
        merged.pop("num_sms", None)
        specs[json.dumps(merged, default=str, sort_keys=True)] = (HummingKernel, merged)
    HummingKernel.compile_many(specs.values())


def compile_all(shapes: Sequence[tuple[int, int]], m_values: Sequence[int]) -> list[str]:
    """Compile what a whole run will need, before it starts; returns the shapes that humming refuses, with its words."""
    wanted, refused = [], []
    for n, k in shapes:
        try:
            config = layer_config(n, k)
            wanted += [(config, schedule(config, m)) for m in m_values]
        except (AssertionError, ValueError) as error:
            refused.append(f"humming has no schedule for {n} x {k}: {error!r}")
    compile_schedules(wanted)
    return refused
