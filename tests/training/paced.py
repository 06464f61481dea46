"""Run the training program slowly, so that a test can interrupt it: ``python paced.py -m openclip_ext.training.main FLAGS``.

Environment:
    NOTES: folder in which each rank records the signals it received and the sample indices of its steps.
    HOLD_AT: number of steps after which every rank waits for a signal. Only the first launch (in an array, of job 1) waits.
    HOLD_WORLD: number of ranks. If this is set, every launch with this number of ranks waits, not only the first launch.
    PACE: seconds of sleep added to each step (default: 0).
"""

import functools
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path


def note(**what) -> None:
    from openclip_ext import distributed

    folder = Path(os.environ["NOTES"])
    folder.mkdir(parents=True, exist_ok=True)
    rank, world_size = distributed.rank(), distributed.world_size()
    with open(folder / f"{STARTED}-{rank}.jsonl", "a") as file:
        file.write(json.dumps({"started": STARTED, "rank": rank, "world_size": world_size, **what}) + "\n")


def read_notes(folder: Path) -> list[dict]:
    """Return the records of all ranks and launches, in the order of the launches."""
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def slow_down() -> None:
    from openclip_ext.training import trainer
    from openclip_ext.training.step import TrainStep

    class PacedRequests(trainer.SignalRequests):
        steps, is_asked = 0, False

        def __enter__(self):
            super().__enter__()
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, functools.partial(self.hear, signal.getsignal(number)))
            return self

        def hear(self, handle, number, frame):
            note(signal=signal.Signals(number).name)
            self.is_asked = True
            handle(number, frame)

        def poll_ranks(self, now=False):
            self.steps += 1
            time.sleep(float(os.environ.get("PACE", "0")))
            deadline = time.monotonic() + 100
            while is_held(self.steps) and not self.is_asked and time.monotonic() < deadline:
                time.sleep(0.05)
            return super().poll_ranks(now)

    def step(self, batches, number=0, take=TrainStep.__call__):
        terms = take(self, batches, number)
        note(step=number, samples=[index for batch in batches for index in batch["index"].tolist()])
        return terms

    trainer.SignalRequests = PacedRequests
    TrainStep.__call__ = step


def is_held(steps: int) -> bool:
    world_size = os.environ.get("HOLD_WORLD")
    first_start = {"SLURM_RESTART_COUNT": "0", "SLURM_ARRAY_TASK_ID": "1"}
    wanted = {"WORLD_SIZE": world_size} if world_size else first_start
    is_wanted = all(os.environ.get(name, value) == value for name, value in wanted.items())
    return is_wanted and steps == int(os.environ.get("HOLD_AT", "0"))


if __name__ == "__main__":
    STARTED = time.time()
    # OpenCLIP would import an installed transformers package. This takes over a second, and the README does not install it.
    sys.modules["transformers"] = None
    module, *arguments = (word for word in sys.argv[1:] if word not in ("-u", "-m"))
    if module == "openclip_ext.training.main":
        import open_clip

        open_clip.add_model_config(Path(__file__).with_name("small-vit.json"))
        slow_down()
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
