"""``python -m openclip_ext COMMAND ...`` is ``openclip-ext COMMAND ...``."""

from openclip_ext.cli.program import main

main()
