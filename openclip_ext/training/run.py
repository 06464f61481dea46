"""A run of the training program, from the start of its processes to their end."""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from openclip_ext import compat, distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import say
from openclip_ext.data.loader.workers import WorkerError
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.losses.heads import read_heads, with_heads
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import checkpoint as ckpt
from openclip_ext.training.build import build_trainer
from openclip_ext.training.checkpoint import Checkpoint, Position, Start
from openclip_ext.training.checks import check, check_device
from openclip_ext.training.config import TrainingConfig, for_processes
from openclip_ext.training.model import BuiltModel, build_model, loading_line, with_loss_options
from openclip_ext.training.runtime import heartbeat, run_folder, signals
from openclip_ext.training.runtime.reporting import Reporter
from openclip_ext.training.trainer import SaveFailed, TrainingDiverged
from openclip_ext.training.validation import build_evaluators, run_evaluators


def run(config: TrainingConfig) -> None:
    """Do what :func:`openclip_ext.training.main.main` documents; importing this file takes seconds."""
    add_model_configs()
    signals.end_with_torchrun()
    compat.set_backends()
    check_device(config.device)
    processes = argparse.Namespace(**{**config.flags, "device": config.device or "cuda"})
    device = compat.init_device(processes)
    distributed.set_patience(distributed.START_PATIENCE)
    handlers = list(logging.root.handlers)
    try:
        date = distributed.broadcast_object(datetime.now().strftime("%Y_%m_%d-%H_%M_%S"))
        config = with_loss_options(for_processes(config, date, **vars(processes)))
        config = replace(config, loading=replace(config.loading, pin_memory=device.type == "cuda"))
        _refuse_other_flags(run_folder.settings(config.stored_flags, config.loss.options))
        check(config)
        with (
            heartbeat.watched(config.rank_patience),
            run_folder.opened(config.folder) as folder,
            run_folder.synchronised(config.folder),
        ):
            start = ckpt.find_start(config.resume, config.folder)
            built = build_model(config.model, device, config.loading.seed)
            if config.data is None:
                _evaluate_only(config, built, folder, start.checkpoint)
            else:
                _train(config, built, folder, start)
    except SystemExit:
        distributed.barrier()  # a launcher ends all processes when one has left, and the master may have files to copy
        raise
    except Exception as error:
        _log_failure(error, keep=handlers)
        raise
    finally:
        _close_log(keep=handlers)
        distributed.shutdown()


def _refuse_other_flags(own: Mapping[str, Any]) -> None:
    """Raise UsageError on all ranks if one was started with other flags; paths may be others on each node."""
    first, *others = distributed.all_gather_object(
        {name: value for name, value in own.items() if not (isinstance(value, str) and os.sep in value)}
    )
    for rank, flags in enumerate(others, start=1):
        differing = [f"{name} {flags.get(name)} ({first[name]})" for name in first if flags.get(name) != first[name]]
        if differing:
            told = f"rank {rank} was started with other flags than rank 0 (in brackets): {', '.join(differing)}"
            raise UsageError(f"{told}. Start all ranks with the same")


def _train(config: TrainingConfig, built: BuiltModel, folder: Path | None, start: Start) -> None:
    trainer = build_trainer(config, built, folder, start)
    has_steps_left = trainer.position.epoch < config.length.epochs
    try:
        trainer.fit(start.checkpoint is not None and ckpt.lacks_evaluation(folder, trainer.position))
    finally:
        trainer.reporter.close()
    if folder is not None and distributed.is_master() and has_steps_left:
        last = folder / "checkpoints" / f"epoch_{config.length.epochs}.pt"
        line = loading_line(config.model, built.model, folder, last)
        with contextlib.suppress(OSError):  # the run is saved, even if nobody reads this any more
            print(f"To load the model in stock OpenCLIP:\n  {line}", flush=True)  # the log's last words are of the run


def _evaluate_only(
    config: TrainingConfig, built: BuiltModel, folder: Path | None, checkpoint: Checkpoint | None
) -> None:
    """Measure the model (``--pretrained`` or ``--resume``) and end, as OpenCLIP does without training data."""
    evaluators = [item.evaluator for item in build_evaluators(config.evaluation, built, config.step)]
    position = Position()
    weights: str | Path | None = config.model.weights
    if checkpoint is not None:
        ckpt.load_model(built.model, checkpoint.model_file["state_dict"], checkpoint.path)
        position, weights = checkpoint.position, checkpoint.path
    if distributed.is_master():
        heads = read_heads(weights) if weights else None
        if not weights:
            logging.warning("Neither --train-data nor --pretrained nor --resume: this measures an untrained model.")
        metrics = run_evaluators(evaluators, with_heads(built.model, heads), must_succeed=True)
        reporter = Reporter(folder, config.reporting, 0, 0, config.stored_flags)
        reporter.evaluation(metrics, {"step": position.step, "epoch": position.epoch})
        reporter.close()
    distributed.barrier()


def _log_failure(error: Exception, keep: list[logging.Handler]) -> None:
    """Write into the run's log why it ended; the terminal gets it from whoever catches the error."""
    trace = None if isinstance(error, ValueError) else (type(error), error, error.__traceback__)
    record = logging.LogRecord("root", logging.ERROR, __file__, 0, f"The run ended: {error}", None, trace)
    logging.root.filter(record)
    for handler in logging.root.handlers:
        if handler not in keep and isinstance(handler, logging.FileHandler):
            handler.handle(record)


def _close_log(keep: list[logging.Handler]) -> None:
    """Leave logging as it was, so that ``main`` can be called again in the same process."""
    for handler in [handler for handler in logging.root.handlers if handler not in keep]:
        logging.root.removeHandler(handler)
        handler.close()


def program(config: TrainingConfig) -> None:
    """Run with messages for errors that a user can mend, not tracebacks; exit status 2 for a wrong command line, else 1."""
    try:
        run(config)
    except (BadDataError, WorkerError, TrainingDiverged, SaveFailed) as error:
        say(f"error: {error}", sys.stderr)
        raise SystemExit(1) from error
    except RuntimeError as error:
        if not distributed.is_lost_peer(error) or config.folder.debug:
            raise
        print(
            "error: another rank has ended, and says why; --resume latest goes on from the last checkpoint",
            file=sys.stderr,
        )
        raise SystemExit(1) from error
    except (ValueError, FileNotFoundError) as error:
        if not isinstance(error, UsageError) and config.folder.debug:
            raise
        say(f"error: {error}", sys.stderr)
        raise SystemExit(2) from error
