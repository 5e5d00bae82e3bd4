# SPDX-License-Identifier: Apache-2.0
"""Control plane and command line of dqplbd, the host daemon for RDMA paths."""
