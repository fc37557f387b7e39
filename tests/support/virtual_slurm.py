"""A real Slurm of four virtual nodes on this machine, from Debian's packages: slurmctld, four slurmd, munged.

Every node is at 127.0.0.1 with a port of its own and has its own host name (a UTS namespace), by which its processes
are found when the node is to die. Needs root, because slurmd starts jobs as their user.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "unshare")
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"}
_HOSTS = Path("/etc/hosts")

# cred_expire: a requeued job waits that long; below 5 it is the default, two minutes. linuxproc: no cgroups. The rest
# keeps everything on loopback.
_CONF = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
MinJobAge=3600
KillWait=3
JobRequeue=1
ReturnToService=2
SlurmdTimeout={slurmd_timeout_s}
SlurmctldTimeout=60
InactiveLimit=0
GresTypes=gpu
NodeName={nodes} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=16 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why a virtual cluster cannot be started here; empty if it can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"needs Slurm (apt-get install slurmctld slurmd slurm-client munge): no {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "needs root: slurmd starts jobs as their user"


class VirtualSlurm:
    """A cluster, started by ``start`` and ended by ``stop``.

    Args:
        root: folder of its state; short, because a socket's path has 108 bytes at most.
        nodes: host names.
    """

    def __init__(self, root: Path, nodes: tuple[str, ...] = ("qn1", "qn2", "qn3", "qn4")) -> None:
        self.root, self.nodes = root, nodes
        # An outer allocation's variables would act as options of sbatch and srun.
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        self.env["SLURM_CONF"] = str(root / "slurm.conf")

    def start(self) -> None:
        """Bring it up and wait until all nodes are idle."""
        for folder in ("munge", "state", "spool", *(f"spool/{node}" for node in self.nodes)):
            (self.root / folder).mkdir(parents=True)
        (self.root / "munge").chmod(0o711)
        port = _free_block(len(self.nodes) + 1)
        (self.root / "slurm.conf").write_text(
            _CONF.format(
                host=socket.gethostname().partition(".")[0], port=port, root=self.root, nodes=",".join(self.nodes),
                first=port + 1, last=port + len(self.nodes), slurmd_timeout_s=10,
            )
        )  # fmt: skip
        for index in range(2):  # slurmd wants character devices: twins of /dev/null
            os.mknod(self.root / f"gpu{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        gres = f"NodeName={','.join(self.nodes)} Name=gpu File={self.root}/gpu[0-1]\n"
        (self.root / "gres.conf").write_text(gres)
        # Written over, not renamed over: in a container the file is a mount.
        _HOSTS.write_text(_without(self.root) + "".join(f"127.0.0.1 {n} # {self.root}\n" for n in self.nodes))
        key = self.root / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self.run("munged", "--force", *(f"--{option}={self.root}/munge/{name}" for option, name in files.items()))
        self.run("slurmctld", "-c")
        for node in self.nodes:
            self.start_node(node)
        self.until(lambda: self.idle() == len(self.nodes), 30, "nodes idle")

    def start_node(self, node: str) -> None:
        self.run("unshare", "--uts", "sh", "-c", f"hostname {node}; exec slurmd -N {node}")

    def stop(self) -> None:
        """End every process of the cluster and of its jobs."""
        for node in self.nodes:
            self.kill_node(node)
        for name in ("slurmctld.pid", "munge/pid"):
            pid = _pid(self.root / name)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        _HOSTS.write_text(_without(self.root))
        shutil.rmtree(self.root)

    def kill_node(self, node: str) -> None:
        """As if its power failed: all its processes are gone at once."""
        pid = _pid(self.root / f"slurmd-{node}.pid")
        if pid is None:
            return
        own = os.readlink(f"/proc/{pid}/ns/uts")
        assert own != os.readlink("/proc/self/ns/uts")
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and _link(process / "ns/uts") == own:
                _kill(int(process.name))
        (self.root / f"slurmd-{node}.pid").unlink()

    def run(self, *command: object, cwd: Path | None = None, timeout_s: float = 60) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(
            [str(word) for word in command], cwd=cwd, env=self.env, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def info(self, job: str) -> dict[str, str]:
        """What scontrol says about a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "-o", "show", "job", job).splitlines()[0]))

    def wait(self, job: str, timeout_s: float, output: Path | None = None) -> dict[str, str]:
        """Wait for a job's end."""
        end = time.monotonic() + timeout_s
        while (info := self.info(job))["JobState"] not in FINAL:
            said = output.read_text() if output is not None and output.exists() else ""
            assert time.monotonic() < end, (
                f"job {job} is {info['JobState']} ({info['Reason']}) after {timeout_s} s\n{said}"
            )
            time.sleep(0.1)
        return info

    def until(self, what: Any, timeout_s: float, name: str) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < end, f"not in {timeout_s} s: {name}"
            time.sleep(0.05)

    def idle(self) -> int:
        """Number of nodes without a job."""
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], env=self.env, capture_output=True, text=True, check=False
        )
        return len(set(done.stdout.split()))


def _without(root: Path) -> str:
    return "".join(line for line in _HOSTS.read_text().splitlines(keepends=True) if not line.endswith(f"# {root}\n"))


def _free_block(count: int) -> int:
    """First of so many free ports in a row, below those that the system hands out."""
    for first in range(17000 + os.getpid() % 100 * 20, 20000 - count, 20):
        taken = False
        for port in range(first, first + count):
            with socket.socket() as s:
                taken = taken or s.connect_ex(("127.0.0.1", port)) == 0
        if not taken:
            return first
    raise AssertionError("no free ports")


def _pid(file: Path) -> int | None:
    """A daemon's process id if it lives."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text and Path(f"/proc/{text}").exists() else None


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
