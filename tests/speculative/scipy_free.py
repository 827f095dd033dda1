"""The upper tail of chi-squared by the regularised incomplete gamma function; no scipy needed."""

import math


def chi_squared_tail(x: float, freedom: int) -> float:
    """P(X >= x): series below the mean, continued fraction (Lentz) above. Numerical Recipes 6.2."""
    a, x = freedom / 2, x / 2
    if x <= 0:
        return 1.0
    log_front = a * math.log(x) - x - math.lgamma(a)
    if x < a + 1:
        term = total = 1 / a
        for n in range(1, 100_000):
            term *= x / (a + n)
            total += term
            if term < total * 1e-15:
                break
        return max(0.0, 1 - total * math.exp(log_front))
    b = x + 1 - a
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 100_000):
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return h * math.exp(log_front)
