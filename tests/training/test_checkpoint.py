"""Damaged and foreign checkpoints are rejected, and a killed or failed save keeps the previous checkpoint."""

import contextlib
import itertools
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from openclip_ext import distributed
from openclip_ext.checkpoint import format as ckpt
from openclip_ext.checkpoint.format import Position, RunIdentity
from openclip_ext.cli.errors import UsageError
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.state.sharded_table import ShardedTable
from openclip_ext.training.checkpoint import finding, restoring, saving
from tests.training.runs import contents, flip_a_bit

IDENTITY = RunIdentity(model="demo-vit", loss="neuclip", optimizer="adamw", num_samples=100, global_batch=8, seed=0)


class Killed(BaseException):
    """A simulated kill of the process. As a BaseException, it is not caught by ``except Exception``."""


class SmallLoss(ContrastiveLoss):
    """A loss with a table of per-sample state, and with state that is equal on all ranks."""

    def __init__(self, size: int, step: float) -> None:
        super().__init__()
        self.register_buffer("net", torch.ones(size))
        self.table = ShardedTable(2, 10)
        self.table.write(torch.tensor([3, 4]), torch.full((2, 2), step), torch.ones(2, dtype=torch.bool))


def save(folder: Path, position: Position, name: str | None = None) -> Path:
    content = {"epoch": position.epoch, "name": "run", "step": position.step, "optimizer": {}}
    return saving.save(
        folder,
        name or f"epoch_{position.epoch}" + f"_step_{position.step}" * bool(position.step_in_epoch),
        {**content, "state_dict": {"weight": torch.full((10,), float(position.step))}},
        SmallLoss(10, float(position.step)),
        position,
        IDENTITY,
    )


def test_latest_is_the_newest_one(tmp_path):
    assert finding.scan(tmp_path)[0] is None
    save(tmp_path, Position(1, 10))
    save(tmp_path, Position(1, 14, 4))
    newest = save(tmp_path, Position(1, 100, 90))
    assert finding.scan(tmp_path)[0] == newest
    assert save(tmp_path, Position(4, 40), name=ckpt.LATEST) == finding.scan(tmp_path)[0]


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    def denied(folder):
        raise PermissionError(13, "Permission denied")

    save(tmp_path, Position(1, 10))
    monkeypatch.setattr(os, "listdir", denied)  # root can list every folder
    with pytest.raises(UsageError, match=r"cannot read .*Permission denied.* --name"):
        finding.scan(tmp_path)


@pytest.mark.parametrize("crash_after", range(8))
def test_a_save_killed_at_any_moment_leaves_the_previous_one(tmp_path, monkeypatch, crash_after):
    """In case n, the process is killed at file operation n of a save that replaces epoch_latest."""
    save(tmp_path, Position(1, 10), name=ckpt.LATEST)
    operations = iter(range(100))

    def mortal(function):
        def call(*args, **kwargs):
            if next(operations) >= crash_after:
                raise Killed
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", mortal(os.fsync))
    monkeypatch.setattr(os, "replace", mortal(os.replace))
    with pytest.raises(Killed) if crash_after < 7 else contextlib.nullcontext():
        save(tmp_path, Position(2, 20), name=ckpt.LATEST)
    monkeypatch.undo()
    latest = ckpt.read(finding.scan(tmp_path)[0])
    assert latest.position.step == (10 if crash_after < 7 else 20)
    assert float(latest.model_file["state_dict"]["weight"][0]) == latest.position.step
    loss = SmallLoss(10, 0.0)
    restoring.restore_loss(latest, loss)
    assert loss.table.read(torch.tensor([3])).tolist() == [[latest.position.step]] * 2
    # The resumed run repeats the save, which removes the files of the killed save.
    save(tmp_path, Position(2, 20), name=ckpt.LATEST)
    assert ckpt.read(finding.scan(tmp_path)[0]).position.step == 20
    assert [path.name for path in (tmp_path / "epoch_latest.state").iterdir()] == ["step_20"]
    assert not list(tmp_path.glob("*.tmp"))


FILES = ["epoch_2.pt", *(f"epoch_2.state/step_20/{name}" for name in ("shared.pt", "rank_0000.pt", "checksums.json"))]
FILES.append("epoch_2.state/step_20/rank_0000.table.npy")
DAMAGES = {
    "one-bit": flip_a_bit,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "swapped": lambda path: path.write_bytes(counterpart(path).read_bytes()),
}


def counterpart(path: Path) -> Path:
    """Return the same file of the checkpoint epoch_1."""
    return Path(str(path).replace("epoch_2", "epoch_1").replace("step_20", "step_10"))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_damage_is_found_whatever_it_hits(tmp_path, caplog, file, damage):
    good = save(tmp_path, Position(1, 10))
    torch.rand(1)  # no file of the second checkpoint is equal to one of the first
    save(tmp_path, Position(2, 20))
    DAMAGES[damage](tmp_path / file)
    before = contents(tmp_path)
    assert finding.scan(tmp_path)[0] == good
    assert (damage, file) == ("gone", "epoch_2.pt") or "Checkpoint skipped: " in caplog.text
    assert contents(tmp_path) == before


def test_a_renamed_checkpoint_is_refused_by_its_old_name(tmp_path):
    save(tmp_path, Position(1, 10))
    for suffix in (".pt", ".state"):
        (tmp_path / f"epoch_1{suffix}").rename(tmp_path / f"mine{suffix}")
    with pytest.raises(UsageError, match=r"mine\.state/step_10 belongs to epoch_1\.pt\. Undo the renaming"):
        ckpt.verify(tmp_path / "mine.pt")
    (tmp_path / "mine.state" / "step_10" / ckpt.CHECKSUMS).write_text("{}")
    with pytest.raises(UsageError, match="belongs to no checkpoint"):
        ckpt.verify(tmp_path / "mine.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "found list"),
        ({"state_dict": {}, "epoch": "three"}, "expected state_dict and epoch, found"),
        ({"epoch": 9}, "expected state_dict and epoch, found"),
        ({"epoch": 9, "state_dict": {}, "step": 7}, "is incomplete or unreadable"),
        (Path(), "expected only tensors and plain types, found other objects"),
    ],
)
def test_foreign_files_are_passed_over(tmp_path, caplog, content, message):
    good = save(tmp_path, Position(1, 10))
    torch.save(content, tmp_path / "epoch_9.pt")
    assert finding.scan(tmp_path)[0] == good
    assert message in caplog.text


@pytest.mark.parametrize("key", ["model", "loss", "optimizer", "num_samples", "seed", "global_batch"])
def test_another_runs_checkpoint_is_refused_by_name(tmp_path, key):
    checkpoint = ckpt.read(save(tmp_path, Position(1, 14, 4)))
    restoring.check_identity(checkpoint, IDENTITY, keeps_samples=False)
    with pytest.raises(UsageError, match=f"{key}: checkpoint {vars(IDENTITY)[key]}, run 77"):
        restoring.check_identity(checkpoint, RunIdentity(**{**vars(IDENTITY), key: 77}), keeps_samples=True)


def test_a_state_in_float64_makes_the_loss_float64_and_that_of_another_loss_is_refused(tmp_path):
    values = torch.full((2, 2), 0.1, dtype=torch.float64)
    wide, loss = SmallLoss(4, 0.0).double(), SmallLoss(4, 0.0)
    wide.table.write(torch.tensor([3, 4]), values, torch.ones(2, dtype=torch.bool))
    content = {"epoch": 1, "name": "run", "step": 10, "optimizer": {}, "state_dict": {}}
    checkpoint = ckpt.read(saving.save(tmp_path, "epoch_1", content, wide, Position(1, 10), IDENTITY))
    restoring.restore_loss(checkpoint, loss)
    assert torch.equal(loss.table.read(torch.tensor([3, 4])), values)
    for other, message in (
        (ContrastiveLoss(), r"state of \['table'\], expected \[\]"),
        (SmallLoss(5, 0.0), r"epoch_1\.pt has the state of a loss with different options"),
    ):
        with pytest.raises(UsageError, match=message):
            restoring.restore_loss(checkpoint, other)


def test_nodes_that_do_not_share_a_folder_are_told(tmp_path, monkeypatch):
    """If each node writes to its own disk, rank 0 does not find the other node's files, and the save must fail."""

    def with_another_node(value):
        _, results = value
        return [value, (None, [{"rank_0001.pt": "0"}] if results and isinstance(results[0], dict) else [])]

    monkeypatch.setattr(distributed, "all_gather_object", with_another_node)
    monkeypatch.setattr(time, "monotonic", itertools.count(step=1000).__next__)
    with pytest.raises(OSError, match=r"rank_0001\.pt from other nodes not found .* share one --logs folder"):
        save(tmp_path, Position(1, 10))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("killed_in", ["rmtree", "unlink"])
def test_a_removal_killed_at_any_moment_is_finished_at_the_next_start(tmp_path, monkeypatch, caplog, killed_in):
    def kill(*args, **kwargs):
        raise Killed

    good, other = save(tmp_path, Position(1, 10)), save(tmp_path, Position(0, 4, 4))
    before = {name for name in contents(tmp_path) if name.startswith(good.stem)}
    for removal in (lambda: saving.remove(other), lambda: saving.remove_leftovers(tmp_path)):
        with monkeypatch.context() as patched:
            patched.setattr(*((shutil, "rmtree") if killed_in == "rmtree" else (Path, "unlink")), kill)
            with pytest.raises(Killed):
                removal()
        assert finding.scan(tmp_path)[0] == good
    assert caplog.text == ""
    saving.remove_leftovers(tmp_path)
    assert set(contents(tmp_path)) == before


def test_the_state_of_a_renamed_model_file_stays(tmp_path, caplog):
    path = save(tmp_path, Position(1, 10))
    path.rename(tmp_path / "mine.pt")
    for killed in ("epoch_1.state/tmp_step_14", "epoch_2.state/tmp_step_20"):
        (tmp_path / killed).mkdir(parents=True)
    saving.remove_leftovers(tmp_path)
    assert not [*tmp_path.glob("*/tmp_*"), *tmp_path.glob("epoch_2*")]
    assert (
        "epoch_1.state has no epoch_1.pt next to it: if you renamed the checkpoint, undo it; if not, remove the folder"
        in caplog.text
    )
    (tmp_path / "mine.pt").rename(path)
    assert finding.scan(tmp_path)[0] == path
