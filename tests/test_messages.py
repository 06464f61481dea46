"""Messages contain no secrets and no terminal control sequences. Written files have the permissions that the umask allows."""

import io
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from openclip_ext.cli import messages
from openclip_ext.files.writing import write_atomically, write_text


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:s3@cret@host/{0..1}.tar::http://s3cret@host/2.tar", "https://***@host/{0..1}.tar::http://***@host/2.tar"),
        ("s3://key:s3cret@bucket/0.tar", "s3://***@bucket/0.tar"),
        ("https://h/0.tar?X-Amz-Signature=s3cret&X-Amz-Date=1&sig=s3%2Fcret", "https://h/0.tar?X-Amz-Signature=***&X-Amz-Date=1&sig=***"),
        ("https://h/0.tar?AWSAccessKeyId=s3cret&access_token=s3cret#a", "https://h/0.tar?AWSAccessKeyId=***&access_token=***#a"),
        ("pipe:curl -s -u me:s3cret https://h/0.tar", "pipe:curl -s -u *** https://h/0.tar"),
        ("pipe:curl -H 'Authorization: Bearer s3cret' https://h/0.tar", "pipe:curl -H 'Authorization: Bearer ***' https://h/0.tar"),
        ("pipe:AWS_SECRET_ACCESS_KEY=s3cret aws s3 cp s3://b/0.tar", "pipe:AWS_SECRET_ACCESS_KEY=*** aws s3 cp s3://b/0.tar"),
        ("pipe:wget --password='s3 cret' -O- http://h", "pipe:wget --password=*** -O- http://h"),
        *((text, text) for text in (
            "hf://datasets/a@main/0.tar", "abfs://container@account.dfs/0.tar", "s3://bucket/token=1/0.tar",
            "http://h/get?key=0.tar&size=2", "pipe:cat tokenizer=5 --image-key=jpg 'me@host:0.tar'", "/data/token=1/0.tar",
        )),
    ],
)  # fmt: skip
def test_secrets_in_urls_and_commands_are_masked(text: str, masked: str):
    assert messages.without_secrets({"a": [text, 1]}) == {"a": [masked, 1]}
    assert messages.without_secrets(masked) == masked


def test_a_terminal_gets_nothing_to_obey(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture):
    hostile = "a\x1b]0;pwned\x07\u202e\udcff\tb https://user:s3cret@host"
    shown = r"a\x1b]0;pwned\x07\u202e\udcff" + "\tb https://***@host"
    messages.echo(hostile)
    assert capsys.readouterr().out == shown + "\n"
    theirs = "\x1b[1mbold"  # no lone surrogate, because pytest-xdist could not send the record
    messages.get_logger("openclip_ext.data").warning("%s", hostile)
    logging.getLogger("host.program").warning(theirs)
    assert caplog.messages == [shown, theirs], "records of other programs must not change"


def test_the_logs_of_our_programs_mask_all_loggers(caplog: pytest.LogCaptureFixture):
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    messages.mask_logs([handler])
    logging.root.addHandler(handler)
    try:
        logging.getLogger("library").warning("reading https://user:s3cret@host")
    finally:
        logging.root.removeHandler(handler)
    assert output.getvalue() == "reading https://***@host\n"


def test_the_import_leaves_the_logs_of_the_host_program_alone():
    code = """
import logging
logging.basicConfig()
before = [*logging.root.filters], [*logging.root.handlers], logging.root.level, logging.root.handlers[0].filters[:]
import openclip_ext
openclip_ext.create_loss("queueclip", embed_dim=8)
assert before == (logging.root.filters, logging.root.handlers, logging.root.level, logging.root.handlers[0].filters)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_mode_that_the_umask_says(umask: int, tmp_path: Path):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "a", lambda file: file.write(b"content"))
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~umask
    with pytest.raises(ZeroDivisionError):
        write_atomically(tmp_path / "a", lambda file: 1 / 0)
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == b"content"


def test_an_output_that_does_not_fit_is_named_and_changes_no_file(tmp_path: Path):
    write_text(tmp_path / "a", "before")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, most))  # like a full disk: the buffer's write fails, also in close()
    try:
        with pytest.raises(OSError, match=f"'{tmp_path / 'a'}'"):
            write_text(tmp_path / "a", "after the limit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "before"
    with pytest.raises(OSError, match="'/dev/full'"):  # a device: written, not replaced
        write_text(Path("/dev/full"), "a")
