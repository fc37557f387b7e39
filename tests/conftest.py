"""What holds for every test: no network, no launcher's environment, and GPU tests only where there is a GPU."""

from __future__ import annotations

import os

import pytest

# A test must neither wait for a model hub nor believe that it is one rank of the job it happens to be started in.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tensors here are tiny: a second thread only waits, and much longer when the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _name in list(os.environ):
    if _name.startswith("SLURM_") or _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[_name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` with the reason, where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, torch sees none"))
