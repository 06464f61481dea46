"""``openclip-ext losses`` prints a description of a loss."""

import pytest

from openclip_ext.cli.options import option_as_words
from openclip_ext.diagnostics.losses import main
from openclip_ext.losses.options import OPTIONS
from openclip_ext.losses.registry import list_losses, run_defaults


def test_all_losses_are_listed_with_a_sentence(capsys):
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list_losses()
    assert len({line.split(maxsplit=1)[1] for line in lines}) == len(lines)
    assert all(len(line.split()) > 4 for line in lines)


@pytest.mark.parametrize("name", list_losses())
def test_a_loss_is_described_with_all_its_options(name, capsys):
    main([name])
    shown = capsys.readouterr().out
    for option, default in run_defaults(name, {}).items():
        words = option_as_words(OPTIONS[option], default)[0].replace("=", " ", 1)
        assert f"\n  {words}\n" in shown or OPTIONS[option].openclip_flag
