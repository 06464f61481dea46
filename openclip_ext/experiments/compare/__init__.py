"""Which loss brings the most on one's own data, model and batch size: pilot runs, equally tuned, and a report.

    openclip-ext compare 'data/{00000..00010}.tar' --val 'data/val-{0..1}.tar' --model ViT-B-32 --batch-size 256 --minutes 30

``config.py`` reads the command line; ``comparison.py`` says what is done in which order: ``data.py`` decodes the data,
``space.py`` says what is tried and ``plan.py`` for how long, ``pilot.py`` trains and scores a run, ``report.py`` writes the
result.
"""
