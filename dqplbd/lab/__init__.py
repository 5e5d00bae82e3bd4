# SPDX-License-Identifier: Apache-2.0
"""Clusters of daemons on one machine, for tests and the demonstration."""
