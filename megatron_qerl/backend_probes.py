"""Questions put to one Python interpreter about one package; runs in a child process and prints one line of JSON.

``backends`` sends this file's text to the interpreter that is asked (``python -c TEXT NAME``), so it may use the
standard library alone, of any Python from 3.9 on, and imports the package in question inside its function. A package
that raises, crashes or hangs takes only this child with it: nothing is caught, the parent reads the traceback.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys

MARKER = "megatron-qerl-probe:"
NOT_INSTALLED = "not installed"


def answer(usable: bool, found: str, reason: str = "", version: str | None = None) -> dict[str, object]:
    return {"usable": usable, "found": found, "reason": reason, "version": version}


def absent(module: str) -> dict[str, object] | None:
    """The answer for a module that is not installed; None when it can be found."""
    if importlib.util.find_spec(module) is None:
        return answer(False, NOT_INSTALLED, f"there is no module {module} in this environment")
    return None


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def torch_cpu() -> dict[str, object]:
    missing = absent("torch")
    if missing:
        return missing
    import torch

    ones = torch.ones(32, 32, dtype=torch.bfloat16)
    total = float((ones @ ones).sum())
    facts = f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    if total != 32.0**3:
        return answer(False, facts, f"a BF16 matrix product gave {total}, not {32.0**3}", torch.__version__)
    return answer(True, facts, version=torch.__version__)


def torch_cuda() -> dict[str, object]:
    missing = absent("torch")
    if missing:
        return missing
    import torch

    if torch.version.cuda is None:
        return answer(False, "torch without CUDA", "this build of torch is for the CPU alone")
    build = f"torch built for CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        return answer(
            False, build, "torch sees no NVIDIA device (no device, no driver, or CUDA_VISIBLE_DEVICES hides it)"
        )
    devices = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        memory_gib = torch.cuda.get_device_properties(index).total_memory / 2**30
        devices.append(f"{torch.cuda.get_device_name(index)} (capability {major}.{minor}, {memory_gib:.0f} GiB)")
        ones = torch.ones(32, 32, dtype=torch.bfloat16, device=f"cuda:{index}")
        total = float((ones @ ones).sum())
        if total != 32.0**3:
            return answer(False, devices[-1], f"a BF16 matrix product gave {total}, not {32.0**3}")
    native = torch.cuda.get_device_capability(0)[0] >= 10
    arithmetic = "NVFP4 arithmetic in hardware" if native else "NVFP4 weights are dequantised to BF16"
    names = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    return answer(True, f"{names}; {build}; {arithmetic}")


def megatron_core() -> dict[str, object]:
    missing = absent("megatron") or absent("megatron.core")
    if missing:
        return missing
    importlib.import_module("megatron.core.models.hybrid.hybrid_model")
    version = version_of("megatron-core")
    return answer(True, version, version=version)


def transformers() -> dict[str, object]:
    missing = absent("transformers")
    if missing:
        return missing
    from transformers import AutoTokenizer

    version = version_of("transformers")
    return answer(True, f"{version}, {AutoTokenizer.__name__} loads", version=version)


def modelopt() -> dict[str, object]:
    missing = absent("modelopt")
    if missing:
        return missing
    quantization = importlib.import_module("modelopt.torch.quantization")
    version = version_of("nvidia-modelopt")
    if not hasattr(quantization, "W4A16_NVFP4_CFG"):
        return answer(False, version, "it has no W4A16_NVFP4_CFG, the NVFP4 recipe for weights alone", version)
    return answer(True, version, version=version)


def math_verify() -> dict[str, object]:
    missing = absent("math_verify")
    if missing:
        return missing
    from math_verify import parse, verify

    version = version_of("math-verify")
    gold = parse("$\\frac{1}{2}$")
    right, wrong = verify(gold, parse("$0.5$")), verify(gold, parse("$0.6$"))
    if not right or wrong:
        return answer(False, version, f"for the answer 1/2 it judged 0.5 {right} and 0.6 {wrong}", version)
    return answer(True, f"{version}, accepts 0.5 and refuses 0.6 for the answer 1/2", version=version)


def matplotlib() -> dict[str, object]:
    missing = absent("matplotlib")
    if missing:
        return missing
    importlib.import_module("matplotlib.backends.backend_svg")
    return answer(True, version_of("matplotlib"))


def transformer_engine() -> dict[str, object]:
    missing = absent("transformer_engine")
    if missing:
        return missing
    import torch

    version = version_of("transformer-engine")
    if not torch.cuda.is_available():
        return answer(False, version, "it computes on NVIDIA devices alone, and torch sees none", version)
    importlib.import_module("transformer_engine.pytorch")
    return answer(True, version, version=version)


def apex() -> dict[str, object]:
    """NVIDIA's apex, told apart from an older web toolkit of the same name that ``pip install apex`` brings."""
    missing = absent("apex")
    if missing:
        return missing
    spec = importlib.util.find_spec("apex")  # finds, does not import: the other package's import fails
    folders = list((spec.submodule_search_locations if spec is not None else None) or ())
    parts = [part for part in ("optimizers", "contrib") if any(os.path.isdir(os.path.join(f, part)) for f in folders)]
    compiled = importlib.util.find_spec("amp_C") is not None
    version = version_of("apex")
    if not parts and not compiled:
        return answer(
            False,
            f"another package named apex ({version}: {_summary_of('apex')})",
            "it is not NVIDIA's apex: apex.optimizers, apex.contrib and amp_C are all missing",
        )
    found = f"NVIDIA apex {version}"
    if not compiled:
        return answer(False, found, "it was installed without its compiled extensions (no amp_C)")
    importlib.import_module("torch")  # amp_C links against torch's libraries
    importlib.import_module("amp_C")
    importlib.import_module("apex.optimizers")
    return answer(True, f"{found} with compiled extensions")


def _summary_of(distribution: str) -> str:
    try:
        return importlib.metadata.metadata(distribution)["Summary"] or "no description"
    except importlib.metadata.PackageNotFoundError:
        return "no description"


def wandb() -> dict[str, object]:
    missing = absent("wandb")
    if missing:
        return missing
    package = importlib.import_module("wandb")
    if not hasattr(package, "init"):
        return answer(False, "a folder named wandb", "the package wandb is not installed, only a folder has its name")
    return answer(True, str(package.__version__))


def _engine(module: str) -> dict[str, object]:
    here = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if importlib.util.find_spec(module) is None:
        return answer(False, f"{NOT_INSTALLED} ({here})", f"there is no module {module} in this environment")
    import torch

    importlib.import_module(module)
    device = "with a CUDA device" if torch.cuda.is_available() else "without a CUDA device"
    return answer(True, f"{module} {version_of(module)}, torch {torch.__version__} {device}, {here}")


def sglang() -> dict[str, object]:
    return _engine("sglang")


def vllm() -> dict[str, object]:
    return _engine("vllm")


PROBES = {
    probe.__name__: probe
    for probe in (
        torch_cpu,
        torch_cuda,
        megatron_core,
        transformers,
        modelopt,
        math_verify,
        matplotlib,
        transformer_engine,
        apex,
        wandb,
        sglang,
        vllm,
    )
}

if __name__ == "__main__":
    # On a line of its own, because packages print while they are imported.
    print(f"\n{MARKER}{json.dumps(PROBES[sys.argv[1]]())}", flush=True)
