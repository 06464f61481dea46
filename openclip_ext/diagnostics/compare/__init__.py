"""Which loss brings the most on one's own data, model and batch size: pilot runs, equally tuned, and a report.

    openclip-ext compare 'data/{00000..00010}.tar' --val 'data/val-{0..1}.tar' --model ViT-B-32 --batch-size 256 --minutes 30

``command.py`` says what is done in which order. ``config.py`` reads the command line; ``prepare.py`` decodes the data into
what ``samples.py`` holds; ``space.py`` says what is tried and ``design.py`` for how long; ``comparison.py`` has ``workers.py``
do it, where ``pilot.py`` trains a run; ``statistics.py`` compares them; ``report.py`` and ``page.py`` write the result.
"""
