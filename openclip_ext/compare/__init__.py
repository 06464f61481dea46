"""Find the best loss for your data, by short training runs. All losses are tuned equally.

``config`` reads the command line, and ``data`` decodes the samples. ``plan`` chooses the number and length of runs, ``trials``
is the table of the runs and their states, ``pool`` executes each run (a ``trial``), and ``report`` writes the result.
"""
