"""``openclip-ext losses`` prints a description of a loss."""

import pytest

from openclip_ext.diagnostics.losses import main
from openclip_ext.losses.registry import list_losses, training_defaults


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
    assert all(f"    {option} = {default}:" in shown for option, default in training_defaults(name, {}).items())
