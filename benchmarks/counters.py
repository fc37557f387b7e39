"""What limits the fused kernel, by the GPU's own counters: python -m benchmarks.counters --output PATH

Runs itself under Nsight Compute (``ncu`` on PATH or in /usr/local/cuda/bin), which serialises launches and lowers the
clocks: shares of peak are what to read, times are not. A column near 100 % is a limit; none near it means that latency
is (few bytes or steps in flight). Needs permission to read the counters; without it ncu says ERR_NVGPUCTRPERM.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

LAYER_NAMES = ("32B.gate_up", "32B.down", "32B.qkv", "32B.o")
ROWS = (8, 64, 128)
METRICS = {
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "alu_pct": "smsp__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma_pct": "smsp__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "shared_pct": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
}


def launch() -> None:
    """One call a case, in the order in which ``main`` reads them."""
    import torch

    from benchmarks.kernels_proof import random_weight
    from benchmarks.shapes import LAYERS
    from te_extensions.fused import fused_linear

    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    for name in LAYER_NAMES:
        layer = LAYERS[name]
        weight = random_weight(layer.n, layer.k, generator)
        for m in ROWS:
            fused_linear(torch.randn(m, layer.k, device=device).bfloat16(), weight)
    torch.cuda.synchronize()


def main() -> int:
    """Profile, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch()
        return 0
    if options.output is None:
        parser.error("--output is needed: the JSON file to write")
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    command = [ncu, "--kernel-name", "fused_linear", "--csv", "--metrics", ",".join(METRICS.values())]
    found = subprocess.run(
        [*command, sys.executable, "-m", "benchmarks.counters", "--launch"], capture_output=True, text=True, check=False
    )
    start = found.stdout.find('"ID"')
    if found.returncode or start < 0:
        print(f"ncu failed ({found.returncode}):\n{found.stdout[-2000:]}{found.stderr[-2000:]}", file=sys.stderr)
        return 1
    values: dict[int, dict[str, float]] = {}
    for line in csv.DictReader(io.StringIO(found.stdout[start:])):
        values.setdefault(int(line["ID"]), {})[line["Metric Name"]] = float(line["Metric Value"].replace(",", ""))
    cases = [(name, m) for name in LAYER_NAMES for m in ROWS]
    rows = [
        {"layer": name, "m": m, **{short: metrics[metric] for short, metric in METRICS.items()}}
        for (name, m), (_, metrics) in zip(cases, sorted(values.items()), strict=True)
    ]
    import torch

    from benchmarks.kernels_environment import environment

    result = {"environment": environment(torch.device("cuda")), "rows": rows}
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
