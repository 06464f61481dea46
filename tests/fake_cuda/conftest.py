"""Start autograd's threads for the fake devices during collection, before the first backward pass of any test."""

import contextlib

import pytest

from tests.fake_cuda.device import start_autograd

with contextlib.suppress(pytest.skip.Exception):
    start_autograd()
