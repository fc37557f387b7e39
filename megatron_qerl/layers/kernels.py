"""The one door between this package and ``te_extensions``.

Everything else imports kernels from here, so that choosing another implementation is one edit.
"""

from te_extensions import (
    HeadShard,
    NVFP4Weight,
    head_logits,
    linear_logprob,
    nvfp4_dequantize,
    nvfp4_grouped_linear,
    nvfp4_linear,
    nvfp4_materialize,
    rms_norm_noise,
    rows_linear,
)
from te_extensions.linear import nvfp4_linear_update
from te_extensions.logprob import default_chunk_rows
from te_extensions.ops import multiply_transposed as nvfp4_input_gradient

__all__ = [
    "HeadShard",
    "NVFP4Weight",
    "default_chunk_rows",
    "head_logits",
    "linear_logprob",
    "nvfp4_dequantize",
    "nvfp4_grouped_linear",
    "nvfp4_input_gradient",
    "nvfp4_linear",
    "nvfp4_linear_update",
    "nvfp4_materialize",
    "rms_norm_noise",
    "rows_linear",
]
