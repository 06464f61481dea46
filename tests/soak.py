"""Random cases of which a few run with the suite, and as many as wanted by hand: ``pytest FILE --soak 1000``.

A test marked ``@pytest.mark.soak(FEW)`` that takes ``soak_case`` runs for FEW cases, or for ``--soak N`` of them. What a case
does follows from its seed and number alone; its name has both: ``-k 3-17`` repeats case 17 of ``--soak-seed 3``.
"""

import random
from dataclasses import dataclass


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
