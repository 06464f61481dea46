"""Find the best loss for your data, by short training runs. All losses are tuned equally.

``config`` reads the command line, and ``data`` decodes the samples. ``plan`` chooses the number and length of runs, and
``runs`` orders them. ``process_pool`` or ``slurm_pool`` executes each run with ``short_run``. ``report`` writes the result.
"""
