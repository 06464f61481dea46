"""``python -m eval.beyond``: see :mod:`openclip_ext.evaluation.beyond`."""

from openclip_ext.evaluation.beyond import main

if __name__ == "__main__":
    main()
