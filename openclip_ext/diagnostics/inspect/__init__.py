"""The data microscope: what a finished or running training shows about its data.

Duplicates, likely false negatives, captions that fit no image, images that fit no caption, the hardest and the easiest
samples: counted, listed with index, shard and key, shown on a page with thumbnails, and left out of further training on
request. Definitions: :data:`openclip_ext.diagnostics.inspect.findings.DEFINITIONS`; ``docs/inspect.md``::

    openclip-ext inspect LOGS/NAME --leave-out duplicates,misfits --write-manifest fewer.json
"""
