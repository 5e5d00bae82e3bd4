# SPDX-License-Identifier: Apache-2.0
"""Messages between hosts: whatever comes in is a message or a clear error."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.engine.engine import MAX_ENDPOINT_BYTES
from dqplbd.peers.cards import (
    FEATURES,
    MAX_BODY_BYTES,
    MAX_DEVICES,
    MAX_QPS,
    REQUIRED_FEATURES,
    CardError,
    Hello,
    HelloDevice,
    Limits,
    Protocol,
    Refusal,
    VcAnswer,
    VcOffer,
    VcReply,
    VcRequest,
    choose_protocol,
    choose_smaller,
    missing_features,
    parse_card,
)

HELLO: dict[str, Any] = {
    "protocol": {"min": 1, "max": 1},
    "host_id": "node7",
    "epoch": "00000000000000ff",
    "version": "0.1.0",
    "api_port": 7471,
    "location": {"zone": "z1"},
    "devices": [
        {
            "name": "tcp0",
            "rail": 0,
            "provider": "tcp",
            "rate_bps": 10**10,
            "mtu_bytes": 1500,
            "probe_endpoint": "00ff",
            "probe_token": "0123456789abcdef",
        }
    ],
}
LIMITS = {"qps": 1, "depth": 16, "credits": 8, "segment_bytes": 65536}
REQUEST: dict[str, Any] = {
    "protocol": 1,
    "from_host_id": "a",
    "from_epoch": "0" * 16,
    "to_epoch": "f" * 16,
    "attempt": "1" * 16,
    "features": list(FEATURES),
    "required": list(REQUIRED_FEATURES),
    "vcs": [{"rail": 0, "device": "tcp0", "mtu_bytes": 1500, "limits": LIMITS, "endpoints": ["00", "01"]}],
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=5),
    max_leaves=20,
)


def encode(value: object) -> bytes:
    return json.dumps(value).encode()


def test_a_hello_survives_the_way() -> None:
    hello = parse_card(Hello, encode(HELLO))
    assert hello.devices[0].rate_bps == 10**10
    assert parse_card(Hello, hello.model_dump_json(exclude_none=True).encode()) == hello


def test_a_request_survives_the_way() -> None:
    request = parse_card(VcRequest, encode(REQUEST))
    assert request.vcs[0].limits == Limits(**LIMITS)
    assert parse_card(VcRequest, request.model_dump_json(exclude_none=True).encode()) == request


def test_unknown_keys_are_left_to_newer_versions() -> None:
    assert parse_card(Hello, encode({**HELLO, "later": [1, 2]})) == parse_card(Hello, encode(HELLO))


@given(st.binary(max_size=200))
@pytest.mark.parametrize("model", [Hello, VcRequest, VcAnswer, Refusal])
def test_any_bytes_are_a_card_or_an_error(model: Any, body: bytes) -> None:
    with pytest.raises(CardError):
        parse_card(model, body)


@given(st.sampled_from(sorted(HELLO)), JSON)
def test_any_value_anywhere_in_a_hello_is_taken_or_refused(key: str, value: Any) -> None:
    body = encode({**HELLO, key: value})
    problem = ""
    try:
        parse_card(Hello, body).location.as_location()
    except CardError as error:
        problem = str(error)
    assert len(problem) < 2000


@given(st.sampled_from(sorted(REQUEST)), JSON)
def test_any_value_anywhere_in_a_request_is_taken_or_refused(key: str, value: Any) -> None:
    problem = ""
    try:
        parse_card(VcRequest, encode({**REQUEST, key: value}))
    except CardError as error:
        problem = str(error)
    assert len(problem) < 2000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host_id", "-starts-with-a-dash"),
        ("host_id", "a" * 64),
        ("host_id", "a\nb"),
        ("epoch", "ff"),
        ("epoch", "00000000000000FF"),
        ("epoch", "00000000000000ff\n"),
        ("epoch", 255),
        ("api_port", 0),
        ("api_port", 65536),
        ("api_port", "7471"),
        ("api_port", True),
        ("protocol", {"min": 0, "max": 1}),
        ("devices", HELLO["devices"] * (MAX_DEVICES + 1)),
        ("devices", [{**HELLO["devices"][0], "rate_bps": -1}]),
        ("devices", [{**HELLO["devices"][0], "rail": 8}]),
        ("devices", [{**HELLO["devices"][0], "probe_endpoint": "0"}]),
        ("devices", [{**HELLO["devices"][0], "probe_endpoint": "00" * (MAX_ENDPOINT_BYTES + 1)}]),
        ("location", {"rack": "r" * 129}),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(CardError, match=key):
        parse_card(Hello, encode({**HELLO, key: value}))


def test_a_location_with_a_control_character_is_refused() -> None:
    hello = parse_card(Hello, encode({**HELLO, "location": {"rack": "a\x07"}}))
    with pytest.raises(CardError, match="location"):
        hello.location.as_location()


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(CardError):
        parse_card(Hello, b'{"location":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_the_largest_request_fits_a_body() -> None:
    endpoints = tuple("ff" * MAX_ENDPOINT_BYTES for _ in range(MAX_QPS + 1))
    limits = Limits(qps=MAX_QPS, depth=65536, credits=65536, segment_bytes=16 * 2**20)
    offers = tuple(
        VcOffer(rail=rail, device="d" * 31, mtu_bytes=2**20, limits=limits, endpoints=endpoints)
        for rail in range(MAX_DEVICES)
    )
    request = VcRequest(
        protocol=1,
        from_host_id="h" * 63,
        from_epoch="f" * 16,
        to_epoch="f" * 16,
        attempt="f" * 16,
        features=FEATURES,
        required=REQUIRED_FEATURES,
        vcs=offers,
    )
    body = request.model_dump_json().encode()
    assert len(body) <= MAX_BODY_BYTES
    assert parse_card(VcRequest, body) == request
    with pytest.raises(CardError, match="body of more than"):
        parse_card(VcRequest, body + b" " * MAX_BODY_BYTES)


def test_versions_are_chosen_or_both_named() -> None:
    assert choose_protocol(Protocol(min=1, max=3), Protocol(min=2, max=5)) == 3
    assert choose_protocol(Protocol(min=1, max=3), Protocol(min=1, max=2)) == 2
    for ours, theirs in (
        (Protocol(min=1, max=2), Protocol(min=3, max=4)),
        (Protocol(min=3, max=4), Protocol(min=1, max=2)),
    ):
        with pytest.raises(CardError, match=r"1\.\.2.*3\.\.4|3\.\.4.*1\.\.2"):
            choose_protocol(ours, theirs)


def test_a_missing_feature_names_both_lists() -> None:
    assert missing_features(parse_card(VcRequest, encode(REQUEST))) == ""
    lacking = parse_card(VcRequest, encode({**REQUEST, "features": ["flows"]}))
    assert REQUIRED_FEATURES[0] in missing_features(lacking)
    assert "flows" in missing_features(lacking)
    demanding = parse_card(VcRequest, encode({**REQUEST, "required": ["time-travel"]}))
    assert "time-travel" in missing_features(demanding)
    assert FEATURES[-1] in missing_features(demanding)


@given(st.data())
def test_smaller_limits_are_the_same_from_both_ends(data: st.DataObject) -> None:
    def draw() -> Limits:
        return Limits(
            qps=data.draw(st.integers(1, MAX_QPS)),
            depth=data.draw(st.integers(1, 65536)),
            credits=data.draw(st.integers(1, 65536)),
            segment_bytes=data.draw(st.integers(128, 16 * 2**20)),
        )

    one, other = draw(), draw()
    agreed = choose_smaller(one, other)
    assert agreed == choose_smaller(other, one)
    assert agreed == choose_smaller(agreed, one) == choose_smaller(agreed, other)


def test_the_token_is_told_in_a_hello_and_nowhere_else() -> None:
    # What the admin API shows of a peer's device must not carry it.
    from dqplbd.admin.model import PeerDevice

    assert "probe_token" in HelloDevice.model_fields
    assert not [name for name in PeerDevice.model_fields if "token" in name or "endpoint" in name]
    assert not [name for name in VcReply.model_fields if "token" in name]
