"""What ``openclip-ext compare`` does, in order."""

import time

from openclip_ext.data.source import BadDataError
from openclip_ext.diagnostics.compare.comparison import Comparison, refuse_other_flags
from openclip_ext.diagnostics.compare.config import parse
from openclip_ext.diagnostics.compare.prepare import cache_folder, prepare
from openclip_ext.diagnostics.compare.samples import DoesNotFit, remove_others
from openclip_ext.diagnostics.compare.workers import Deadline, ResultsFile


def main(argv: list[str]) -> None:
    """Compare losses and write the report.

    Raises:
        ValueError: a wrong command line, or data that do not fit it.
        SystemExit: with 130 after a signal and a report of what is finished.
    """
    started = time.monotonic() - time.process_time()  # with the imports before
    config, training, loss_options = parse(argv)
    deadline = Deadline(config.minutes, started)
    results = ResultsFile(config.output / "runs.jsonl")  # first: nobody else may write to the cache, either
    try:
        refuse_other_flags(config, training, loss_options)  # before the data are decoded
        data = prepare(config, training, loss_options)
        comparison = Comparison(config, data.pilot, data.notes, results, deadline)
        remove_others(cache_folder(config.output), data.caches)  # now that these are known to be meant
        stopped = comparison.run()
        comparison.write_report()
    except (BadDataError, DoesNotFit) as error:
        raise ValueError(str(error)) from error
    finally:
        results.close()
    if stopped:
        print("stopped; the same command goes on from here")
        raise SystemExit(130)
