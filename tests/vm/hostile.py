# SPDX-License-Identifier: Apache-2.0
"""A peer that does not keep the rules: says hello and exchanges cards as a daemon does, then does with its queue pairs
what it likes."""

import ipaddress
import json
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from dqplbd.lab.cluster import API_PORT
from dqplbd.peers.cards import FEATURES
from tests.vm.verbs import GID_INDEX

__all__ = ["CONTROL_BYTES", "HostilePeer", "control_packet"]

CONTROL_BYTES: Final = 4096  # DQ_CONTROL_BYTES of native/core/base.h
_PSN: Final = 100
_DEPTH: Final = 256
_ENDPOINT: Final = struct.Struct("<4sBBBBHHIIII16s")  # native/provider/verbs_parts.c
_HEAD: Final = struct.Struct("<HBBHHQQII")  # native/core/wire.h


def control_packet(
    messages: bytes = b"", count: int = 0, *, first: int = 1, ack: int = 1, credits: int = 64, size: int | None = None
) -> bytes:
    """A control packet with a right head, unless told otherwise."""
    size = _HEAD.size + len(messages) if size is None else size
    return _HEAD.pack(0x5144, 1, 0, size, count, first, ack, credits, 0) + messages


class HostilePeer:
    """See the module's text.

    :param device: RDMA device of its own.  :param address: where it listens, and asks from; loopback.
    :param victim: ``address:port`` of the host-to-host API of the other.
    """

    host_id: Final = "hostile"

    def __init__(self, device: str, address: str, victim: str) -> None:
        self._address, self._victim = address, victim
        self._epoch = secrets.token_hex(8)
        self._context = Context(name=device)
        self._pd = PD(self._context)
        self._queue = CQ(self._context, 4 * _DEPTH)
        self._memory = MR(self._pd, 1 << 18, e.IBV_ACCESS_LOCAL_WRITE)
        self._gid = ipaddress.IPv6Address(str(self._context.query_gid(1, GID_INDEX)))
        self._qps: list[Any] = []
        hello = json.dumps(self._hello()).encode()

        class Handler(BaseHTTPRequestHandler):
            """Answers each hello, and nothing else; a connection each, so that none outlives the server."""

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(200 if self.path == "/v1/hello" else 404)
                self.send_header("Content-Length", str(len(hello)))
                self.end_headers()
                self.wfile.write(hello)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((address, API_PORT), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def _hello(self) -> dict[str, Any]:
        device = {"name": "bad0", "rail": 0, "provider": "verbs", "rate_bps": 10**10, "mtu_bytes": 4096}
        return {
            "protocol": {"min": 1, "max": 1},
            "host_id": self.host_id,
            "epoch": self._epoch,
            "api_port": API_PORT,
            "devices": [device],
        }

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        host, port = self._victim.rsplit(":", 1)
        connection = HTTPConnection(host, int(port), timeout=20, source_address=(self._address, 0))
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            assert response.status == 200, text
            answer: dict[str, Any] = json.loads(text)
            return answer
        finally:
            connection.close()

    def _make(self) -> Any:
        cap = QPCap(max_send_wr=_DEPTH, max_recv_wr=_DEPTH, max_send_sge=1, max_recv_sge=1)
        qp = QP(self._pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=cap, sq_sig_all=0))
        self._qps.append(qp)
        return qp

    def _endpoint(self, qp: Any) -> str:
        mtu, link = 5, 2  # 4096 bytes, Ethernet
        return _ENDPOINT.pack(b"dqvb", 1, 1, link, mtu, 0, 0, qp.qp_num, _PSN, 0, 0, self._gid.packed).hex()

    def _join(self, qp: Any, endpoint: bytes) -> None:
        number, psn = _ENDPOINT.unpack(endpoint)[7:9]
        gid = GID(ipaddress.IPv6Address(endpoint[-16:]).exploded)
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        attr.path_mtu, attr.dest_qp_num, attr.rq_psn, attr.sq_psn = 5, number, psn, _PSN
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 6, 7
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        route = GlobalRoute(dgid=gid, sgid_index=GID_INDEX, hop_limit=64)
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route, dlid=0)
        qp.to_rts(attr)
        place = SGE(self._memory.buf + 2 * CONTROL_BYTES, CONTROL_BYTES, self._memory.lkey)
        for _ in range(64):
            qp.post_recv(RecvWR(num_sge=1, sg=[place]))

    def connect(self, *, join: bool = True, greet: bool = True) -> list[Any]:
        """Exchange cards.  :param join: connect the queue pairs.  :param greet: with the handshake.

        :returns: the control queue pair, then two for data.
        """
        peer = self._post("/v1/hello", self._hello())
        qps = [self._make() for _ in range(3)]
        offer = {
            "rail": 0,
            "device": "bad0",
            "mtu_bytes": 4096,
            "limits": {"qps": 2, "depth": 64, "credits": 64, "segment_bytes": 1 << 20},
            "endpoints": [self._endpoint(qp) for qp in qps],
        }
        request = {
            "protocol": 1,
            "from_host_id": self.host_id,
            "from_epoch": self._epoch,
            "to_epoch": peer["epoch"],
            "attempt": secrets.token_hex(8),
            "features": list(FEATURES),
            "vcs": [offer],
        }
        [reply] = self._post("/v1/vcs", request)["vcs"]
        assert "error" not in reply, reply
        if join:
            for qp, endpoint in zip(qps, reply["endpoints"], strict=True):
                self._join(qp, bytes.fromhex(endpoint))
            if greet:
                for qp in qps:
                    self.send(qp)
                self.wait(lambda done: sum(one == e.IBV_WC_SEND for one in done) == 3)
                self.send(qps[0], bytes(CONTROL_BYTES))
        return qps

    def send(
        self,
        qp: Any,
        data: bytes = b"",
        opcode: int = e.IBV_WR_SEND,
        *,
        immediate: int | None = None,
        address: int = 0,
        key: int = 0,
    ) -> None:
        """Post a send or a write."""
        if data:
            self._memory.write(data, len(data))
        place = SGE(self._memory.buf, len(data), self._memory.lkey)
        request = SendWR(wr_id=1, opcode=opcode, num_sge=1, sg=[place], send_flags=e.IBV_SEND_SIGNALED)
        if opcode in (e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_WRITE_WITH_IMM, e.IBV_WR_RDMA_READ):
            request.set_wr_rdma(key, address)
        if immediate is not None:
            request.imm_data = immediate
        qp.post_send(request)

    def wait(self, enough: Callable[[Sequence[int]], bool]) -> None:
        """Take in completions until there are enough: asked with the opcodes of the good ones so far."""
        done: list[int] = []
        deadline = time.monotonic() + 10
        while not enough(done):
            assert time.monotonic() < deadline, done
            count, found = self._queue.poll(16)
            done += [one.opcode for one in found if one.status == e.IBV_WC_SUCCESS]
            if not count:
                time.sleep(0.001)

    def drop(self) -> None:
        """Destroy its queue pairs without a word."""
        for qp in self._qps:
            qp.close()
        self._qps.clear()
        while self._queue.poll(16)[0]:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for one in (self._memory, self._queue, self._pd, self._context):
            one.close()
