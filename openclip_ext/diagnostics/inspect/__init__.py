"""Inspect the training data of a finished or running training: the data microscope.

It finds duplicates, likely false negatives, captions that fit no image, images that fit no caption, and the hardest and the
easiest samples. It counts them, lists them with index, shard and key, shows them on a page with thumbnails, and leaves them
out of further training on request. :data:`openclip_ext.diagnostics.inspect.findings.DEFINITIONS` and ``docs/inspect.md``
define the categories::

    openclip-ext inspect LOGS/NAME --leave-out duplicates,misfits --write-manifest fewer.json
"""
