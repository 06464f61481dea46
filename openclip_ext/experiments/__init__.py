"""Lists of training runs, executed resumably by several processes, and the differences between their losses.

``runs.py`` says what a run is and which runs come next: of each family all settings with the first seed, then the best with
the others. ``workers.py`` executes them, ``results.py`` keeps a row of each. ``pilot.py`` puts the trainer's parts together
for one run on data that ``cache.py`` holds decoded. ``statistics.py`` has paired differences with their intervals.

Two programs stand on this: a grid, whose runs a file lists (``python -m openclip_ext.experiments.grid``, and ``.tables`` for
its results), and ``openclip-ext compare``, which plans the runs itself and writes a report (``compare/``).
"""
