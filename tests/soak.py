"""Random cases of which a few run with the suite, and as many as wanted by hand: ``pytest FILE --soak 1000``.

A test marked ``@pytest.mark.soak(FEW)`` that takes ``soak_case`` runs for FEW cases, or for ``--soak N`` of them. What a case
does follows from its seed and number alone; its name has both: ``-k 3-17`` repeats case 17 of ``--soak-seed 3``.
"""

import random
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class SoakCase:
    """One random case."""

    seed: int
    number: int

    def random(self) -> random.Random:
        """Return the source of all that is random in the case."""
        return random.Random(f"{self.seed} {self.number}")

    def __str__(self) -> str:
        return f"{self.seed}-{self.number}"


def add_options(parser: pytest.Parser) -> None:
    """Add ``--soak`` and ``--soak-seed`` to pytest."""
    parser.addoption("--soak", type=int, metavar="CASES", help="cases of each soak test (default: a few)")
    parser.addoption("--soak-seed", type=int, default=0, metavar="SEED", help="of the cases of soak tests")


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give a soak test its cases."""
    if "soak_case" in metafunc.fixturenames:
        (few,) = metafunc.definition.get_closest_marker("soak").args
        wanted, seed = metafunc.config.getoption("soak"), metafunc.config.getoption("soak_seed")
        cases = [SoakCase(seed, number) for number in range(few if wanted is None else wanted)]
        metafunc.parametrize("soak_case", cases, ids=str)
