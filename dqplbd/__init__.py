# SPDX-License-Identifier: Apache-2.0
"""Dynamic queue pair load balancing as a service of the host: control plane and command line.

``__version__`` is the version of the installed package (PEP 440); a tree that is run without being installed calls
itself ``0+uninstalled``, so that it can never be taken for a release.
"""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__: str = version("dqplbd")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+uninstalled"
