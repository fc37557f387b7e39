"""What can run here: one line for each way of multiplying by an NVFP4 weight, with the reason and the remedy if not.

The answer is found without importing a backend and without touching a GPU's memory: packages are looked up, not loaded.
A line that says yes means that nothing known forbids it; ``dispatch`` decides, product by product, what is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

# Import names that decide something below.
_PACKAGES = ("triton", "cuda.bindings", "humming", "flashinfer", "transformer_engine")


@dataclass(frozen=True)
class Facts:
    """What the machine and the environment are, as far as the answers depend on it.

    Attributes:
        device: as torch names it, such as ``cuda:0``.
        device_name: the GPU's name, or "CPU".
        compute_capability: (major, minor), or None without a GPU.
        cuda_build: CUDA version that torch was built for, or None.
        packages: those of the names asked for that are installed.
    """

    device: str
    device_name: str
    compute_capability: tuple[int, int] | None
    cuda_build: str | None
    packages: frozenset[str]


@dataclass(frozen=True)
class Capability:
    """One path.

    Attributes:
        name: as in ``dispatch``, or of an optional backend.
        usable: whether it can run on the device.
        computes: what it does, in a few words.
        reason: why it cannot run; empty when it can.
        remedy: how to get it; empty when it can run.
    """

    name: str
    usable: bool
    computes: str
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Capabilities:
    """All paths on one device, in a fixed order."""

    facts: Facts
    paths: tuple[Capability, ...]

    def __getitem__(self, name: str) -> Capability:
        for path in self.paths:
            if path.name == name:
                return path
        raise KeyError(f"{name!r} is no path; known are {', '.join(p.name for p in self.paths)}")

    def describe(self) -> str:
        """A table, one line a path."""
        facts = self.facts
        capability = (
            "" if facts.compute_capability is None else ", compute capability {}.{}".format(*facts.compute_capability)
        )
        lines = [f"{facts.device}: {facts.device_name}{capability}, torch built for CUDA {facts.cuda_build or 'none'}"]
        width = max(len(path.name) for path in self.paths)
        for path in self.paths:
            text = path.computes if path.usable else f"{path.reason}; {path.remedy}"
            lines.append(f"  {path.name:<{width}}  {'yes' if path.usable else 'no ':<3}  {text}")
        return "\n".join(lines)


def _installed(name: str) -> bool:
    """Whether a module can be found. Of a dotted name the parent is imported, so only light parents are asked for."""
    parent, dot, _ = name.rpartition(".")
    return (not dot or _installed(parent)) and find_spec(name) is not None


def facts(device: torch.device | str | None = None) -> Facts:
    """Look at ``device`` (default: the current GPU if there is one, else the CPU)."""
    if device is None:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    name, capability = "CPU", None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device = {device}: torch sees no NVIDIA GPU; use 'cpu', or check the driver")
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    packages = frozenset(package for package in _PACKAGES if _installed(package))
    return Facts(str(device), name, capability, torch.version.cuda, packages)


# A rule gives (reason, remedy), or None where it is satisfied.
_Rule = Callable[[Facts], tuple[str, str] | None]


def _gpu(facts: Facts) -> tuple[str, str] | None:
    if facts.compute_capability is None:
        return f"{facts.device} is not a CUDA device", "run it on an NVIDIA GPU"
    return None


def _at_least(major: int, minor: int, why: str, alternative: str) -> _Rule:
    def rule(facts: Facts) -> tuple[str, str] | None:
        found = facts.compute_capability
        if found is not None and found < (major, minor):
            return f"compute capability {found[0]}.{found[1]} is below {major}.{minor} ({why})", alternative
        return None

    return rule


def _exactly_hopper(facts: Facts) -> tuple[str, str] | None:
    found = facts.compute_capability
    if found is not None and found != (9, 0):
        return f"compute capability {found[0]}.{found[1]} is not 9.0 (Hopper's WGMMA)", "use dequantize on this GPU"
    return None


def _package(name: str, command: str) -> _Rule:
    def rule(facts: Facts) -> tuple[str, str] | None:
        if name not in facts.packages:
            return f"the module {name} is not installed", command
        return None

    return rule


_PATHS: tuple[tuple[str, str, tuple[_Rule, ...]], ...] = (
    ("reference", "W4A16: table on any device, then torch's matrix product; slow and plain", ()),
    (
        "dequantize",
        "W4A16: one Triton pass to BF16, then cuBLAS; for many tokens",
        (
            _gpu,
            _at_least(8, 0, "no BF16 arithmetic", "use an Ampere GPU or later, or path reference"),
            _package("triton", "pip install triton==3.6.0 (it comes with torch on Linux)"),
        ),
    ),
    (
        "fused",
        "W4A16: decoded inside the product (CUDA C++, compiled at first use); for few tokens",
        (
            _gpu,
            _exactly_hopper,
            _package("cuda.bindings", "pip install cuda-bindings (it comes with torch for CUDA)"),
        ),
    ),
    (
        "humming",
        "W4A16: optional kernels that keep a second, reordered copy of each weight; only by name",
        (_gpu, _package("humming", "pip install humming-kernels==0.1.20")),
    ),
    (
        "flashinfer_w4a16",
        "W4A16 on Blackwell's own FP4 units (mm_bf16_fp4)",
        (
            _gpu,
            _at_least(10, 0, "needs Blackwell", "use fused or dequantize on this GPU"),
            _package("flashinfer", "pip install flashinfer-python"),
        ),
    ),
    (
        "te_w4a4",
        "W4A4: activations are quantised too, which is another policy than the one W4A16 engines sample",
        (
            _gpu,
            _at_least(10, 0, "needs Blackwell", "use fused or dequantize on this GPU"),
            _package("transformer_engine", "pip install 'transformer-engine[pytorch,core-cu13]==2.20.2'"),
        ),
    ),
)


def judge(facts: Facts) -> Capabilities:
    """Apply the rules to ``facts``; the first rule a path breaks is its reason."""
    paths = []
    for name, computes, rules in _PATHS:
        broken = next((found for rule in rules if (found := rule(facts)) is not None), None)
        paths.append(Capability(name, True, computes) if broken is None else Capability(name, False, computes, *broken))
    return Capabilities(facts, tuple(paths))


def capabilities(device: torch.device | str | None = None) -> Capabilities:
    """What can run on ``device`` (default: the current GPU if there is one, else the CPU).

    Raises:
        ValueError: a CUDA device is named and torch sees none.
    """
    return judge(facts(device))


if __name__ == "__main__":
    print(capabilities().describe())
