"""A SLURM cluster of three nodes on this machine: real munged, slurmctld and slurmd, with files in a temporary folder."""

import contextlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.distributed.pool import free_port
from tests.training.runs import metrics_of

ROOT = Path(__file__).parents[2]
PACED = ROOT / "tests" / "training" / "paced.py"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
# Names of the nodes. As IP addresses, they need no name service, and all addresses 127.x.x.x are this machine.
NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
GPUS = 8
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
# A requeued job waits for its old credential to expire.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """The running cluster, with commands of a user and a simulated failure of a node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "PYTHON": str(_interpreter(folder)),
            "OMP_NUM_THREADS": "1",
        }

    def kill_node(self, name: str) -> None:
        """Simulate a power failure of a node: kill its slurmd, the daemons of its job steps, and all their processes."""
        lost = {int((self.folder / f"{name}.pid").read_text())}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"SLURMD_NODENAME={name}" in (process / "environ").read_text(errors="replace").split("\0"):
                    parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                    is_daemon = (Path("/proc") / str(parent) / "comm").read_text().strip() == "slurmstepd"
                    lost |= {int(process.name), *([parent] if is_daemon else [])}
        for pid in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        result = subprocess.run(
            command, cwd=ROOT, env=self.environment | variables, capture_output=True, text=True, timeout=60
        )
        assert not check or result.returncode == 0, f"{command}: {result.stderr}"
        return result.stdout

    def submit(self, *arguments: str, **variables: str) -> str:
        return self.run("sbatch", "--parsable", f"--output={self.folder}/%j.out", *arguments, **variables).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job, as ``scontrol show job`` prints them, by name."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", "-o", number)))

    def output(self, number: str) -> str:
        return "\n".join(file.read_text() for file in self.folder.glob(f"{number}.out"))

    def wait_for_step(self, number: str, folder: Path, step: int) -> None:
        """Wait until the run in ``folder`` has logged step number ``step``; fail with the output of the job."""
        wait_until(
            lambda: any(line["step"] >= step for line in metrics_of(folder)),
            lambda: f"{folder} did not reach step {step}: {self.job(number)}\n{self.output('*')}",
        )

    def wait(self, number: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of ``states``; return its fields."""
        return wait_until(
            lambda: (job := self.job(number))["JobState"] in states and job,
            lambda: f"job {number} is not {states}: {self.job(number)}\n{self.output(number)}",
        )


def _interpreter(folder: Path) -> Path:
    """Write a program that runs the slow trainer. Its path has no spaces, because it is the value of ``PYTHON``."""
    command = folder / "python"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(PACED))} "$@"\n')
    command.chmod(0o755)
    return command


def wait_until(condition: Callable, otherwise: Callable[[], str], seconds: float = 240):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Only one cluster at a time: the names of the nodes are fixed, so two clusters would kill each other's jobs.
    with FileLock(Path(tempfile.gettempdir()) / "openclip_ext-slurm.lock"):
        yield from _cluster(tmp_path_factory)


def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"SLURM is not installed ({missing}): apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons must be started by root")
    folder = tmp_path_factory.mktemp("slurm")
    _configure(folder)
    cluster = Cluster(folder)
    key = folder / "munge" / "key"
    files = {"key-file": key, **{name: key.with_name(name) for name in ("socket", "pid-file", "log-file", "seed-file")}}
    cluster.run("munged", "--force", *(f"--{name}={path}" for name, path in files.items()))
    try:
        cluster.run("slurmctld")
        for node in NODES:
            cluster.run("slurmd", "-N", node)
        wait_until(
            lambda: cluster.run("sinfo", "-h", "-o", "%T").split() == ["idle"],
            lambda: "\n".join(log.read_text() for log in folder.glob("*.log")),
            seconds=30,
        )
        yield cluster
    finally:
        cluster.run("scancel", "--user=root", "--signal=KILL", "--full", check=False)
        cluster.run("scancel", "--user=root", check=False)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not cluster.run("squeue", "-h", check=False), str, seconds=10)
        for node in NODES:
            cluster.kill_node(node)
        for pid_file in (*folder.glob("*.pid"), files["pid-file"]):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(pid_file.read_text()), signal.SIGTERM)


def _configure(folder: Path) -> None:
    (folder / "munge").mkdir(mode=0o711)
    (folder / "state").mkdir()
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    (folder / "munge" / "key").chmod(0o600)
    controller_port, *ports = (free_port() for _ in range(1 + len(NODES)))
    nodes = [
        f"NodeName={name} NodeHostname={platform.node()} Port={port} CPUs=64 RealMemory=1000 Gres=gpu:{GPUS} State=UNKNOWN"
        for name, port in zip(NODES, ports, strict=True)
    ]
    settings = {"host": platform.node(), "controller_port": controller_port, "folder": folder}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(nodes="\n".join(nodes), **settings))
    # SLURM accepts any character device as a GPU.
    devices = [str(path) for path in sorted(Path("/dev").iterdir()) if path.is_char_device() and not path.is_symlink()]
    (folder / "gres.conf").write_text(f"Name=gpu File={','.join(devices[:GPUS])}\n")
