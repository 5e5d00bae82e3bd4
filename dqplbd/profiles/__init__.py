# SPDX-License-Identifier: Apache-2.0
"""From what is known of a path to the numbers its virtual connection works with."""
