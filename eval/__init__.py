"""Commands of a clone, each a few lines on :mod:`openclip_ext.evaluation`: ``python -m eval.datacomp``, and so on."""
