"""Find the loss that gains the most on the user's data, model and batch size, by equally tuned pilot runs.

    openclip-ext compare 'data/{00000..00010}.tar' --val 'data/val-{0..1}.tar' --model ViT-B-32 --batch-size 256 --minutes 30

``config.py`` reads the command line, and ``comparison.py`` performs the comparison: ``data.py`` decodes the data, ``space.py``
lists the settings to try, ``plan.py`` decides the length of the runs, ``pilot.py`` trains and scores a run, and ``report.py``
writes the result.
"""
