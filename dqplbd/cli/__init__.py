# SPDX-License-Identifier: Apache-2.0
"""The command line ``dqplb``: one module a command group.

Modules here import only what their options need; everything else is imported by the command that is run, so that
``dqplb --help`` and shell completion answer at once.
"""
