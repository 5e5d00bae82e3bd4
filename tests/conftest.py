# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

from hypothesis import settings

# A test says what is right, not how fast this machine is today: no property test fails on a slow example.
settings.register_profile("dqplbd", deadline=None, print_blob=True)
settings.load_profile("dqplbd")
