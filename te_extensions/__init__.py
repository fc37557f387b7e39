"""NVFP4 linear layers, noise RMSNorm and chunked log-probabilities for frozen-base training.

Usable on its own: nothing here imports ``megatron_qerl``. Importing it registers the operators
``torch.ops.te_extensions.*``.
"""

from te_extensions.capability import Capabilities, capabilities
from te_extensions.dequantize import nvfp4_dequantize, nvfp4_dequantize_stack
from te_extensions.dispatch import choose_path
from te_extensions.grouped import nvfp4_grouped_linear
from te_extensions.linear import nvfp4_linear, nvfp4_linear_update, nvfp4_materialize, rows_linear
from te_extensions.logprob import HeadShard, head_logits, linear_logprob
from te_extensions.lora import LoraPart, LoraWeights, adapter_bank, nvfp4_lora_linear, nvfp4_multi_lora_linear
from te_extensions.norm import rms_norm_noise
from te_extensions.weight import BLOCK_SIZE, NVFP4Weight
from te_extensions.workspace import forget_decoded, release_workspaces

__all__ = [
    "BLOCK_SIZE",
    "Capabilities",
    "HeadShard",
    "LoraPart",
    "LoraWeights",
    "NVFP4Weight",
    "adapter_bank",
    "capabilities",
    "choose_path",
    "forget_decoded",
    "head_logits",
    "linear_logprob",
    "nvfp4_dequantize",
    "nvfp4_dequantize_stack",
    "nvfp4_grouped_linear",
    "nvfp4_linear",
    "nvfp4_linear_update",
    "nvfp4_lora_linear",
    "nvfp4_materialize",
    "nvfp4_multi_lora_linear",
    "release_workspaces",
    "rms_norm_noise",
    "rows_linear",
]
