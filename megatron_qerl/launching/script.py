"""Scripts: a head of values, quoted for bash, over a body that is the same for every run."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_qerl.launching.job import Job, template


def _quoted(value: object) -> str:
    """One word of bash, always in quotes: shellcheck takes a bare comma in an array for a mistake."""
    return "'" + str(value).replace("'", "'\"'\"'") + "'"


def _array(name: str, values: Iterable[object]) -> str:
    return f"{name}=({' '.join(_quoted(v) for v in values)})"


def _head(job: Job, **values: object) -> list[str]:
    """What every body reads, and ``values``."""
    values |= {
        "ranks_per_node": job.cluster.ranks_per_node,
        "python": job.cluster.python,
        "workdir": job.workdir,
        "folder": job.folder,
        "log_root": job.log_root,
        "preflight": int(job.cluster.preflight.enabled),
    }
    assigned = [f"{name}={_quoted(value)}" for name, value in values.items()]
    return [*assigned, _array("configs", job.configs), _array("run_dirs", job.run_dirs())]


def slurm_script(job: Job, *, requeue: bool = True) -> str:
    """The sbatch script of a job.

    Args:
        job: what to start.
        requeue: go on in the same job after the time limit; False where a chain of jobs does that.
    """
    slurm, cluster = job.cluster.scheduler, job.cluster
    cpus = cluster.ranks_per_node * cluster.cpus_per_rank
    count = len(job.configs)
    options = {
        "job-name": job.name,
        "output": job.log_root / ("slurm-%A_%a.out" if count > 1 else "slurm-%j.out"),
        "open-mode": "append",
        "nodes": cluster.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "gpus-per-node": cluster.gpus_per_node or None,
        "time": slurm.time_limit,
        "signal": f"B:USR1@{slurm.stop_before_s}",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "exclude": ",".join(slurm.exclude) or None,
        "array": f"0-{count - 1}%{slurm.max_parallel}" if count > 1 else None,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    # Also without chains: Slurm itself requeues a job whose node died.
    lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in slurm.extra)]
    head = _head(
        job,
        nodes=cluster.nodes,
        max_attempts=slurm.max_attempts,
        requeue=int(requeue),
        preflight_limit_s=cluster.preflight.time_limit_s,
        exclude=",".join(slurm.exclude),
    )
    # srun does not take cpus-per-task over from the job.
    head += [_array("step_flags", [f"--cpus-per-task={cpus}", *_container_flags(job)])]
    head += [f"export {name}={_quoted(value)}" for name, value in cluster.environment.items()]
    return "\n".join(["#!/bin/bash", *lines, "", *head, "", template("slurm_job.sh")])


def _container_flags(job: Job) -> list[str]:
    container = job.cluster.container
    if container is None:
        return []
    shared = [job.workdir] + ([] if job.log_root.is_relative_to(job.workdir) else [job.log_root])
    mounts = [*(f"{path}:{path}" for path in shared), *container.mounts]
    return [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={job.workdir}",
        "--no-container-mount-home",
    ]


def hosts_script(job: Job) -> str:
    """The script that starts a job on plain hosts by ssh; run it on a machine that reaches all of them."""
    hosts, cluster = job.cluster.hosts, job.cluster
    assert hosts is not None, "the schema asks for the section"
    head = _head(job, port=hosts.port)
    head += [_array("names", hosts.names), _array("ssh_options", hosts.ssh_options)]
    head += [_array("variables", [f"{name}={value}" for name, value in cluster.environment.items()])]
    return "\n".join(["#!/bin/bash", *head, "", template("hosts_job.sh")])
