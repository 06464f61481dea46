"""Two gloo ranks share one scan of the data, and decide together whether too many samples are bad."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from openclip_ext.data.manifest.find import find_or_create_manifest
from openclip_ext.data.manifest.manifest import Manifest
from openclip_ext.data.sources.source import BadDataError
from tests.data.loading import build, indices
from tests.data.shards import undecodable, write_shards
from tests.distributed.pool import two_ranks


def on_each_rank(folder: str) -> None:
    data, rank = Path(folder), dist.get_rank()
    only_master_scans_and_every_rank_hears_of_an_error(rank, data)
    ranks_add_up_their_bad_samples(data)
    ranks_draw_the_same_source(data)


def only_master_scans_and_every_rank_hears_of_an_error(rank: int, data: Path) -> None:
    with mock.patch.object(Manifest, "scan", Manifest.scan if rank == 0 else None):
        manifest = find_or_create_manifest(str(data / "good" / "*.tar"))
    assert manifest.num_samples == 40
    with pytest.raises(ValueError, match="no file matches"):
        find_or_create_manifest(str(data / "nothing" / "*.tar"))
    assert len(list((data / "good").glob("manifest*.json"))) == 1


def ranks_add_up_their_bad_samples(data: Path) -> None:
    """3 of 40 samples are bad. With a limit of 2, this is too many, although no rank alone finds more than 2."""
    shards = str(data / "bad" / "*.tar")
    for options in ({}, {"workers": 3, "batch_size": 6}):  # in the second case, each worker has only one batch
        tolerant = build(shards, rank=None, world_size=None, max_bad_fraction=0.075, **options)
        for epoch in range(2):
            found: list[list[int]] = [[], []]
            dist.all_gather_object(found, indices(list(tolerant.iterate(epoch))))
            assert len(found[0]) == len(found[1]) == (18 if options else 16 if epoch else 20)
            together = set(found[0] + found[1])
            assert len(together) >= 32 and {3, 15, 33}.isdisjoint(together)
        assert tolerant.bad.counts() == (3, 0)
    with pytest.raises(BadDataError, match="3 bad samples in this epoch of 40"):
        list(build(shards, rank=None, world_size=None, max_bad_fraction=0.05).iterate(0))


def ranks_draw_the_same_source(data: Path) -> None:
    """Source 0 has samples 0 to 19, of which two are bad, which are replaced by its other samples."""
    shards = f"{data}/bad/00000.tar::{data}/bad/00001.tar"
    loader = build(shards, rank=None, world_size=None, single_source=True, max_bad_fraction=0.1)
    for epoch in range(2):
        found: list[list[int]] = [[], []]
        dist.all_gather_object(found, indices(list(loader.iterate(epoch))))
        assert [index >= 20 for index in found[0]] == [index >= 20 for index in found[1]]
        assert {3, 15, 33}.isdisjoint({*found[0], *found[1]}) and len(found[0]) == 16
        assert loader.bad_counts() == (3, 0)


def test_two_ranks(tmp_path: Path):
    write_shards(tmp_path / "good", [20, 20])
    write_shards(tmp_path / "bad", [20, 20], {number: undecodable(number) for number in (3, 15, 33)})
    two_ranks().run(on_each_rank, str(tmp_path))


def stop_politely(data: str) -> None:
    """Read an epoch in a new process group, and ignore a SIGTERM to this group."""
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: None)
    batches = build(data, workers=2).iterate(0)
    next(batches)
    next(batches)
    os.killpg(0, signal.SIGTERM)
    assert len(list(batches)) == 13


def test_workers_outlive_a_signal_to_the_process_group(tmp_path: Path):
    """torchrun and SLURM send SIGTERM to the full process group. The training still needs its workers until it has saved."""
    write_shards(tmp_path, [60])
    process = mp.get_context("fork").Process(target=stop_politely, args=(str(tmp_path / "*.tar"),))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0
