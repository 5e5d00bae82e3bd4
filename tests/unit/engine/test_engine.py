# SPDX-License-Identifier: Apache-2.0
"""The wrapper of the data plane, over the real one."""

import errno
import os
import select
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.engine.engine import (
    HOST_ID_MAX,
    MAX_ENDPOINT_BYTES,
    REPLY_BYTES,
    REQUEST_BYTES,
    DeviceSpec,
    Engine,
    EngineError,
    EngineProfile,
    EngineSettings,
    EventType,
    LinkSetting,
    ProbeResult,
    RequestError,
    RequestType,
    Status,
    VcLimits,
    pack_device_infos,
    pack_reply,
    pack_request,
    parse_reply,
    parse_request,
)

PROFILE = EngineProfile(100_000, 10**9, 1 << 20, 1 << 17, 10_000, 65536, 2, 8, True, True)
LIMITS = VcLimits(qps=2, depth=16, credits=8, segment_bytes=65536)
SPEC = DeviceSpec("tcp0", "tcp", "127.0.0.1", rate_bps=10**9, rail=3)
U64 = st.integers(0, 2**64 - 1)


@pytest.fixture
def engine() -> Iterator[Engine]:
    one = Engine(EngineSettings("here", 0xABCDEF, api_address=bytes([127, 0, 0, 1]), api_port=7471))
    yield one
    one.close()


def wait_for(engine: Engine, kind: EventType, count: int = 1) -> list[int]:
    """The VCs of the next ``count`` events of a kind."""
    found: list[int] = []
    limit = time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < limit, f"no {kind.name}"
        select.select([engine.fileno()], [], [], 1)
        found += [event.vc for event in engine.events() if event.type == kind]
    return found


# -------------------------------------------------------------------------------------------------------- messages


@given(st.sampled_from(RequestType), U64, U64, U64, U64, st.from_regex(r"[ -~]{0,63}", fullmatch=True))
def test_a_request_comes_back(kind: RequestType, a: int, b: int, c: int, d: int, name: str) -> None:
    request = parse_request(pack_request(kind, a, b, c, d, name))
    assert (request.type, request.arg0, request.arg1, request.arg2, request.arg3) == (kind, a, b, c, d)
    assert request.name == name


@given(st.binary(max_size=2 * REQUEST_BYTES))
def test_any_bytes_are_a_request_or_an_error(data: bytes) -> None:
    try:
        request = parse_request(data)
    except RequestError:
        return
    assert request.type in RequestType


@given(st.binary(min_size=64, max_size=64))
def test_any_name_is_a_text(name: bytes) -> None:
    data = pack_request(RequestType.ATTACH)[: REQUEST_BYTES - 64] + name
    assert len(parse_request(data).name.encode("utf-8", "replace")) <= 3 * 64


@pytest.mark.parametrize("size", [0, 1, REQUEST_BYTES - 1, REQUEST_BYTES + 1])
def test_another_length_is_no_request(size: int) -> None:
    with pytest.raises(RequestError, match=f"{size} bytes; expected {REQUEST_BYTES}"):
        parse_request((pack_request(RequestType.DEVICES) + b"x")[:size])


@given(st.sampled_from(Status), st.lists(U64, max_size=4), st.binary(max_size=128), st.text(max_size=400))
def test_a_reply_comes_back(status: Status, args: list[int], handle: bytes, text: str) -> None:
    data = pack_reply(RequestType.MEM_ALLOC, status, args, handle=handle, text=text.replace("\0", ""))
    assert len(data) == REPLY_BYTES
    reply = parse_reply(data)
    assert (reply.status, list(reply.args)) == (status, args + [0] * (4 - len(args)))
    assert reply.handle == handle.ljust(128, b"\0")
    assert text.replace("\0", "").startswith(reply.text)
    assert len(reply.text.encode()) <= 255


# ---------------------------------------------------------------------------------------------------------- engine


def test_a_host_id_that_does_not_fit_is_refused_whole() -> None:
    with pytest.raises(EngineError, match=f"at most {HOST_ID_MAX}") as caught:
        Engine(EngineSettings("h" * (HOST_ID_MAX + 1), 1))
    assert caught.value.code == errno.EINVAL


def test_the_heartbeat_moves_and_a_closed_engine_says_so(engine: Engine) -> None:
    first = engine.heartbeat()
    limit = time.monotonic() + 20
    while engine.heartbeat() == first:
        assert time.monotonic() < limit
        time.sleep(0.01)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.stats()


def test_a_device_is_told_back(engine: Engine) -> None:
    number = engine.device_add(SPEC)
    info = engine.device(number)
    assert (info.name, info.provider, info.rail, info.rate_bps, info.up) == ("tcp0", "tcp", 3, 10**9, True)
    assert info.address.startswith("127.0.0.1:")
    assert len(pack_device_infos([(info, SPEC, 5)])) == 240
    engine.device_latency(number, 2**40)
    with pytest.raises(EngineError):
        engine.device(number + 1)


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, provider="no-such"),
        replace(SPEC, address="not an address"),
        replace(SPEC, address="192.0.2.1"),
        replace(SPEC, name="n" * 32),
        replace(SPEC, name="a\0b"),
    ],
)
def test_a_device_that_cannot_be_is_refused_with_a_text(engine: Engine, spec: DeviceSpec) -> None:
    with pytest.raises(EngineError) as caught:
        engine.device_add(spec)
    assert len(caught.value.text) > 10
    assert engine.stats().paths == 0


def test_a_vc_of_this_host_with_itself_comes_up(engine: Engine) -> None:
    device = engine.device_add(SPEC)
    path = engine.path_add(device, "here", 0xABCDEF, LinkSetting(), PROFILE)
    near, near_endpoints = engine.vc_prepare(path, LIMITS)
    far, far_endpoints = engine.vc_prepare(path, LIMITS)
    assert len(near_endpoints) == LIMITS.qps + 1
    assert all(0 < len(endpoint) <= MAX_ENDPOINT_BYTES for endpoint in near_endpoints)
    with pytest.raises(EngineError, match="2 endpoints for 2 data QPs"):
        engine.vc_connect(far, LIMITS, near_endpoints[:2], dial=False)
    with pytest.raises(EngineError, match="97 bytes"):
        engine.vc_connect(far, LIMITS, [bytes(97)] * 3, dial=False)
    engine.vc_connect(far, LIMITS, near_endpoints, dial=False)
    engine.vc_connect(near, LIMITS, far_endpoints, dial=True)
    assert sorted(wait_for(engine, EventType.VC_UP, 2)) == sorted([near, far])
    assert engine.path_stats(path).vcs == 2
    engine.path_profile(path, replace(PROFILE, window_bytes=1 << 21))
    assert engine.path_stats(path).profile_window_bytes >= 1 << 21
    engine.path_remove(path, Status.STALE, "the test is over")
    assert sorted(wait_for(engine, EventType.VC_DOWN, 2)) == sorted([near, far])
    with pytest.raises(EngineError):
        engine.path_stats(path)


def test_a_client_and_its_memory(engine: Engine) -> None:
    engine.device_add(SPEC)
    attached = engine.client_add("test", 64, 1 << 20, 8)
    assert os.fstat(attached.memfd).st_size == attached.memfd_bytes
    assert engine.client_handle(attached.client)[16:].find(b"here\0") > 0
    memory, fd, mapped = engine.mem_alloc(attached.client, 5000, staging=False)
    assert os.fstat(fd).st_size == mapped == 8192
    stats = engine.client_stats(attached.client)
    assert (stats.name, stats.memory_regions) == ("test", 1)
    with pytest.raises(EngineError) as caught:
        engine.mem_alloc(attached.client, 1 << 30, staging=True)
    assert caught.value.status is Status.NOMEM
    engine.mem_free(attached.client, memory)
    for one in (fd, attached.memfd, attached.eventfd):
        os.close(one)
    engine.client_remove(attached.client)
    limit = time.monotonic() + 20
    while not any(event.type == EventType.CLIENT_GONE for event in engine.events()):
        assert time.monotonic() < limit
        select.select([engine.fileno()], [], [], 1)
    with pytest.raises(EngineError):
        engine.client_stats(attached.client)


def test_a_prober_probes_itself(engine: Engine) -> None:
    device = engine.device_add(SPEC)
    prober = engine.prober_start(device, 77, timeout_ns=10**9)
    try:
        assert prober.time_source() in ("kernel", "software", "virtual", "completion")
        with pytest.raises(EngineError):
            prober.once(5)
        prober.set_target(5, prober.endpoint(), 77, None, 0)
        prober.once(5)
        samples: list[ProbeResult] = []
        limit = time.monotonic() + 20
        while not samples:
            assert time.monotonic() < limit
            select.select([prober.fileno()], [], [], 1)
            samples = [sample.result for sample in prober.drain() if sample.target == 5]
        assert samples == [ProbeResult.OK]
        assert prober.stats().acked == 1
        prober.remove_target(5)
        prober.remove_target(5)
        with pytest.raises(EngineError):
            prober.set_target(0, b"", 0, None, 0)
    finally:
        prober.stop()
        prober.stop()
    with pytest.raises(EngineError, match="stopped"):
        prober.stats()


def test_limits_are_the_smaller_of_each() -> None:
    assert VcLimits(1, 9, 3, 7).smaller(VcLimits(2, 4, 3, 8)) == VcLimits(1, 4, 3, 7)
