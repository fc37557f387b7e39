"""Counter-based random numbers: the value depends on names, never on how many were drawn before.

Noise, sampling and adapter initialisation must come out the same on every rank, under every parallel layout, in the
trainer and in an engine, today and after a resume. So each draw is a pure function Philox4x32-10(key, counter) (Salmon
et al., SC 2011), with the run's seed as key and the names of the thing drawn as counter. Normals use Wichura's
algorithm AS 241 with a logarithm built from exact IEEE operations only (+, -, *, /, sqrt, frexp): the platform's libm,
which differs between processors in the last bit, is never asked.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
F64 = NDArray[np.float64]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = np.uint64(0xFFFFFFFF)


class Domain(IntEnum):
    """Keeps the streams of one seed apart: it is mixed into the key's upper half."""

    NOISE = 1
    SAMPLING = 2
    ADAPTER_INIT = 3


def philox4x32(counter: U32, key: tuple[int, int]) -> U32:
    """Ten rounds of Philox4x32.

    Args:
        counter: uint32 [n, 4].
        key: two 32-bit words.

    Returns:
        uint32 [n, 4], uniform bits.
    """
    c = counter.astype(np.uint64).T.copy()
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c[0], _M1 * c[2]
        c = np.stack(
            (
                (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
                p1 & _MASK,
                (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
                p0 & _MASK,
            )
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return c.T.astype(np.uint32)


def stream_key(seed: int, domain: Domain) -> tuple[int, int]:
    """Philox key of one domain of a run; ``seed`` may have 56 bits."""
    return seed & 0xFFFFFFFF, ((seed >> 32) & 0xFFFFFF) | (int(domain) << 24)


def name_word(name: str) -> int:
    """A name as one 32-bit counter word (first four bytes of its SHA-256)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def stream(key: tuple[int, int], words: tuple[int, int, int], count: int) -> U32:
    """``count`` uint32 of the stream named by ``words``; element i depends on i and the names alone."""
    blocks = -(-count // 4)
    counter = np.empty((blocks, 4), dtype=np.uint32)
    counter[:, 0] = np.arange(blocks, dtype=np.uint32)
    counter[:, 1:] = np.asarray(words, dtype=np.uint32)
    return philox4x32(counter, key).reshape(-1)[:count]


def uniform(bits: U32) -> F64:
    """Uniform on the open interval (0, 1): (bits + 1/2) / 2^32, exact in float64."""
    return (bits.astype(np.float64) + 0.5) * 2.0**-32


def _exact_log(x: F64) -> F64:
    """log(x) for x > 0 from exact operations: x = m 2^e, log m = 2 artanh((m-1)/(m+1)) by its series."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    exponent = exponent - small
    t = (mantissa - 1.0) / (mantissa + 1.0)
    t2 = t * t
    series = np.zeros_like(t)
    for k in range(25, -1, -1):
        series = series * t2 + 1.0 / (2 * k + 1)
    return exponent * 0.6931471805599453 + 2.0 * t * series


def _horner(coefficients: tuple[float, ...], x: F64) -> F64:
    result = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * x + c
    return result


# Coefficients of AS 241, routine PPND16 (Wichura, Applied Statistics 37, 1988): relative accuracy about 1e-16.
_A = (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
      4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3)  # fmt: skip
_B = (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
      3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3)  # fmt: skip
_C = (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
      1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2,
      7.74545014278341407640e-4)  # fmt: skip
_D = (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
      1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9)  # fmt: skip
_E = (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
      2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5,
      2.01033439929228813265e-7)  # fmt: skip
_F = (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2, 7.86869131145613259100e-4,
      1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15)  # fmt: skip


def standard_normal(bits: U32) -> F64:
    """Standard normal deviates, one a word, bit-equal on every IEEE machine (inverse of the normal distribution)."""
    p = uniform(bits)
    q = p - 0.5
    tail = np.minimum(p, 1.0 - p)
    r = 0.180625 - q * q
    central = q * _horner(_A, r) / _horner(_B, r)
    s = np.sqrt(-_exact_log(tail))
    near = _horner(_C, s - 1.6) / _horner(_D, s - 1.6)
    far = _horner(_E, s - 5.0) / _horner(_F, s - 5.0)
    outer = np.where(q < 0.0, -1.0, 1.0) * np.where(s <= 5.0, near, far)
    return np.where(np.abs(q) <= 0.425, central, outer)
