"""Reading training and evaluation data."""

from openclip_ext.data.indexed import unique_index, with_index

__all__ = ["unique_index", "with_index"]
