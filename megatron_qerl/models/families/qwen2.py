"""Qwen2 and Qwen2.5 dense: q, k and v always carry a bias, o does not; its config has no key that says so."""

from __future__ import annotations

from megatron_qerl.models.families.base import DENSE_BLOCK, Family, refuse_common

QWEN2 = Family("qwen2", DENSE_BLOCK, qkv_bias=lambda _: True, qk_norm=False, refuse=refuse_common)
