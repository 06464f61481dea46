"""Tables on the host, in memory or in a file: bit for bit the one with the model, and free where nobody wrote."""

import concurrent.futures
import contextlib
import copy
import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.losses.registry import create_loss
from openclip_ext.state import host_table
from openclip_ext.state.host_table import HostTable, decode, encode, recode
from openclip_ext.state.sharded_table import ShardedTable
from tests.devices import on_each_device
from tests.distributed.pool import two_ranks
from tests.losses.cases import CASES, Step, make_steps, run_step

WITH_TABLES = ["sogclr", "fastclip-v0", "fastclip", "isogclr", "fastclip-v2", "tempnet", "sogclr-views"]
STEPS = 7


def memory_in_use() -> int:
    """Resident bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def steps(number: int = STEPS) -> list[Step]:
    """With duplicates (see ``make_steps``), samples that come back, and one that does not count."""
    made = make_steps(number)
    made[2].images[1, 3] = float("nan")
    return made


def assert_equal_state(actual: ContrastiveLoss, expected: ContrastiveLoss) -> None:
    torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=0, atol=0, equal_nan=True)


def train(loss: ContrastiveLoss, batches: list[Step], dtype: torch.dtype, prefetch: bool = False) -> list[torch.Tensor]:
    results = []
    for step in batches:
        if prefetch:
            loss.prefetch(torch.tensor(step.index))
        value, gradients = run_step(loss, step, dtype)
        results += [value, *gradients]
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_value_comes_back_and_none_reads_as_never_written(dtype: torch.dtype) -> None:
    special = [1.0, -1.5, float("inf"), float("-inf"), 1e-40, -1e-45, 3e38, -0.0]
    values = torch.cat([torch.tensor(special, dtype=dtype), torch.randn(1000).to(dtype)])
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    assert torch.equal(decode(encode(values)).view(integer), values.view(integer))
    zero = torch.zeros(3, dtype=dtype)
    assert torch.equal(decode(encode(zero)), zero)
    assert torch.isnan(decode(zero)).all()
    assert torch.equal(encode(torch.full((3,), float("nan"), dtype=dtype)).view(integer), zero.view(integer))


def test_precision_changes_and_what_is_missing_stays_missing() -> None:
    values = torch.tensor([0.1, float("nan"), -3.0])
    wide = recode(encode(values), torch.float64)
    assert torch.equal(decode(wide)[[0, 2]], values.double()[[0, 2]])
    assert wide[1] == 0
    assert torch.equal(recode(wide, torch.float32), encode(values))
    underflowing = encode(torch.tensor([1e-300], dtype=torch.float64))
    assert decode(recode(underflowing, torch.float32)) == 0


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", ["memory", "file"])
@pytest.mark.parametrize("name", WITH_TABLES)
def test_the_loss_is_bitwise_the_same(
    name: str, place: str, dtype: torch.dtype, prefetch: bool, tmp_path: Path
) -> None:
    options = {"state_device": "cpu"} if place == "memory" else {"state_dir": str(tmp_path)}
    loss, expected = CASES[name].create(**options), CASES[name].create(state_device="model")
    assert all(table.host is not None for table in loss.tables().values())
    results = (train(each, steps(), dtype, prefetch) for each in (loss, expected))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert_equal_state(loss, expected)
    step = steps()[0]
    inputs = step.images.to(dtype), step.texts.to(dtype), torch.tensor(9.0), torch.tensor(step.index)
    for ours, theirs in zip(loss.log_normalizers(*inputs), expected.log_normalizers(*inputs), strict=True):
        assert torch.equal(ours, theirs)
    loss.pop_nonfinite()  # nothing was foreign


@pytest.mark.parametrize("name", ["fastclip", "fastclip-v2"])
def test_states_go_from_one_place_to_the_other_and_copies_are_independent(name: str) -> None:
    host, model = CASES[name].create(state_device="cpu"), CASES[name].create(state_device="model")
    train(host, steps()[:4], torch.float64)
    model.load_state_dict(host.state_dict())
    back = CASES[name].create(state_device="cpu")
    back.load_state_dict(model.state_dict())
    twin = copy.deepcopy(host)
    for other in (model, back, twin):
        assert_equal_state(other, host)
    before = copy.deepcopy(host.state_dict())
    train(twin, steps()[4:], torch.float64)
    torch.testing.assert_close(host.state_dict(), before, rtol=0, atol=0, equal_nan=True)
    expected = train(host, steps()[4:], torch.float64)
    for other in (model, back):
        for ours, theirs in zip(train(other, steps()[4:], torch.float64), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert_equal_state(twin, host)


def test_a_prefetch_of_other_samples_changes_nothing() -> None:
    table, expected = ShardedTable(2, 20, "cpu"), ShardedTable(2, 20, "model")
    everywhere, values = torch.ones(3, dtype=torch.bool), torch.arange(6.0).view(2, 3)
    for each in (table, expected):
        each.write(torch.tensor([3, 17, 5]), values, everywhere)
    for told, asked in (([3, 17], [3, 17]), ([3, 17], [17, 5]), ([3, 17], [3, 17, 5]), ([3, 99], [99, 3])):
        table.prefetch(torch.tensor(told))
        read, wanted = (each.read(torch.tensor(asked)) for each in (table, expected))
        assert torch.equal(read.nan_to_num(-1), wanted.nan_to_num(-1))
    table.prefetch(torch.tensor([3]))
    table.write(torch.tensor([3]), torch.tensor([[7.0], [8.0]]), everywhere[:1])
    assert table.read(torch.tensor([3])).tolist() == [[7.0], [8.0]]
    assert not table.foreign


def test_a_read_waits_for_writes_of_its_own_samples_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a write comes when the device has computed it, up to a whole step later."""
    computed = threading.Event()
    monkeypatch.setattr(host_table, "_on_host", lambda *tensors: (computed.wait, list(tensors)))
    table, index = ShardedTable(1, 20, "cpu"), torch.tensor([3, 4])
    table.keep_overwritten()
    table.prefetch(index)
    table.write(index, torch.tensor([[1.0, 2.0]]), torch.ones(2, dtype=torch.bool))
    table.take_back(unless=torch.tensor(True))
    table.prefetch(torch.tensor([5, 6]))
    assert table._fetched.rows.result(timeout=60).tolist() == [[0.0], [0.0]]
    table.prefetch(torch.tensor([6, 4]))
    with pytest.raises(concurrent.futures.TimeoutError):
        table._fetched.rows.result(timeout=0.1)
    computed.set()
    assert table._fetched.rows.result(timeout=60).tolist() == [[0.0], [2.0]]


@pytest.mark.parametrize("unless", [None, True, False])
@pytest.mark.parametrize("place", ["model", "cpu"])
def test_a_write_can_be_taken_back(place: str, unless: bool | None) -> None:
    table, everything = ShardedTable(2, 20, place), torch.arange(20)

    def write(index: list[int], values: list[float]) -> torch.Tensor:
        table.write(torch.tensor(index), torch.tensor([values, values]), torch.ones(len(index), dtype=torch.bool))
        return table.read(everything)

    before = write([3, 5], [1.0, 2.0])
    table.keep_overwritten()
    after = write([3, 3, 7], [5.0, 5.0, 6.0])
    table.take_back(None if unless is None else torch.tensor(unless))
    left = table.read(everything)
    assert torch.equal(left.nan_to_num(777), (after if unless else before).nan_to_num(777))
    table.take_back()  # there is nothing more to take back
    assert torch.equal(table.read(everything).nan_to_num(777), left.nan_to_num(777))
    assert torch.equal(after[:, 7], torch.tensor([6.0, 6.0]))


def test_what_fails_in_the_background_is_raised() -> None:
    rows = HostTable(4, 2, torch.float32)
    rows.scatter(torch.tensor([9]), torch.zeros(1, 2))
    later = rows.gather(torch.tensor([0]))
    for wait in (later.result, rows.finish, lambda: rows.stored):
        with pytest.raises(IndexError):
            wait()


@pytest.mark.parametrize("place", ["memory", "file"])
def test_what_nobody_wrote_takes_no_memory(place: str, tmp_path: Path) -> None:
    before = memory_in_use()
    table = ShardedTable(2, 100_000_000, "cpu", str(tmp_path) if place == "file" else None)
    index = torch.arange(0, 100_000_000, 1_000_000)
    table.write(index, torch.ones(2, len(index)), torch.ones(len(index), dtype=torch.bool))
    assert bool((table.read(index) == 1).all())
    assert torch.isnan(table.read(index + 500_000)).all()
    assert table.nbytes == 800_000_000
    # Large pages of 2 MiB may be behind each of the 200 places that were looked at.
    assert memory_in_use() - before < 450_000_000


def test_large_tables_go_to_the_host_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openclip_ext.state.sharded_table._LARGEST_ON_DEVICE", 2 * 4 * 21)
    small, large = (create_loss("fastclip", num_samples=number) for number in (20, 21))
    assert (small.state_size().on_host, small.state_size().with_model) == (0, 160)
    assert (large.state_size().on_host, large.state_size().with_model) == (168, 0)


def test_a_folder_without_room_or_beside_the_models_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(host_table.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(OSError, match=r"0.0 GiB free, the per-sample state of 2 process\(es\) grows to 0.1 GiB"):
        create_loss("fastclip", num_samples=10_000_000, state_dir=str(tmp_path))
    with pytest.raises(ValueError, match="contradict each other"):
        create_loss("fastclip", num_samples=20, state_dir=str(tmp_path), state_device="model")


def test_room_for_the_whole_table_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        assert (start, size) == (0, 168)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(host_table.os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"has no 0.0 GiB for the per-sample state \(No space left on device\)"):
        create_loss("fastclip", num_samples=20, state_dir=str(tmp_path))


def differing_losses() -> list[str]:
    """On each of two ranks, the losses for which a table on the host is not the one with the model."""
    own = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    batches = [Step(s.images[own], s.texts[own], s.logit_scale, s.index[own], s.epoch) for s in steps()]
    found, fetched, fetch = [], [], ShardedTable._fetch
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ShardedTable, "_fetch", lambda *args: fetched.append(len(args[-1])) or fetch(*args))
        for name in ("fastclip", "fastclip-v2", "sogclr-views"):
            model, host = (CASES[name].create(state_device=place) for place in ("model", "cpu"))
            expected, results = (train(loss, batches, torch.float32, prefetch=True) for loss in (model, host))
            assert_equal_state(host, model)
            # What was prefetched was what was read: nothing was fetched a second time.
            assert fetched == [6 * host.views] * STEPS * len(host.tables())
            fetched.clear()
            if not all(torch.equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True)):
                found.append(name)
    return found


def test_two_ranks_are_bitwise_the_same_too() -> None:
    assert two_ranks().run(differing_losses) == [[], []]


@on_each_device
def test_a_model_on_a_gpu_reads_and_writes_the_hosts_table(device: torch.device) -> None:
    host, model = (CASES["fastclip-v2"].create(state_device=place).to(device) for place in ("cpu", "model"))
    for number, step in enumerate(make_steps(STEPS)):
        index = torch.tensor(step.index)
        if number % 2:
            host.prefetch(index)
        results = []
        for loss in (host, model):
            loss.start_epoch(step.epoch)
            features = [side.float().to(device).requires_grad_() for side in (step.images, step.texts)]
            value = loss(*features, torch.tensor(step.logit_scale, device=device), index=index)
            results.append([value.detach(), *torch.autograd.grad(value, features)])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    ours, theirs = (loss.normalizer.table.read(torch.arange(20, device=device)) for loss in (host, model))
    assert torch.equal(ours.nan_to_num(777), theirs.nan_to_num(777))
    host.prefetch(index.flip(0))
    host(*features, torch.tensor(9.0, device=device), index=index)
    # On the CPU other samples than were told are seen at once, and read.
    with pytest.raises(ValueError, match="another index") if device.type == "cuda" else contextlib.nullcontext():
        host.pop_nonfinite()
