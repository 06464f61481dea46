"""Find the loss that gains the most on your data, by short trainings that are tuned equally.

``config`` reads the command line and ``data`` decodes the samples. ``plan`` decides what is tried in the time, and ``runs``
which runs come next, and stores a row for each. ``process_pool`` executes them, each a ``short_run``. ``report`` writes the
result.
"""
