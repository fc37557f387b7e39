"""Run Triton kernels without a GPU, under Triton's own interpreter.

Whether a kernel is compiled or interpreted is decided when Triton is first imported, so the cases run in a process of
their own: ``run_cases("te_norm_cases.py")`` starts pytest there. A case file first calls ``repair_interpreter``: that
of Triton 3.6 takes subnormal BF16 for zero, rounds ties upwards, loses the carry into the exponent, and cannot use a
runtime number as a loop bound with NumPy 2.4 or later.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run_cases(file: str) -> None:
    """Run the tests of ``file``, beside this one, under the interpreter; fail with their output if one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=HERE.parents[1])
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout, done.stdout


def repair_interpreter() -> None:
    """Give the interpreter of this process exact conversions between BF16 and FP32, and loops with runtime bounds."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "run this file through run_cases"
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            return np.asarray(data).astype(np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16:
            wide = torch.from_numpy(np.array(data, dtype=np.float32))
            return wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return original(data, source, target, rounding)

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = patch
