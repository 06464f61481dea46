"""Evaluation commands of a clone, such as ``python -m eval.datacomp``; the code is in :mod:`openclip_ext.evaluation`."""
