# SPDX-License-Identifier: Apache-2.0
"""Where peers are found: each source gives the addresses of host-to-host APIs."""
