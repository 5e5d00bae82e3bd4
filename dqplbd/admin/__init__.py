# SPDX-License-Identifier: Apache-2.0
"""The HTTP API on the admin socket: what it tells, the server in the daemon, the client of the command line."""
