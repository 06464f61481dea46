"""Random cases: a few run with the suite, and any number with ``pytest FILE --soak 1000``.

A test with the mark ``@pytest.mark.soak(FEW)`` and the argument ``soak_case`` runs FEW cases, or N with ``--soak N``. Seed and
number determine a case, and its name has both: ``-k 3-17`` repeats case 17 of ``--soak-seed 3``.
"""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class SoakCase:
    """One random case."""

    seed: int
    number: int

    def random(self) -> random.Random:
        """Return the generator of all random numbers of the case."""
        return random.Random(f"{self.seed} {self.number}")

    def __str__(self) -> str:
        return f"{self.seed}-{self.number}"
