"""Run lists of trainings in several processes, resume them, and compare their losses.

``runs.py`` defines a run and decides which runs come next: all settings of each family with the first seed, then the best
setting with the other seeds. ``workers.py`` executes the runs and ``results.py`` stores a row for each. ``pilot.py`` performs
one run with the trainer's parts, on data that ``cache.py`` has decoded. ``statistics.py`` computes paired differences and
their intervals.

Two programs use these modules. A grid reads its runs from a file (``python -m openclip_ext.experiments.grid``; ``.tables``
prints its results). ``openclip-ext compare`` plans the runs itself and writes a report (``compare/``).
"""
