# SPDX-License-Identifier: Apache-2.0
"""Other hosts: which there are, what they told, and the virtual connections to them."""
