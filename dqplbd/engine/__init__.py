# SPDX-License-Identifier: Apache-2.0
"""The data plane as the rest of the package sees it: :mod:`dqplbd.engine.engine` wraps the compiled module."""
