# SPDX-License-Identifier: Apache-2.0
"""How much ``dqplb bench`` measures where nobody said how much."""

import pytest

from dqplbd.lab.bench import fitting


@pytest.mark.parametrize(
    ("each_s", "expected"),
    [
        (1e-5, 1000),  # a near path: all of it
        (0.01, 500),
        (0.24, 20),  # another building: no longer than asked for
        (60.0, 3),
        (0.0, 1000),  # a clock that did not move
    ],
)
def test_a_measurement_is_as_long_as_asked_for(each_s: float, expected: int) -> None:
    assert fitting(5.0, each_s, 3, 1000) == expected


def test_the_most_goes_before_the_least() -> None:
    assert fitting(5.0, 60.0, 3, 1) == 1
