# SPDX-License-Identifier: Apache-2.0
"""Limits of clients."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.clients.quota import Quota, QuotaError
from dqplbd.clients.server import clean_name
from dqplbd.config.models import ClientsConfig


def test_the_limit_of_all_and_of_one_user() -> None:
    quota = Quota(ClientsConfig(max_clients=3, max_clients_per_user=2))
    quota.enter(1)
    quota.enter(1)
    with pytest.raises(QuotaError, match=r"user 1 .*max_clients_per_user is 2"):
        quota.enter(1)
    quota.enter(2)
    with pytest.raises(QuotaError, match="max_clients is 3"):
        quota.enter(3)
    quota.leave(1)
    quota.enter(3)
    assert len(quota) == 3


def test_lower_limits_put_nobody_out() -> None:
    quota = Quota(ClientsConfig(max_clients=3))
    for uid in (1, 2, 3):
        quota.enter(uid)
    quota.configure(ClientsConfig(max_clients=1))
    quota.leave(1)
    with pytest.raises(QuotaError):
        quota.enter(1)
    quota.leave(2)
    quota.leave(3)
    quota.enter(9)


def test_regions_are_counted() -> None:
    quota = Quota(ClientsConfig(max_regions=2))
    quota.check_regions(1)
    with pytest.raises(QuotaError, match="max_regions is 2"):
        quota.check_regions(2)


@given(st.text(max_size=100), st.integers(0, 2**31 - 1))
def test_names_are_fit_to_show(name: str, pid: int) -> None:
    shown = clean_name(name, pid)
    assert shown.isascii()
    assert shown.isprintable()
    assert 1 <= len(shown) <= 63


def test_a_name_of_nothing_is_the_process() -> None:
    assert clean_name("", 12) == "pid-12"
    assert clean_name("\x1b\x07 ", 12) == "pid-12"
    assert clean_name("trainer 3", 12) == "trainer 3"
