# SPDX-License-Identifier: Apache-2.0
"""Which devices this host has, and where they sit."""
