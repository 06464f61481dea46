"""The demo set: images of colored shapes with captions. A sample depends only on (seed, split, index).

``python -m openclip_ext.data.shapes --output DIR --num-samples N`` writes the set as WebDataset shards. :mod:`.scene` samples
scenes and captions, :mod:`.render` draws the images, and :mod:`.write` writes the shards.
"""
