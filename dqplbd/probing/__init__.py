# SPDX-License-Identifier: Apache-2.0
"""Measuring round trips: whom, how often, and what the samples say."""
