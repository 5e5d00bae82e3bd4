# SPDX-License-Identifier: Apache-2.0
"""Send and receive through the daemon of this host, from Python.

The same library as ``dqplb.h``, with Python's manners: objects close themselves in ``with`` blocks, failures are
:class:`DqplbError`, waiting releases the GIL and heeds Ctrl-C, and a request keeps its buffers alive::

    with Context() as context:
        listener = context.listen()
        publish(listener.handle)                  # 128 bytes, by any means
        with listener.accept().wait() as flow:
            memory = context.allocate(1 << 20)
            received = flow.recv(memory).wait()
            process(memory.view[: received.bytes])
"""

from dqplbd.client.context import Context, Device
from dqplbd.client.errors import DqplbError, Status
from dqplbd.client.flow import Flow, Listener
from dqplbd.client.memory import Memory
from dqplbd.client.request import Notification, Received, Request

__all__ = [
    "Context",
    "Device",
    "DqplbError",
    "Flow",
    "Listener",
    "Memory",
    "Notification",
    "Received",
    "Request",
    "Status",
]
