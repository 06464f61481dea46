"""A run of the training program: connect the processes, plan and check the run, build its parts, and train."""

import argparse
import contextlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from openclip_ext import compat, distributed
from openclip_ext.checkpoint.format import MIX_FILE, MIX_SCORES_FILE, Position
from openclip_ext.cli.errors import UsageError, one_line
from openclip_ext.cli.messages import echo, get_logger
from openclip_ext.data.loader.workers import WorkerError
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import model as models
from openclip_ext.training import parallel
from openclip_ext.training.build import build
from openclip_ext.training.checkpoint import restoring
from openclip_ext.training.checkpoint.finding import Start, find_start
from openclip_ext.training.checks import check, check_device
from openclip_ext.training.config import Config, RunPlan
from openclip_ext.training.plan import ONE_PROCESS, plan_run
from openclip_ext.training.runtime import heartbeat, run_folder, signals
from openclip_ext.training.runtime.reporting import Reporter
from openclip_ext.training.trainer import SaveFailed, Trainer, TrainingDiverged

if TYPE_CHECKING:
    from openclip_ext.training.interpolation import Mixes

logger = get_logger(__name__)

# Flags that may differ between the ranks.
_DIFFERING_FLAGS = {"rank", "local_rank", "device", "logs", "debug"}
# Flags with paths, which may differ between nodes.
_PATH_FLAGS = {
    *(
        "train_data",
        "val_data",
        "keep_data",
        "val_classes",
        "keep_tasks",
        "imagenet_val",
        "imagenet_v2",
        "eval_data_dir",
    ),
    *("manifest", "reference", "image_features", "cache_dir"),
    *("resume", "log_path", "checkpoint_path", "tensorboard_path"),
}


def run(config: Config) -> None:
    """Run a configuration. For errors, see :func:`openclip_ext.training.main.main`."""
    add_model_configs()
    signals.end_with_torchrun()
    compat.set_backends()
    check_device(config.flags["device"])
    number = 1 if config.flags.get("dist_url") else distributed.check_launcher()
    if number > 1 and os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "0":
        echo(f"Waiting for {number} processes to connect to {os.environ['MASTER_ADDR']} ...", sys.stderr)
    processes = argparse.Namespace(**{**config.flags, "device": config.flags["device"] or "cuda"})
    device = _connect(processes)
    distributed.set_timeout(distributed.START_TIMEOUT)
    handlers = list(logging.root.handlers)
    try:
        date = distributed.broadcast_object(datetime.now().strftime("%Y_%m_%d-%H_%M_%S"))
        connected = {name: value for name, value in vars(processes).items() if value != config.flags.get(name)}
        plan = plan_run(config, ONE_PROCESS | connected | {"device": str(device)}, date)
        _refuse_other_flags({**plan.stored_flags, **plan.loss.options})
        with heartbeat.watched(plan.rank_patience):
            check(plan)
            with run_folder.opened(plan.folder) as folder, run_folder.synchronized(plan.folder):
                start = find_start(plan.resume, plan.folder)
                if plan.data is None:
                    _evaluate_only(plan, device, folder, start)
                elif plan.dry_run:
                    from openclip_ext.training.dry_run import dry_run

                    found = dry_run(plan, build(config, plan, device, folder, start))
                    echo(found) if distributed.is_rank0() else None
                else:
                    _train(plan, build(config, plan, device, folder, start), folder, start)
    except SystemExit:
        distributed.barrier()  # when one process exits, launchers kill all processes, but rank 0 may still be copying files
        raise
    except Exception as error:
        _log_failure(error, keep=handlers)
        raise
    finally:
        # Remove this run's handlers, because ``main`` may be called again in the same process.
        for handler in [handler for handler in logging.root.handlers if handler not in handlers]:
            logging.root.removeHandler(handler)
            handler.close()
        distributed.shutdown()


def _connect(processes: argparse.Namespace) -> torch.device:
    """Connect the processes and return the device. Raise UsageError if the port is in use, or the ranks do not connect."""
    try:
        return compat.init_device(processes)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if "EADDRINUSE" in str(error):
            raise UsageError(f"MASTER_PORT {port} is in use: set another port, the same for all ranks") from error
        raise UsageError(
            f"the ranks do not connect to MASTER_ADDR {address}, MASTER_PORT {port} ({one_line(error)}): check both, and "
            "start WORLD_SIZE ranks"
        ) from error


def _refuse_other_flags(own: Mapping[str, Any]) -> None:
    """Raise UsageError on all ranks if a rank's flags differ from rank 0's. Paths may differ between nodes. Collective."""
    compared = {name: _compared(name, value) for name, value in sorted(own.items()) if name not in _DIFFERING_FLAGS}
    first, *others = distributed.all_gather_object(compared)
    for rank, flags in enumerate(others, start=1):
        differing = [f"{name} {flags.get(name)} ({first[name]})" for name in first if flags.get(name) != first[name]]
        if differing:
            raise UsageError(f"give rank {rank} the flags of rank 0 (in parentheses): {', '.join(differing)}")


def _compared(name: str, value: Any) -> Any:
    """Return what must be equal on all ranks: a flag's value, or PATH if the value is a path."""
    is_path = name in _PATH_FLAGS and value not in (None, "", "latest")
    is_file = name == "pretrained" and os.path.exists(value or "")  # otherwise it is a tag
    is_folder = name == "model" and value.startswith("local-dir:")
    return "PATH" if is_path or is_file or is_folder else value


def _train(plan: RunPlan, trainer: Trainer, folder: Path | None, start: Start) -> None:
    """Train to the last epoch, compare the result with the pretrained model, if any, and print how to load it."""
    has_steps_left = trainer.position.epoch < plan.length.epochs
    is_mixed = _is_mixed(plan, trainer)
    try:
        lacks = distributed.on_rank0(lambda: restoring.lacks_evaluation(folder, trainer.position))
        # A pretrained model is also scored before the first step.
        is_due = is_mixed if trainer.position.epoch == 0 else start.checkpoint is not None
        trainer.fit(evaluate_first=is_due and lacks)
        lacks_mix = distributed.on_rank0(lambda: folder is not None and _lacks_mix(folder, plan.tuning.keep_at_least))
        mixes = _mix(plan, trainer, folder) if is_mixed and (has_steps_left or lacks_mix) else None
        if is_mixed and mixes is None and not lacks_mix and folder is not None:
            logger.info(f"The mix is already chosen. To score the mixes again, remove {folder / MIX_SCORES_FILE}.")
    finally:
        trainer.reporter.close()
    if folder is not None and distributed.is_rank0() and (has_steps_left or mixes is not None):
        last = folder / "checkpoints" / f"epoch_{plan.length.epochs}.pt"
        chosen = last if mixes is None else folder / MIX_FILE
        line = models.loading_line(plan.model, parallel.unwrap(trainer.model), folder, chosen)
        exporting = (
            f"openclip-ext export {shlex.quote(str(chosen))} --output {shlex.quote(f'{plan.folder.name}-exported')}"
        )
        with contextlib.suppress(OSError):  # the user may have closed the terminal
            print(f"To load the model in stock OpenCLIP:\n  {line}", flush=True)
            if mixes is not None:
                print(f"To export it:\n  {exporting}", flush=True)


def _is_mixed(plan: RunPlan, trainer: Trainer) -> bool:
    """Return whether the run compares and mixes its weights with pretrained weights."""
    evaluation = plan.evaluation
    is_scored = evaluation.val_data or evaluation.class_data or evaluation.scores_kept or evaluation.kept_tasks
    is_wanted = plan.tuning.is_compared and bool(plan.model.weights and is_scored) and evaluation.val_every > 0
    return is_wanted and trainer.loss.model_head() is None  # heads have no initial weights


def _lacks_mix(folder: Path, at_least: float) -> bool:
    """Return whether a run has not chosen a mix that keeps this share of the initial model's score."""
    try:
        return json.loads((folder / MIX_SCORES_FILE).read_text()).get("keep_at_least") != at_least
    except FileNotFoundError:
        return True


def _mix(plan: RunPlan, trainer: Trainer, folder: Path | None) -> "Mixes | None":
    """Choose the mix of pretrained and trained weights on rank 0, and log the scores. Collective: all ranks call it.

    If the evaluation fails, log the error and return None, because the trained model is already saved.

    Raises:
        SaveFailed: The mix could not be written.
    """
    from openclip_ext.evaluation.mixes import refuse_other_weights
    from openclip_ext.training.interpolation import score_mixes
    from openclip_ext.training.validation import ScoredTask

    mixes = None
    content = trainer.model_file()
    if distributed.is_rank0():
        tasks = [scheduled for scheduled in trainer.tasks if isinstance(scheduled.task, ScoredTask)]
        logger.info("Scoring mixes of the pretrained and the trained weights ...")
        try:
            refuse_other_weights(plan.model.weights, trainer.identity.settings["pretrained_weights"])
            device = trainer.step.settings.device
            mixes = score_mixes(tasks, plan.model, content, plan.tuning.keep_at_least, device)
            logger.info(f"Before and after:\n{mixes}")
        except Exception:
            logger.exception("The mixes of weights could not be scored; the trained model is saved.")
    try:
        distributed.on_rank0(lambda: mixes.save(folder) if mixes is not None and folder is not None else None)
    except OSError as error:
        raise SaveFailed(
            f"the chosen mix could not be saved: {error}. Free disk space, then --resume latest"
        ) from error
    return mixes


def _evaluate_only(plan: RunPlan, device: torch.device, folder: Path | None, start: Start) -> None:
    """Evaluate the model of ``--pretrained`` or ``--resume``, because there is no training data. OpenCLIP does the same."""
    from openclip_ext.losses.heads import read_heads, with_heads
    from openclip_ext.training.validation import build_tasks, run_tasks

    built = models.build_model(plan.model, device, plan.loading.seed)
    tasks = build_tasks(plan.evaluation, built, plan.step)
    position = Position()
    weights: str | Path | None = plan.model.weights
    if (checkpoint := start.checkpoint) is not None:
        restoring.load_model(built.model, checkpoint.model_file["state_dict"], checkpoint.path)
        position, weights = checkpoint.position, checkpoint.path
    if distributed.is_rank0():
        heads = read_heads(weights) if weights else None
        if not weights:
            logger.warning("The evaluated model is untrained: give its weights with --pretrained or --resume.")
        metrics = run_tasks(tasks, with_heads(built.model, heads), must_succeed=True)
        reporter = Reporter(folder, plan.reporting, position.step, 0, 0, plan.stored_flags)
        reporter.evaluation(metrics, {"step": position.step, "epoch": position.epoch})
        reporter.close()
    distributed.barrier()


def _log_failure(error: Exception, keep: list[logging.Handler]) -> None:
    """Write an error only to the run's log file, because the caller prints it to the terminal."""
    trace = None if isinstance(error, ValueError) else (type(error), error, error.__traceback__)
    record = logging.LogRecord("root", logging.ERROR, __file__, 0, f"The run ended: {error}", None, trace)
    for handler in logging.root.handlers:
        if handler not in keep and isinstance(handler, logging.FileHandler):
            handler.handle(record)


def program(config: Config) -> None:
    """Run a configuration. For errors that the user can fix, print a message instead of a traceback.

    The exit status is 2 for errors of the command line and its files, and 1 for errors during training.
    """
    try:
        run(config)
    except (BadDataError, WorkerError, TrainingDiverged, SaveFailed) as error:
        echo(f"error: {error}", sys.stderr)
        raise SystemExit(1) from error
    except RuntimeError as error:
        if not distributed.is_lost_peer(error) or config.flags["debug"]:
            raise
        echo(
            "error: another rank failed; see its error. --resume latest continues from the last checkpoint", sys.stderr
        )
        raise SystemExit(1) from error
    except (ValueError, FileNotFoundError) as error:
        if not isinstance(error, UsageError) and config.flags["debug"]:
            raise
        echo(f"error: {error}", sys.stderr)
        raise SystemExit(2) from error
