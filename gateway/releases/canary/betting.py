"""A test as a bet: wealth that grows only while a hypothesis is false. Pure; the same bits on every machine.

A bettor stakes a share of its wealth, observation by observation, against a hypothesis; gains multiply the wealth. If
the hypothesis holds, no bet wins on average, so the wealth is a supermartingale from 1, and by Ville's inequality
(1939) it ever reaches 1/alpha with probability alpha at most, however often one looks. Betting on means of bounded
values: Waudby-Smith & Ramdas, "Estimating means of bounded random variables by betting" (2024). Twelve bettors with
fixed rates share the stake, because the best rate depends on an effect that nobody knows; their mean is the e-value:

    mean_k prod_i (1 + l x_i)      l = min(lam_k, 0.9 / worst_i),   x_i >= -worst_i,   E[x_i | past] <= 0

lam_k: 12 points, geometric from 0.03 to 3. Every factor is at least 0.1.

*Bits.* Only + - * / and powers of two are used, which IEEE 754 rounds in one way. `log1p`, `lgamma` and vector units
differ in the last place between machines, and `sum` between versions of Python (3.12 compensates). So a decision can be
recomputed anywhere and agrees to the last bit.
"""

from __future__ import annotations

from bisect import bisect_left

RATES = (0.03, 0.0455973, 0.0693039, 0.105336, 0.160101, 0.243339, 0.369854, 0.562145, 0.854411, 1.29863, 1.9738, 3.0)
"""lam_k, as literals so that they are the same on every machine."""

_BLOCK = 64
_SCALE = 2.0**256
_READ = {-512: 2.0**-512, -256: 2.0**-256, 0: 1.0, 256: 2.0**256, 512: 2.0**512}


class Wealth:
    """Twelve bettors against one hypothesis. Wealth neither overflows nor underflows: each bettor's has its own power
    of two."""

    __slots__ = ("_bets", "_scales", "_shares", "_shifts")

    def __init__(self) -> None:
        self._shares = [1.0] * len(RATES)
        self._shifts = [0] * len(RATES)
        self._scales: list[float] | None = None
        self._bets = 0

    def bet(self, gain: float, worst: float) -> None:
        """Multiplies every share by 1 + l * `gain`; `worst` > 0 is the most that a gain can fall below 0."""
        limit = 0.9 / worst
        rates = RATES
        if limit < RATES[-1]:
            at = bisect_left(RATES, limit)
            rates = (*RATES[:at], *(limit,) * (len(RATES) - at))
        # Written out: less than half the time of a comprehension, and this is all that a rollout costs.
        a, b, c, d, e, f, g, h, i, j, k, m = self._shares
        ra, rb, rc, rd, re, rf, rg, rh, ri, rj, rk, rm = rates
        self._shares = [
            a * (1.0 + ra * gain),
            b * (1.0 + rb * gain),
            c * (1.0 + rc * gain),
            d * (1.0 + rd * gain),
            e * (1.0 + re * gain),
            f * (1.0 + rf * gain),
            g * (1.0 + rg * gain),
            h * (1.0 + rh * gain),
            i * (1.0 + ri * gain),
            j * (1.0 + rj * gain),
            k * (1.0 + rk * gain),
            m * (1.0 + rm * gain),
        ]
        self._bets += 1
        if not self._bets % _BLOCK:
            self._rescale()

    @property
    def value(self) -> float:
        """The e-value. Below 1e-150 it may read as 0 and above 1e150 as too small: the shares themselves are exact."""
        a, b, c, d, e, f, g, h, i, j, k, m = self._shares
        if self._scales is None:
            return (a + b + c + d + e + f + g + h + i + j + k + m) / 12.0
        ra, rb, rc, rd, re, rf, rg, rh, ri, rj, rk, rm = self._scales
        low = a * ra + b * rb + c * rc + d * rd + e * re + f * rf
        return (low + g * rg + h * rh + i * ri + j * rj + k * rk + m * rm) / 12.0

    @property
    def shares(self) -> list[tuple[float, int]]:
        """Wealth of each bettor as (x, n): x times 2**n."""
        return list(zip(self._shares, self._shifts, strict=True))

    def _rescale(self) -> None:
        """Factors lie within 0.1 and 5: a block of 64 moves a share by less than 2**213."""
        if min(self._shares) > 1 / _SCALE and max(self._shares) < _SCALE:
            return
        for k, share in enumerate(self._shares):
            if share >= _SCALE:
                self._shares[k], self._shifts[k] = share / _SCALE, self._shifts[k] + 256
            elif share <= 1 / _SCALE:
                self._shares[k], self._shifts[k] = share * _SCALE, self._shifts[k] - 256
        self._scales = [_READ.get(shift, _READ[512] if shift > 0 else 0.0) for shift in self._shifts]


class PairedTest:
    """The tests for replay, without assignment: both versions answer the same question, with scores in [0, 1].

    D = (candidate - incumbent + 1) / 2. Harm is against E[D] >= 1/2, non-inferiority against E[D] <= 1/2 - d/2.
    """

    def __init__(self, d: float) -> None:
        self._worst = 0.5 - d / 2
        self._harm, self._not_worse = Wealth(), Wealth()

    def add(self, candidate: float, incumbent: float) -> None:
        """Takes one pair of scores, each in [0, 1]."""
        difference = (candidate - incumbent + 1.0) / 2
        self._harm.bet(0.5 - difference, 0.5)
        self._not_worse.bet(difference - self._worst, self._worst)

    @property
    def harm(self) -> float:
        """e-value against "the candidate scores no lower"."""
        return self._harm.value

    @property
    def non_inferiority(self) -> float:
        """e-value against "the candidate scores lower by d or more"."""
        return self._not_worse.value
