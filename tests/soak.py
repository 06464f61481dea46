"""Random cases of soak tests: a few run in the suite, and ``pytest FILE --soak 1000`` runs 1000 of them.

A test with the mark ``@pytest.mark.soak(FEW)`` and the argument ``soak_case`` runs FEW cases, or N with ``--soak N``. The seed
and number of a case are in its name: ``--soak-seed 3 -k 3-17`` repeats case 17 of seed 3.
"""

import random
from typing import NamedTuple


class SoakCase(NamedTuple):
    """A random case, determined by its seed and number."""

    seed: int
    number: int

    def random(self) -> random.Random:
        """Return a new generator for all random numbers of the case."""
        return random.Random(f"{self.seed} {self.number}")

    def __str__(self) -> str:
        return f"{self.seed}-{self.number}"
