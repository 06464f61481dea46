"""``--equal-captions`` from the command line to the loss."""

import pytest

from openclip_ext.training.errors import UsageError
from tests.training.runs import (
    EXIT_AFTER_SIGTERM,
    command,
    differences,
    final_state,
    losses_of,
    run,
)


def test_it_reaches_the_loss_and_resumes_bit_for_bit(shards, tmp_path):
    # Five backgrounds: every batch has equal captions.
    more = ["--caption-key", "json:background", "--accum-freq", "2", "--batch-size", "8"]
    treated = [*more, "--equal-captions", "positive"]
    assert run(command(shards, tmp_path, "plain", "fastclip", *more)) == 0
    assert run(command(shards, tmp_path, "whole", "fastclip", *treated)) == 0
    resumed = [*command(shards, tmp_path, "resumed", "fastclip", *treated), "--resume", "latest"]
    assert run(resumed, stop_after=3) == EXIT_AFTER_SIGTERM
    assert run(resumed) == 0
    assert losses_of(tmp_path / "resumed") == losses_of(tmp_path / "whole")
    assert differences(final_state(tmp_path / "resumed"), final_state(tmp_path / "whole")) == []
    assert losses_of(tmp_path / "whole")[0][1] != pytest.approx(losses_of(tmp_path / "plain")[0][1], rel=1e-3)


@pytest.mark.parametrize(
    ("loss", "choice", "message"),
    [
        ("siglip", "mask", "--equal-captions: not used by the loss 'siglip'.*without labels"),
        ("queueclip", "mask", "--equal-captions mask: the queue keeps"),
        ("amorlip", "positive", "room for one positive pair"),
    ],
)
def test_a_loss_that_cannot_refuses_with_the_reason(shards, tmp_path, loss, choice, message):
    with pytest.raises(UsageError, match=message):
        run(command(shards, tmp_path, "refused", loss, "--equal-captions", choice))
