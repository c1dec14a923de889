"""Wilson's score interval: how far a measured share may be from the true one (E. B. Wilson, Probable inference, JASA
22, 1927). Unlike the mean plus or minus its standard error it stays between 0 and 1, and has a width even if all tasks
went well.

It holds for a mean of rewards between 0 and 1 as well, where tasks are independent: such a reward varies no more than
one that is 0 or 1 with the same mean, so the interval is wide enough.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

Z: Final = 1.959964
"""95 % of a normal distribution lie within this many standard deviations."""


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, 0 to 1, of `count` independent observations, 1 or more."""
    if not 0 <= share <= 1 or count < 1:
        raise ValueError(f"a share of {count} observations cannot be {share}")
    spread = Z * Z / count
    middle = (share + spread / 2) / (1 + spread)
    reach = Z / (1 + spread) * sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, middle - reach), min(1.0, middle + reach)
