"""NVFP4 linear layers, noise RMSNorm and chunked log-probabilities for frozen-base training.

Usable on its own: nothing here imports ``megatron_qerl``.
"""

from te_extensions.dequantize import nvfp4_dequantize
from te_extensions.linear import nvfp4_linear, nvfp4_materialize, rows_linear
from te_extensions.logprob import HeadShard, head_logits, linear_logprob
from te_extensions.norm import rms_norm_noise
from te_extensions.weight import BLOCK_SIZE, NVFP4Weight

__all__ = [
    "BLOCK_SIZE",
    "HeadShard",
    "NVFP4Weight",
    "head_logits",
    "linear_logprob",
    "nvfp4_dequantize",
    "nvfp4_linear",
    "nvfp4_materialize",
    "rms_norm_noise",
    "rows_linear",
]
