"""The configuration of a cluster: where a run is started, apart from what is trained.

One file serves every run on that cluster. It says how many nodes and ranks, how Python is reached on a node, what the
scheduler wants to know, and what a node must have to be trusted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from megatron_qerl.config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

_TIME = re.compile(r"(\d+-)?\d{1,2}:\d{2}(:\d{2})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST = re.compile(r"[A-Za-z0-9_@.:-]+")


def _one_line(text: str) -> str:
    if "\n" in text or not text.strip():
        raise ValueError("must be one line of text, not empty")
    return text


class ContainerSection(Section):
    """A container on every node, started by srun through NVIDIA's pyxis and enroot."""

    image: str = Field(description="as pyxis takes it: registry#path:tag, or a .sqsh file that every node can read")
    mounts: tuple[str, ...] = Field(default=(), description="HOST:CONTAINER[:FLAGS]; workdir is always mounted")

    @field_validator("image")
    @classmethod
    def _image_is_a_line(cls, image: str) -> str:
        return _one_line(image)

    @field_validator("mounts")
    @classmethod
    def _mounts_have_two_sides(cls, mounts: tuple[str, ...]) -> tuple[str, ...]:
        for mount in mounts:
            if mount.count(":") not in (1, 2) or "," in mount:
                raise ValueError(f"mount {mount!r} must be HOST:CONTAINER or HOST:CONTAINER:FLAGS, one an entry")
        return mounts


class SlurmSection(Section):
    """What sbatch is told."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str = Field(default="04:00:00", description="[days-]hours:minutes[:seconds] of one attempt")
    stop_before_s: PositiveInt = Field(
        default=300, description="seconds before the limit at which the run is asked to save; above the longest step"
    )
    max_attempts: PositiveInt = Field(default=20, description="after so many starts the job is not requeued any more")
    exclude: tuple[str, ...] = Field(default=(), description="nodes never to be used")
    max_parallel: PositiveInt = Field(default=4, description="runs of an experiment matrix at the same time")
    extra: tuple[str, ...] = Field(default=(), description="more options of sbatch, such as --exclusive")

    @field_validator("time_limit")
    @classmethod
    def _time_is_slurms(cls, text: str) -> str:
        if not _TIME.fullmatch(text):
            raise ValueError("must be [days-]hours:minutes[:seconds], such as 04:00:00; quote it in YAML")
        return text

    @model_validator(mode="after")
    def _asked_to_stop_in_time(self) -> Self:
        days, _, clock = self.time_limit.rpartition("-")
        hours, minutes, *seconds = (int(part) for part in clock.split(":"))
        limit_s = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + sum(seconds)
        if self.stop_before_s >= limit_s:
            raise ValueError(
                f"stop_before_s = {self.stop_before_s} must be less than time_limit = {limit_s} s; lower it"
            )
        return self

    @field_validator("extra")
    @classmethod
    def _extra_are_options(cls, extra: tuple[str, ...]) -> tuple[str, ...]:
        ours = ("--nodes", "--signal", "--requeue", "--no-requeue", "--array", "--time", "--ntasks", "--output")
        for option in extra:
            if not option.startswith("--") or "\n" in option:
                raise ValueError(f"{option!r} must be one long option of sbatch, such as --exclusive")
            if option.partition("=")[0] in ours:
                raise ValueError(f"{option!r} is set by launch; use the key of its own")
        return extra


class HostsSection(Section):
    """Machines without a scheduler, reached by ssh without a password."""

    names: tuple[str, ...] = Field(min_length=1, description="the first one is where the ranks meet")
    port: Annotated[int, Field(ge=1024, le=65528)] = Field(
        default=29500, description="first of eight ports that are free there"
    )
    ssh_options: tuple[str, ...] = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")

    @field_validator("names")
    @classmethod
    def _names_are_hosts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not _HOST.fullmatch(name) or name.startswith("-"):
                raise ValueError(f"{name!r} is not a host, or user@host, that ssh takes")
        if len(set(names)) != len(names):
            raise ValueError("a host is listed twice")
        return names


class PreflightSection(Section):
    """What every node must have before a run starts on it."""

    enabled: bool = True
    time_limit_s: PositiveInt = Field(default=120, description="a node that has not answered by then counts as bad")
    driver: str | None = Field(default=None, description="NVIDIA driver that all nodes must have; null: the same one")
    local_dir: str = Field(default="/tmp", description="local disk; $VARIABLES are those of the node")
    local_free_gib: NonNegativeFloat = 1.0
    shared_free_gib: NonNegativeFloat = Field(default=10.0, description="in the file system of run.output_dir")
    clock_skew_s: PositiveFloat = Field(default=5.0, description="largest difference between two nodes' clocks")
    bandwidth_gb_per_s: NonNegativeFloat = Field(
        default=0.0, description="least bus bandwidth of an all-reduce of all ranks, 10^9 bytes/s; 0: only reported"
    )
    message_mib: PositiveInt = Field(default=256, description="size of the all-reduce that is timed")
    memory_reserve_gib: NonNegativeFloat = Field(default=6.0, description="left of a GPU to CUDA and NCCL")


class ClusterConfig(Section):
    """Where runs are started."""

    kind: Literal["slurm", "hosts"]
    nodes: PositiveInt = 1
    ranks_per_node: PositiveInt = Field(description="processes on each node; on GPUs as many as GPUs")
    gpus_per_node: NonNegativeInt = Field(description="0: train on CPUs")
    cpus_per_rank: PositiveInt = Field(default=8, description="cores of each process, asked for on Slurm")
    python: str = Field(default="python", description="interpreter on every node, inside the container if there is one")
    workdir: Path | None = Field(
        default=None, description="shared folder that relative paths of a config start from; null: where launch is run"
    )
    log_dir: Path = Field(default=Path("logs"), description="shared folder for scripts and logs")
    environment: dict[str, str] = Field(default={}, description="variables of every rank, such as NCCL_SOCKET_IFNAME")
    container: ContainerSection | None = None
    slurm: SlurmSection | None = None
    hosts: HostsSection | None = None
    preflight: PreflightSection = PreflightSection()

    @field_validator("python")
    @classmethod
    def _python_is_a_line(cls, python: str) -> str:
        return _one_line(python)

    @field_validator("environment")
    @classmethod
    def _names_are_variables(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
        return environment

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.gpus_per_node and self.ranks_per_node != self.gpus_per_node:
            raise ValueError(
                f"ranks_per_node = {self.ranks_per_node} with gpus_per_node = {self.gpus_per_node}: a rank computes on "
                "one GPU of its own; make them equal, or set gpus_per_node: 0 to train on CPUs"
            )
        if self.kind == "slurm" and self.hosts is not None:
            raise ValueError("kind slurm has no section hosts; remove it or set kind: hosts")
        if self.kind == "hosts":
            if self.hosts is None or self.slurm is not None or self.container is not None:
                raise ValueError("kind hosts needs the section hosts, and neither slurm nor container")
            if len(self.hosts.names) != self.nodes:
                raise ValueError(f"nodes = {self.nodes}, but hosts.names has {len(self.hosts.names)}; make them equal")
        return self

    @property
    def scheduler(self) -> SlurmSection:
        """What sbatch is told; defaults where the file says nothing."""
        return self.slurm or SlurmSection()
