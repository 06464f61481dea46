"""The demo set: images of colored shapes with captions. A sample is a pure function of (seed, split, index).

``python -m openclip_ext.data.shapes --output DIR --num-samples N`` writes it as WebDataset. :mod:`.scene` samples scenes and
captions, :mod:`.render` draws the images, and :mod:`.write` writes the shards.
"""
