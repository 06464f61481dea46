"""Evaluation commands in a clone, such as ``python -m eval.datacomp``. The code is in :mod:`openclip_ext.evaluation`."""
