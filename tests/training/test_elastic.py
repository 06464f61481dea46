"""Elastic training: a run under torchrun continues while a node leaves and returns."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest
import torch

from tests.distributed.pool import free_port
from tests.training import paced
from tests.training.programs import children_of, send_kill, wait_until
from tests.training.runs import final_state, metrics_of, small_command

STEPS_PER_EPOCH, GLOBAL_BATCH = 5, 16
QUICK = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"


class Node:
    """A torchrun process with one trainer, which plays the role of one node."""

    def __init__(self, argv: list[str], port: int, **variables: str) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--max-restarts=3"]
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf={QUICK}"]
        self.process = subprocess.Popen(
            [*launcher, "--nnodes=1:2", *rendezvous, "--", paced.__file__, "-m", "openclip_ext.training.main", *argv],
            # With a shared store, a returning node waits for an address that only the first round publishes (torch 2.15).
            env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", **variables},
            stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def lose_power(self) -> None:
        for pid in (self.process.pid, *children_of(self.process.pid)):
            send_kill(pid)

    def wait(self) -> None:
        output, _ = self.process.communicate(timeout=150)
        assert self.process.returncode == 0, output


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a node; the fixture stops all nodes after the test."""
    port, nodes = free_port(), []

    def start_node(argv, **variables):
        nodes.append(Node(argv, port, NOTES=str(tmp_path / "notes"), **variables))
        while nodes[-1].process.poll() is None:  # wait until the first node's rendezvous accepts connections
            with contextlib.suppress(ConnectionError), socket.create_connection(("localhost", port)):
                break
            time.sleep(0.1)
        return nodes[-1]

    yield start_node
    for node in nodes:
        if node.process.poll() is None:
            node.process.terminate()
            node.process.wait()


def wait_for_steps(notes, count, world_size, nodes, since=0.0):
    """Wait until launches after the time ``since`` have recorded ``count`` different steps with ``world_size`` ranks."""

    def are_there():
        assert all(node.process.poll() is None for node in nodes), nodes[0].process.communicate()[0]
        found = [note for note in paced.read_notes(notes) if "step" in note and note["started"] > since]
        return len({note["step"] for note in found if note["world_size"] == world_size}) >= count

    wait_until(are_there, 150)


def test_a_node_leaves_and_comes_back(shards, tmp_path, start):
    flags = ["--global-batch", str(GLOBAL_BATCH), "--batch-size", "8", "--save-every-steps", "1", "--resume", "latest"]
    argv = small_command(shards, tmp_path, "run", "fastclip-v2", *flags)
    # While the first node runs alone, it waits after its third step until the other node returns.
    held = {"PACE": "0.5", "HOLD_AT": "3", "HOLD_WORLD": "1"}
    first, second = start(argv, **held), start(argv, **held)
    wait_for_steps(tmp_path / "notes", 3, 2, [first, second])
    second.lose_power()
    wait_for_steps(tmp_path / "notes", 3, 1, [first], since=time.time())
    again = start(argv, **held)
    first.wait()
    again.wait()

    notes = [note for note in paced.read_notes(tmp_path / "notes") if "step" in note]
    assert [step["step"] for step in metrics_of(tmp_path / "run")] == list(range(2 * STEPS_PER_EPOCH))
    seen, worlds = {}, []
    for step in range(2 * STEPS_PER_EPOCH):
        # After a node left, the run resumed from the newest checkpoint and repeated steps. The last record of a step counts.
        of_step = sorted((note for note in notes if note["step"] == step), key=lambda note: -note["started"])
        world = of_step[0]["world_size"]
        last = [note for note in of_step if note["world_size"] == world][:world]
        seen.setdefault(step // STEPS_PER_EPOCH, []).extend(index for note in last for index in note["samples"])
        worlds.append(world)
    changes = [world for place, world in enumerate(worlds) if worlds[:place][-1:] != [world]]
    assert changes[-3:] == [2, 1, 2]  # a slow machine may start with one node
    for samples in seen.values():
        assert len(samples) == len(set(samples)) == STEPS_PER_EPOCH * GLOBAL_BATCH
    assert samples_with_state(tmp_path / "run") == {index for samples in seen.values() for index in samples}


def samples_with_state(folder):
    """Return the samples whose normalizer was written, from the table shards of all ranks."""
    state = final_state(folder)
    parts = [state[name] for name in sorted(state) if name.endswith(".normalizer.table.npy")]
    table = torch.cat([part.reshape(len(part), -1) for part in parts])
    return set(table.any(dim=1).nonzero().flatten().tolist())
