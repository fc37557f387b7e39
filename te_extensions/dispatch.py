"""Which way a linear layer is computed, by a measured table.

``reference``    decode, multiply; slow and plain. The only automatic path on a CPU.
``dequantize``   decode into a reused workspace, then cuBLAS. Best for many tokens, where cuBLAS is at its peak.
``fused``        the Hopper kernel that decodes in registers. Best for few tokens, where bytes are what costs.
``humming``      an optional package; never automatic, since it keeps a second copy of the weights.

``dispatch_table.json`` holds the rules: the first that covers (M, N, K) names the path. A shape that was measured has
rules of its own with one crossover in M; the last rules serve every other shape. ``build_table`` makes the file from
benchmark results (``rebuild`` writes it) and nothing else does.

Order of authority: a ``path`` argument, then the environment variable ``TE_EXTENSIONS_LINEAR_PATH``, then the table.
Every choice is logged once a layer shape and path. ``auto`` may end on ``dequantize`` where the table says ``fused``
but the kernel cannot run (another GPU, K, dtype); that, too, is logged, with the reason. A named path that cannot run
is an error.

Batch invariance. Two paths sum in different orders, so a row of y can differ in its last bit between them: with
``auto`` that happens where M passes a rule's ``m_max``, and nowhere else on account of dispatch. Whoever needs a row to
be independent of its batch keeps M on one side of it, or names the path. Inside ``fused`` the rule is the kernel's own
(``fused.py``); inside ``dequantize`` it is cuBLAS's, which promises nothing across M.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from te_extensions.weight import NVFP4Weight

LinearPath = Literal["reference", "dequantize", "fused", "humming"]
PATHS: tuple[LinearPath, ...] = get_args(LinearPath)
ENVIRONMENT_VARIABLE = "TE_EXTENSIONS_LINEAR_PATH"
TABLE_FILE = Path(__file__).parent / "dispatch_table.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rule:
    """One row of the table. Bounds are inclusive; None is no bound."""

    n_min: int
    n_max: int | None
    k_min: int
    k_max: int | None
    m_max: int | None
    path: LinearPath

    def covers_shape(self, n: int, k: int) -> bool:
        return (
            self.n_min <= n
            and (self.n_max is None or n <= self.n_max)
            and self.k_min <= k
            and (self.k_max is None or k <= self.k_max)
        )

    def covers_rows(self, m: int) -> bool:
        return self.m_max is None or m <= self.m_max


@dataclass(frozen=True)
class Table:
    """The file.

    Attributes:
        device: name of the GPU measured, as CUDA reports it.
        measured: date of the measurement, or None while the rules are an estimate.
        source: results files that the rules come from, relative to the repository, with ", " between them.
        rules: in order; the last one covers everything.
    """

    device: str
    measured: str | None
    source: str
    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        if not self.rules or self.rules[-1] != Rule(0, None, 0, None, None, self.rules[-1].path):
            raise ValueError(f"{TABLE_FILE.name}: the last rule must cover every (M, N, K)")
        for rule in self.rules:
            if rule.path not in ("dequantize", "fused"):
                raise ValueError(f"{TABLE_FILE.name}: path = {rule.path!r} is never automatic on a GPU")

    def path(self, m: int, n: int, k: int) -> LinearPath:
        """The path of the first rule that covers the shape."""
        return next(rule.path for rule in self.rules if rule.covers_shape(n, k) and rule.covers_rows(m))

    def dumps(self) -> str:
        """The file's text: one rule a line, so that a new measurement reads well in a diff."""
        head = {"device": self.device, "measured": self.measured, "source": self.source}
        lines = ",\n".join("    " + json.dumps(asdict(rule)) for rule in self.rules)
        return json.dumps(head, indent=2)[:-2] + ',\n  "rules": [\n' + lines + "\n  ]\n}\n"


def parse_table(text: str) -> Table:
    """Read what ``Table.dumps`` wrote."""
    raw = json.loads(text)
    return Table(raw["device"], raw["measured"], raw["source"], tuple(Rule(**rule) for rule in raw["rules"]))


@cache
def committed_table() -> Table:
    return parse_table(TABLE_FILE.read_text())


@cache
def _table_for(device_name: str) -> Table:
    table = committed_table()
    if table.measured is None:
        logger.info("dispatch: the table is an estimate, nothing was measured yet")
    if device_name != table.device:
        logger.warning(
            "dispatch: the table was made for %s and is used on %s; set %s or pass path= if it chooses badly",
            table.device,
            device_name,
            ENVIRONMENT_VARIABLE,
        )
    return table


@cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


# A handful of shapes times the batch sizes seen; bounded because M is open-ended in training.
_choices: dict[tuple[int, int, int, int], LinearPath] = {}
_CHOICES_LIMIT = 65536
_logged: set[tuple[object, ...]] = set()


def log_once(key: tuple[object, ...], message: str, *args: object) -> None:
    """Log at INFO the first time ``key`` is seen."""
    if key not in _logged:
        _logged.add(key)
        logger.info(message, *args)


def checked_path(value: str, name: str) -> LinearPath:
    """``value`` if it names a path.

    Raises:
        ValueError: it does not.
    """
    if value not in PATHS:
        raise ValueError(f"{name} = {value!r} is not a path; use one of {', '.join(PATHS)} (or 'auto')")
    return value


def choose_path(device: torch.device, m: int, n: int, k: int) -> LinearPath:
    """The path for x [M, K] times W [N, K] on ``device`` when the caller names none.

    Raises:
        ValueError: the environment variable holds no path.
    """
    forced = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if forced != "auto":
        return checked_path(forced, ENVIRONMENT_VARIABLE)
    if device.type != "cuda":
        return "reference"
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (index, m, n, k)
    found = _choices.get(key)
    if found is None:
        if len(_choices) >= _CHOICES_LIMIT:
            _choices.clear()
        found = _choices[key] = _table_for(_device_name(index)).path(m, n, k)
    return found


def refusal(path: LinearPath, m: int, weight: NVFP4Weight, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why ``path`` cannot compute this product, or None."""
    if path in ("reference", "dequantize"):
        return None
    if dtype != torch.bfloat16:
        return f"x is {dtype}, the kernel takes bfloat16"
    if path == "humming":
        from te_extensions.humming import humming_refusal

        return humming_refusal(m, weight, device)
    if device.type != "cuda":
        return f"device {device} is not a CUDA device"
    from te_extensions.fused import fused_refusal

    return fused_refusal(m, weight, device)


def resolve_path(requested: str, m: int, weight: NVFP4Weight, dtype: torch.dtype, device: torch.device) -> LinearPath:
    """The path to take for ``m`` rows.

    Args:
        requested: the caller's ``path``: "auto" or a name.

    Raises:
        ValueError: the name is unknown, or the named path cannot compute this product.
    """
    n, k = weight.shape
    if requested != "auto":
        path, origin = checked_path(requested, "path"), f"path = {requested!r}"
    else:
        path = choose_path(device, m, n, k)
        forced = os.environ.get(ENVIRONMENT_VARIABLE, "auto") != "auto"
        origin = f"{ENVIRONMENT_VARIABLE} = {path!r}" if forced else "the table"
    reason = refusal(path, m, weight, dtype, device)
    if reason is None:
        log_once((n, k, path), "dispatch: N=%d K=%d -> %s (first at M=%d, by %s)", n, k, path, m, origin)
        return path
    if origin != "the table":
        raise ValueError(
            f"{origin} cannot compute M={m} N={n} K={k}: {reason}; use 'auto', 'dequantize' or 'reference'"
        )
    log_once((n, k, path, reason), "dispatch: N=%d K=%d -> dequantize instead of %s: %s", n, k, path, reason)
    return "dequantize"


def _best_threshold(times: Mapping[int, Mapping[str, float]]) -> int | None:
    """The largest measured M to serve with ``fused`` (0: none, None: all) that wastes least, as a sum of log ratios.

    One crossover and not the fastest path at each M: each change of path is a place where a row's bits may change.
    """
    both = sorted(m for m, paths in times.items() if {"fused", "dequantize"} <= paths.keys())
    gain = {m: math.log(times[m]["dequantize"] / times[m]["fused"]) for m in both}
    best, threshold, total = 0.0, 0, 0.0
    for m in both:
        total += gain[m]
        if total > best:
            best, threshold = total, m
    return None if both and threshold == max(times) else threshold


def _rules(times: Mapping[int, Mapping[str, float]], shape: tuple[int, int] | None) -> list[Rule]:
    threshold = _best_threshold(times)
    n_min, n_max, k_min, k_max = (0, None, 0, None) if shape is None else (shape[0], shape[0], shape[1], shape[1])
    if threshold is None:
        return [Rule(n_min, n_max, k_min, k_max, None, "fused")]
    rest = Rule(n_min, n_max, k_min, k_max, None, "dequantize")
    return [Rule(n_min, n_max, k_min, k_max, threshold, "fused"), rest] if threshold else [rest]


def build_table(results: Mapping[str, Any], source: str) -> Table:
    """The table that benchmark results give.

    Args:
        results: ``rows``, each with n, k (on one rank), m, pass, path, us, and ``environment`` as the benchmarks write
            it (date and hardware.gpu). Only rows with pass "forward" and path "fused" or "dequantize" count; several
            rows of one case: their median. A path that was refused has a null time.
        source: where they lie, as the table shall say.

    Raises:
        ValueError: no shape was measured on both paths.
    """
    samples: dict[tuple[int, int], dict[int, dict[str, list[float]]]] = {}
    for row in cast(Iterable[Mapping[str, Any]], results["rows"]):
        if row["pass"] == "forward" and row["path"] in ("fused", "dequantize") and row["us"] is not None:
            by_m = samples.setdefault((int(row["n"]), int(row["k"])), {})
            by_m.setdefault(int(row["m"]), {}).setdefault(row["path"], []).append(float(row["us"]))
    times = {
        shape: {m: {path: sorted(us)[len(us) // 2] for path, us in paths.items()} for m, paths in by_m.items()}
        for shape, by_m in samples.items()
    }
    if not any({"fused", "dequantize"} <= paths.keys() for by_m in times.values() for paths in by_m.values()):
        raise ValueError(f"{source}: no shape has forward times of both 'fused' and 'dequantize'")
    rules = [rule for shape in sorted(times) for rule in _rules(times[shape], shape)]
    where = results["environment"]
    return Table(where["hardware"]["gpu"], where["date"][:10], source, (*rules, *_rules(_typical(times), None)))


def rebuild(*results_files: str) -> None:
    """Write the table from results files, paths relative to the repository, as the current folder is:
    ``python -c "from te_extensions.dispatch import rebuild; rebuild('benchmarks/results/kernels_h200.json')"``.
    """
    TABLE_FILE.write_text(table_from_files(Path(), results_files).dumps())


def table_from_files(root: Path, results_files: Iterable[str]) -> Table:
    """The table that all rows of some results files give; the first file's date is the table's.

    Raises:
        ValueError: they were measured on different GPUs, or as ``build_table``.
    """
    names = list(results_files)
    results = [json.loads((root / name).read_text()) for name in names]
    devices = {one["environment"]["hardware"]["gpu"] for one in results}
    if len(devices) != 1:
        raise ValueError(f"{', '.join(names)}: measured on {', '.join(sorted(devices))}; a table is for one GPU")
    rows = [row for one in results for row in one["rows"]]
    return build_table({**results[0], "rows": rows}, ", ".join(names))


def _typical(times: Mapping[tuple[int, int], Mapping[int, Mapping[str, float]]]) -> dict[int, dict[str, float]]:
    """Geometric mean over the shapes that have both paths at an M: what an unmeasured shape is assumed to be like."""
    logs: dict[int, dict[str, list[float]]] = {}
    for shape in sorted(times):
        for m, paths in times[shape].items():
            if {"fused", "dequantize"} <= paths.keys():
                for path in ("fused", "dequantize"):
                    logs.setdefault(m, {}).setdefault(path, []).append(math.log(paths[path]))
    return {m: {path: math.exp(sum(v) / len(v)) for path, v in paths.items()} for m, paths in logs.items()}
