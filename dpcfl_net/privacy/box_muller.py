"""Standard normal numbers from random words by Box and Muller's method, in float64 operations that round alike on every device.

Only additions, multiplications, divisions, square roots (each rounded once, as IEEE 754 demands), comparisons and operations on
bits are used, one per kernel, so that no compiler can fuse two. Logarithm, sine and cosine are those of fdlibm (Sun 1993).
Therefore the numbers have the same bits on a CPU and on a GPU.

Distribution: a pair takes 160 bits. 95 of them are the numerator of a uniform u in (0, 1), in steps of 2^-95; 64 give the angle:
its octant by three bits and its place in the octant, in steps of 2^-61. With r = sqrt(-2 ln u), the pair is r times the cosine and
sine of the angle. -ln u comes from u or, near 1, from 1 - u, both exact, so that r has a small relative error everywhere. The
largest value is sqrt(2 * 96 * ln 2) = 11.54; an exact Gaussian exceeds it with probability 2^-99.

Error against exact arithmetic on the same words, in units of 2^-53: u is rounded twice, which moves -ln u by at most 5.8 of it
(most at u = sqrt(1/2)), and fdlibm's logarithm by 2; the root halves both and rounds once, so r is off by at most 5 r. The angle is
off by at most 3.4 of itself, sine and cosine by 3.7 with their own ulp. With the last product, |x - exact| <= 10 * 2^-53 r. The steps
of u move r by at most 2^-96 / (u r), which is less than 2^-53 r unless u < 2^-40.
"""

from __future__ import annotations

import torch

WORDS = 5  # of a pair
_MANTISSA = (1 << 52) - 1
_ONE_BITS = 0x3FF << 52
_ROOT_HALF_BITS = 0x3FE6A09E << 32  # about sqrt(1/2): mantissas are brought into (sqrt(1/2), sqrt(2))
_NEAR_ONE = 6521908912666391106  # sqrt(1/2) * 2^63
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LN = (
    6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
    1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
)  # fmt: skip
_SIN = (
    -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04, 2.75573137070700676789e-06,
    -2.50507602534068634195e-08, 1.58969099521155010221e-10,
)  # fmt: skip
_COS = (
    4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05, -2.75573143513906633035e-07,
    2.08757232129817482790e-09, -1.13596475577881948265e-11,
)  # fmt: skip
_EIGHTH_TURN = 7.85398163397448278999e-01  # pi / 4


def normals(words: torch.Tensor) -> torch.Tensor:
    """Compute pairs of independent standard normal numbers.

    Args:
        words: Uniform words, (5, ...) int32.

    Returns:
        (2, ...) float64.

    Source: Box and Muller 1958.
    """
    radius = _minus_ln(_joined(words[0], words[1]), words[2]).mul_(2.0).sqrt_()
    angle = _joined(words[3], words[4])
    # Bits 61 to 63 choose one of eight octants: exchange, and two signs.
    part = (angle & ((1 << 61) - 1)).double().add_(0.5).mul_(2.0**-61).mul_(_EIGHTH_TURN)
    sine, cosine = _sine_and_cosine(part)
    exchange = (angle >> 61) & 1 == 1
    pair = torch.stack([torch.where(exchange, sine, cosine), torch.where(exchange, cosine, sine)])
    signs = torch.stack([angle >> 62, angle >> 63]).bitwise_and_(1).mul_(-2).add_(1)
    return pair.mul_(signs.double()).mul_(radius)


def _joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """64 bits from two words, int64."""
    return (high.long() << 32).bitwise_or_(low.long() & 0xFFFFFFFF)


def _minus_ln(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """-ln of u = (63 bits of `high`, 32 bits of `low`, then 1/2) * 2^-95."""
    high = high & 0x7FFFFFFFFFFFFFFF
    near_one = high >= _NEAR_ONE
    # The complement of all bits is 1 - u, exactly.
    high = torch.where(near_one, high ^ 0x7FFFFFFFFFFFFFFF, high)
    low = torch.where(near_one, ~low, low).long() & 0xFFFFFFFF
    value = high.double().mul_(2.0**32).add_(low.double().add_(0.5)).mul_(2.0**-95)
    bits = value.view(torch.int64) + (_ONE_BITS - _ROOT_HALF_BITS)
    power = torch.where(near_one, 0, (bits >> 52) - 1023).double()
    fraction = ((bits & _MANTISSA) + _ROOT_HALF_BITS).view(torch.float64).sub_(1.0)
    fraction = torch.where(near_one, -value, fraction)
    s = fraction / (fraction + 2.0)
    z = s * s
    half = (fraction * 0.5).mul_(fraction)
    series = _polynomial(z, _LN).mul_(z).add_(half).mul_(s).add_(power * _LN2_LOW)
    # fdlibm's order: k ln2_high - ((f^2/2 - (s (f^2/2 + R) + k ln2_low)) - f), here with the opposite sign.
    return half.sub_(series).sub_(fraction).sub_(power.mul_(_LN2_HIGH))


def _sine_and_cosine(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sine and cosine of 0 to pi/4."""
    z = x * x
    sine = _polynomial(z, _SIN).mul_(z).mul_(x).add_(x)
    half = z * 0.5
    whole = 1.0 - half
    rest = (1.0 - whole).sub_(half)
    cosine = _polynomial(z, _COS).mul_(z).mul_(z).add_(rest).add_(whole)
    return sine, cosine


def _polynomial(z: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    """Horner's scheme, a product and a sum in separate kernels."""
    value = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value.mul_(z).add_(coefficient)
    return value
