"""Evaluation commands to run from a clone, such as ``python -m eval.datacomp``; see :mod:`openclip_ext.evaluation`."""
