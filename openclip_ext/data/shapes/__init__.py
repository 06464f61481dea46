"""The demo set: images of colored shapes with captions, made on the machine, one pure function of (seed, split, index).

``python -m openclip_ext.data.shapes --output DIR --num-samples N`` writes it as WebDataset; :mod:`.scene` says what there
is to see and how it is put into words, :mod:`.render` draws it and :mod:`.write` makes the shards.
"""
