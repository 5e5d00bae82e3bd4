# SPDX-License-Identifier: Apache-2.0
"""Where hosts are, and how near two of them are to each other."""
