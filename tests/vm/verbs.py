# SPDX-License-Identifier: Apache-2.0
"""Queue pairs of pyverbs: an independent witness of what the fabric does."""

import os
import select
import statistics
import time
from typing import Any, Final

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

__all__ = ["End", "connected", "ping_ns"]

GID_INDEX: Final = 1
"""Of the IPv4 address, where IPv6 is off."""
_PATIENCE_S: Final = 10.0
_DEPTH: Final = 64


def _event_files() -> set[int]:
    """Descriptors of completion channels of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:  # that of the listing itself is closed again
            pass
    return found


class _Completions:
    """A completion queue and its events."""

    def __init__(self, context: Context) -> None:
        before = _event_files()
        self._channel = CompChannel(context)
        # pyverbs does not tell the descriptor, and waits for events with the interpreter's lock held.
        [self._fd] = _event_files() - before
        self.queue = CQ(context, _DEPTH, channel=self._channel)

    def take(self, count: int, *, poll_only: bool) -> list[Any]:
        done: list[Any] = []
        deadline = time.monotonic() + _PATIENCE_S
        armed = False
        while len(done) < count:
            got, completions = self.queue.poll(count - len(done))
            done += completions
            if got:
                continue
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(done)} of {count} completions came within {_PATIENCE_S} s")
            if poll_only:
                continue
            if armed:
                if not select.select([self._fd], [], [], max(deadline - time.monotonic(), 0))[0]:
                    continue
                self._channel.get_cq_event(self.queue)
                self.queue.ack_events(1)
            else:
                self.queue.req_notify()
            armed = not armed  # what came before it was armed is found by polling once more
        for one in done:
            if one.status != e.IBV_WC_SUCCESS:
                raise RuntimeError(f"a work request ended with status {one.status}, vendor error {one.vendor_err}")
        return done

    def close(self) -> None:
        self.queue.close()
        self._channel.close()


class End:
    """One reliable connected queue pair with memory of its own.

    :param device: name of the RDMA device.  :param size: bytes of memory.
    """

    def __init__(self, device: str, size: int = 1 << 20) -> None:
        self._context = Context(name=device)
        self._pd = PD(self._context)
        self._sent = _Completions(self._context)
        self._received = _Completions(self._context)
        self.access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.memory = MR(self._pd, size, self.access)
        self.gid = self._context.query_gid(1, GID_INDEX)
        caps = QPCap(max_send_wr=_DEPTH, max_recv_wr=_DEPTH, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self._sent.queue, rcq=self._received.queue, cap=caps, sq_sig_all=0)
        self.qp = QP(self._pd, init)
        # Polling would stop simulated time; waiting for an event costs tens of microseconds of real time.
        self._poll_only = os.environ.get("DQPLBD_GUEST") != "simulated"

    def connect(self, other: "End", mtu: int) -> None:
        """Make it ready to send to ``other``."""
        route = GlobalRoute(dgid=other.gid, sgid_index=GID_INDEX, hop_limit=64)
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = self.access
        attr.path_mtu = mtu
        attr.dest_qp_num = other.qp.qp_num
        attr.rq_psn = attr.sq_psn = 100
        attr.min_rnr_timer = 12
        attr.timeout = 14
        attr.retry_cnt = attr.rnr_retry = 7
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route, dlid=0)
        self.qp.to_rts(attr)

    def receive(self) -> None:
        """Post a receive over the whole memory."""
        self.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.memory.buf, self.memory.length, self.memory.lkey)]))

    def send(self, size: int) -> None:
        """Post a send from the beginning of the memory."""
        self.qp.post_send(self._request(e.IBV_WR_SEND, size))

    def write(self, other: "End", size: int, immediate: int | None = None) -> None:
        """Post a write to the beginning of the other's memory, with immediate data where given."""
        request = self._request(e.IBV_WR_RDMA_WRITE if immediate is None else e.IBV_WR_RDMA_WRITE_WITH_IMM, size)
        request.set_wr_rdma(other.memory.rkey, other.memory.buf)
        if immediate is not None:
            request.imm_data = immediate
        self.qp.post_send(request)

    def _request(self, opcode: int, size: int) -> Any:
        place = SGE(self.memory.buf, size, self.memory.lkey)
        return SendWR(wr_id=1, opcode=opcode, num_sge=1, sg=[place], send_flags=e.IBV_SEND_SIGNALED)

    def sent(self, count: int = 1) -> list[Any]:
        """Completions of the next sends and writes; raises as :meth:`received` does."""
        return self._sent.take(count, poll_only=self._poll_only)

    def received(self, count: int = 1) -> list[Any]:
        """Completions of the next receives.

        :raises RuntimeError: one failed.  :raises TimeoutError: they did not come within 10 s.
        """
        return self._received.take(count, poll_only=self._poll_only)

    def close(self) -> None:
        """Destroy everything."""
        for one in (self.qp, self.memory, self._sent, self._received, self._pd, self._context):
            one.close()


def connected(near: str, far: str, *, mtu: int = e.IBV_MTU_4096, size: int = 1 << 20) -> tuple[End, End]:
    """Two connected ends."""
    one, two = End(near, size), End(far, size)
    one.connect(two, mtu)
    two.connect(one, mtu)
    return one, two


def ping_ns(near: End, far: End, rounds: int = 20, size: int = 64) -> tuple[int, int]:
    """Round trip time of sends there and back.  :returns: the least and the median, in ns."""
    times = []
    for _ in range(rounds):
        far.receive()
        near.receive()
        begin = time.perf_counter_ns()
        near.send(size)
        far.received()
        far.send(size)
        near.received()
        times.append(time.perf_counter_ns() - begin)
        near.sent()
        far.sent()
    return min(times), int(statistics.median(times))
