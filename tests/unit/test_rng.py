"""Counter-based random numbers."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from megatron_qerl import rng


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    # Known-answer vectors of the Random123 distribution for philox4x32-10.
    out = rng.philox4x32(np.array([counter], dtype=np.uint32), key)
    assert tuple(int(x) for x in out[0]) == expected


def test_element_does_not_depend_on_how_many_are_drawn() -> None:
    key = rng.stream_key(5, rng.Domain.NOISE)
    long = rng.stream(key, (1, 2, 3), 1000)
    for count in (1, 3, 4, 17, 999):
        assert np.array_equal(rng.stream(key, (1, 2, 3), count), long[:count])


def test_each_word_seed_and_domain_changes_the_stream() -> None:
    base = rng.stream(rng.stream_key(5, rng.Domain.NOISE), (1, 2, 3), 8)
    others = [
        rng.stream(rng.stream_key(6, rng.Domain.NOISE), (1, 2, 3), 8),
        rng.stream(rng.stream_key(5 + (1 << 40), rng.Domain.NOISE), (1, 2, 3), 8),
        rng.stream(rng.stream_key(5, rng.Domain.SAMPLING), (1, 2, 3), 8),
        *(rng.stream(rng.stream_key(5, rng.Domain.NOISE), w, 8) for w in ((2, 2, 3), (1, 3, 3), (1, 2, 4))),
    ]
    assert not any(np.array_equal(base, other) for other in others)


def test_normal_is_the_inverse_normal_distribution_at_both_tails_and_the_centre() -> None:
    bits = np.array([0, 1, 77, 10**6, 2**30, 2**31 - 1, 2**31, 3 * 2**30, 2**32 - 2, 2**32 - 1], dtype=np.uint32)
    reference = [NormalDist().inv_cdf(u) for u in rng.uniform(bits)]
    assert np.allclose(rng.standard_normal(bits), reference, rtol=1e-14, atol=1e-15)


def test_normal_moments() -> None:
    z = rng.standard_normal(rng.stream(rng.stream_key(1, rng.Domain.NOISE), (0, 0, 0), 200_000))
    # Five standard errors of each sample moment.
    assert abs(z.mean()) < 5 / np.sqrt(z.size)
    assert abs(z.var() - 1) < 5 * np.sqrt(2 / z.size)
    assert abs((z**3).mean()) < 5 * np.sqrt(15 / z.size)


def test_logarithm_without_libm_is_accurate() -> None:
    x = np.concatenate((np.geomspace(2.0**-33, 0.5, 5001), [0.5, 2.0**-33]))
    assert np.allclose(rng._exact_log(x), np.log(x), rtol=4e-16, atol=2e-16)
