# SPDX-License-Identifier: Apache-2.0
"""Every way a configuration can be wrong names file, line, key, value, what was expected and what to do."""

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dqplbd.config import Config, ConfigError, Problem, load_config, parse_config
from dqplbd.config.loader import MAX_FILE_BYTES, field_at
from dqplbd.config.models import TcpDeviceConfig, VerbsDeviceConfig

ROOT = Path(__file__).parents[3]


def problems(text: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml")
    return caught.value.problems


def only(text: str) -> Problem:
    found = problems(text)
    assert len(found) == 1, found
    return found[0]


def test_an_empty_text_gives_the_defaults() -> None:
    for text in ("", "# nothing\n", "---\n", "{}", "peers:\nprobing:\n"):
        assert parse_config(text) == Config()


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_one() -> None:
    problem = only("peers:\n  lisen: 127.0.0.1:1\n")
    assert (problem.file, problem.line, problem.key) == ("f.yaml", 2, "peers.lisen")
    assert "unknown key" in problem.what
    assert "listen" in problem.expected
    assert "'listen'" in problem.action
    assert str(problem).startswith("f.yaml:2: peers.lisen: ")


@pytest.mark.parametrize(
    ("text", "line", "key", "value", "expected"),
    [
        ("metrics: {port: 70000}", 1, "metrics.port", "70000", "65535"),
        ("metrics: {port: many}", 1, "metrics.port", "'many'", "whole number"),
        ("metrics: {enabled: perhaps}", 1, "metrics.enabled", "'perhaps'", "true or false"),
        ("logging:\n  level: loud\n", 2, "logging.level", "'loud'", "'debug', 'info'"),
        (
            "devices:\n- name: a\n  address: 127.0.0.1\n  rate_bps: 1Gbits\n",
            4,
            "devices[0].rate_bps",
            "1Gbits",
            "Gbit/s",
        ),
        ("devices: [{name: a, address: x.y}]", 1, "devices[0].address", "x.y", "IPv4 or IPv6"),
        ("devices: [{name: a, address: 127.0.0.1, provider: ib}]", 1, "devices[0].provider", "'ib'", "'tcp', 'verbs'"),
        ("devices: somehow", 1, "devices", "somehow", "auto, or a list"),
        ("devices: [{name: a, provider: verbs, rdma_device: x y}]", 1, "devices[0].rdma_device", "x y", "mlx5_0"),
        (
            "devices:\n- name: a\n  provider: verbs\n  rdma_device: mlx5_0\n  mtu_bytes: 9000\n",
            5,
            "devices[0].mtu_bytes",
            "9000",
            "4096",
        ),
        (
            "devices:\n- {name: a, provider: verbs, rdma_device: m, gid: mlx5_0}",
            2,
            "devices[0].gid",
            "mlx5_0",
            "IPv6 address",
        ),
        ("rdma: {gid_subnets: [10.0.0.0/33]}", 1, "rdma.gid_subnets[0]", "10.0.0.0/33", "10.0.0.0/8"),
        ("rdma: {exclude: [mlx5 0]}", 1, "rdma.exclude[0]", "mlx5 0", "mlx5_bond_*"),
        ("devices: [{name: a, address: 0.0.0.0}]", 1, "devices[0].address", "0.0.0.0", "interface"),
        ("devices: [{name: a, address: 'ff02::1'}]", 1, "devices[0].address", "ff02::1", "interface"),
        ("peers: {static: [{address: '127.0.0.1'}]}", 1, "peers.static[0].address", "127.0.0.1", "address:port"),
        ("peers: {static: [{address: '127.0.0.1:0'}]}", 1, "peers.static[0].address", "127.0.0.1:0", "1..65535"),
        ("peers: {static: [7471]}", 1, "peers.static[0]", "7471", ""),
        ("profiles:\n  gain: 0.5\n", 2, "profiles.gain", "0.5", "greater than or equal to 1"),
        (
            "profiles: {peers: {h1: {segment_bytes: 5000}}}",
            1,
            "profiles.peers.h1.segment_bytes",
            "5000",
            "multiple of 128",
        ),
        ("profiles: {peers: {'a b': {}}}", 1, "profiles.peers.a b", "a b", "letters, digits"),
        ("clients: {mode: 660}", 1, "clients.mode", "660", "octal"),
        ("clients: {mode: '0999'}", 1, "clients.mode", "0999", "octal"),
        ("clients: {socket: run/x}", 1, "clients.socket", "run/x", "absolute path"),
        ("host: {host_id: ''}", 1, "host.host_id", "''", "letters"),
        ("host: {location: {rack: 1.5}}", 1, "host.location.rack", "1.5", "text"),
        ("engine: {cpus: [1, 1]}", 1, "engine.cpus", "[1, 1]", "each once"),
        ("engine: {cpus: []}", 1, "engine.cpus", "[]", "at least one"),
        ("probing: {active_bandwidth: {interval_s: 0}}", 1, "probing.active_bandwidth.interval_s", "0", "equal to 1"),
        ("logging: []", 1, "logging", None, "mapping"),
        ("emulation: {links: {a: 1}}", 1, "emulation.links", None, "list"),
    ],
)
def test_a_wrong_value(text: str, line: int, key: str, value: str | None, expected: str) -> None:
    problem = only(text)
    assert (problem.line, problem.key) == (line, key)
    if value is not None:
        assert value in str(problem)
    assert expected in problem.expected
    assert problem.as_dict()["key"] == key


def test_a_host_name_of_the_system_that_is_no_host_id_is_an_error_that_names_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "x" * 64)
    problem = only("metrics: {port: 1}\n")
    assert problem.key == "host.host_id"
    assert "x" * 64 in str(problem)
    assert "63 letters" in problem.expected


def test_the_json_schema_takes_quantities_as_texts_and_refuses_unknown_keys() -> None:
    schema = Config.model_json_schema()
    assert schema["additionalProperties"] is False
    device = schema["$defs"]["TcpDeviceConfig"]
    assert device["additionalProperties"] is False
    assert set(device["required"]) == {"name", "address"}
    assert set(schema["$defs"]["VerbsDeviceConfig"]["required"]) == {"name", "provider", "rdma_device"}
    assert {"const": "auto", "type": "string"} in schema["properties"]["devices"]["anyOf"]
    rate = device["properties"]["rate_bps"]
    assert {"integer", "string"} <= {choice["type"] for choice in rate["anyOf"]}
    assert rate["description"]


def test_what_is_shown_can_be_read_again() -> None:
    config = parse_config("devices: [{name: a, address: '::1', rate_bps: 1Gbit/s}]\nprofiles: {peers: {h: {qps: 3}}}")
    assert parse_config(yaml.safe_dump(config.model_dump(mode="json"))) == config


def test_a_missing_key_says_what_it_is_for() -> None:
    problem = only("devices:\n- name: a\n")
    assert (problem.line, problem.key) == (2, "devices[0].address")
    assert "missing" in problem.what
    assert "IP address" in problem.action


def test_every_problem_is_reported_in_the_order_of_the_file() -> None:
    found = problems("metrics: {port: -1}\nlogging: {level: x}\nnonsense: 1\nprofiles: {adapt: 3}\n")
    assert [p.line for p in found] == [1, 2, 3, 4]
    # The two branches of the union are one problem.
    assert "true or false" in found[3].expected
    assert "'auto'" in found[3].expected


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("peers: {listen: '10.0.0.1:7471'}", "peers", "insecure: true"),
        ("peers: {listen: '0.0.0.0:7471'}", "peers", "insecure: true"),
        ("peers: {listen: '[::]:7471'}", "peers", "insecure: true"),
        ("peers: {static: [{address: 'node7:7471'}]}", "peers", "static[0].address"),
        ("peers: {dns: {name: peers.example}}", "peers", "dns.name"),
        ("peers: {static: [{address: 'localhost:1'}, {address: 'localhost:1'}]}", "peers", "static[1]"),
        ("peers: {retry_min_s: 50, retry_max_s: 10}", "peers", "retry_min_s"),
        ("probing: {min_probes_per_s: 50, max_probes_per_s: 10}", "probing", "min_probes_per_s"),
        ("classification: {thresholds: {rack_ns: 1ms}}", "classification.thresholds", "rack_ns < zone_ns"),
        ("profiles: {segment_min_bytes: 100KiB}", "profiles", "power of two"),
        ("profiles: {segment_min_bytes: 1MiB, segment_max_bytes: 64KiB}", "profiles", "segment_min_bytes"),
        ("profiles: {window_min_bytes: 128MiB}", "profiles", "window_max_bytes"),
        ("profiles: {segment_min_bytes: 256KiB}", "profiles", "window_min_bytes"),
        (
            "profiles: {segment_max_bytes: 2MiB}\ntransport: {max_segment_bytes: 1MiB}",
            "",
            "transport.max_segment_bytes",
        ),
        ("transport: {heartbeat_s: 10}", "transport", "op_deadline_s"),
        ("emulation: {links: [{peer: a}, {peer: a}]}", "emulation", "links[1].peer"),
        ("clients: {socket: /a}\nadmin: {socket: /a}", "", "two different paths"),
        ("devices: [{name: a, address: '::1'}, {name: a, address: '::1'}]", "devices", "[1].name"),
        ("clients: {max_ring_entries: 100}", "clients.max_ring_entries", "power of two"),
    ],
)
def test_values_that_do_not_go_together(text: str, key: str, words: str) -> None:
    problem = only(text)
    assert problem.key == key
    assert words in str(problem)


def test_plain_http_beyond_loopback_needs_words() -> None:
    config = parse_config("peers: {listen: '0.0.0.0:1', insecure: true, static: [{address: 'node7:1'}]}")
    assert config.peers.insecure
    parse_config("peers: {listen: '127.5.5.5:1', static: [{address: '[::1]:1'}, {address: 'localhost:2'}]}")


def test_texts_that_look_like_numbers_and_quantities() -> None:
    config = parse_config(
        "host: {host_id: 17, location: {rack: 0012, zone: no}}\n"
        "devices:\n- {name: a, address: 127.0.0.1, rate_bps: 100Gbit/s}\n- {name: b, address: '::1', rail: 5}\n"
        "classification: {thresholds: {rack_ns: 1ms, zone_ns: 2ms, building_ns: 3000000}, overrides: {h: zone}}\n"
        "profiles: {adapt: false, classes: {rack: {qps: 2, window_bytes: 512KiB}}}\n"
        "clients: {mode: 0600}\n"
    )
    assert config.host.host_id == "17"
    assert config.host.location.rack == "0012"
    assert config.host.location.zone == "no"
    assert [device.rail for device in config.devices] == [0, 5]
    assert config.devices[0].rate_bps == 100 * 10**9
    assert config.classification.thresholds.building_ns == 3_000_000
    assert config.classification.overrides["h"] == "zone"
    assert config.profiles.adapt is False
    assert config.profiles.classes.rack is not None
    assert config.profiles.classes.rack.window_bytes == 512 * 1024
    assert config.profiles.classes.rack.segment_bytes is None
    assert config.clients.mode == "0600"


@pytest.mark.parametrize("text", ["", "devices:", "devices: auto", "devices: []"])
def test_without_devices_they_are_looked_for(text: str) -> None:
    config = parse_config(text)
    assert config.devices == ()
    assert config.model_dump(mode="json")["devices"] == "auto"
    assert parse_config(yaml.safe_dump(config.model_dump(mode="json"))) == config


VERBS = """
devices:
- name: rdma0
  provider: verbs
  rdma_device: mlx5_0
  gid: 10.1.2.3
  traffic_class: 104
- {name: rdma1, provider: verbs, rdma_device: mlx5_1, port: 2, mtu_bytes: 4KiB, rate_bps: 400Gbit/s}
- {name: tcp0, address: 127.0.0.1}
rdma: {gid_subnets: [10.1.2.3/8, "fd00::/8"], exclude: [mlx5_bond_0, "mlx5_*/2"], traffic_class: 96}
"""


def test_rdma_devices() -> None:
    config = parse_config(VERBS)
    first, second, third = config.devices
    assert isinstance(first, VerbsDeviceConfig)
    assert isinstance(second, VerbsDeviceConfig)
    assert isinstance(third, TcpDeviceConfig)
    assert (first.rdma_device, first.port, first.gid, first.traffic_class) == ("mlx5_0", 1, "::ffff:10.1.2.3", 104)
    assert (second.port, second.mtu_bytes, second.rate_bps, second.rail) == (2, 4096, 400 * 10**9, 1)
    assert config.rdma.gid_subnets == ("10.0.0.0/8", "fd00::/8")
    assert parse_config(yaml.safe_dump(config.model_dump(mode="json"))) == config


def test_keys_belong_to_a_provider() -> None:
    problem = only("devices:\n- name: a\n  provider: tcp\n  address: 127.0.0.1\n  rdma_device: mlx5_0\n")
    assert (problem.line, problem.key, problem.what) == (5, "devices[0].rdma_device", "unknown key")
    assert "address" in problem.expected
    problem = only("devices:\n- name: a\n  provider: verbs\n  rdma_device: mlx5_0\n  address: 127.0.0.1\n")
    assert (problem.line, problem.key, problem.what) == (5, "devices[0].address", "unknown key")
    assert "rdma_device" in problem.expected
    problem = only("devices:\n- name: a\n  provider: verbs\n  rdma_device: mlx5_0\n  trafic_class: 3\n")
    assert "traffic_class" in problem.action
    problem = only("devices:\n- name: a\n  rdma_device: mlx5_0\n")
    assert (problem.key, problem.what) == ("devices[0].provider", "the key is missing")


def test_a_port_is_one_device() -> None:
    entry = "provider: verbs, rdma_device: mlx5_0"
    problem = only(f"devices: [{{name: a, {entry}}}, {{name: b, {entry}, port: 1}}]")
    assert problem.key == "devices"
    assert "[1].rdma_device 'mlx5_0' port 1 is also [0]" in problem.what
    assert len(parse_config(f"devices: [{{name: a, {entry}}}, {{name: b, {entry}, port: 2}}]").devices) == 2


def test_an_emulated_link_is_found_by_its_peer_before_the_wildcard() -> None:
    emulation = parse_config("emulation: {links: [{delay_ns: 1ms}, {peer: b, delay_ns: 2ms}]}").emulation
    assert [getattr(emulation.link_for(peer), "delay_ns", None) for peer in ("a", "b")] == [1_000_000, 2_000_000]
    assert parse_config("emulation: {links: [{peer: b}]}").emulation.link_for("a") is None


def test_a_configuration_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.metrics.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("text", ["- a", "17", "'text'"])
def test_the_file_must_be_a_mapping(text: str) -> None:
    problem = only(text)
    assert problem.line == 1
    assert "mapping" in problem.expected


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("metrics: {port: 0}\n", encoding="utf-8-sig")
    assert load_config(path).metrics.port == 0
    for content, words in (
        (b"a: \xff\n", "not UTF-8"),
        (b"ok: 1\nb: \xc3\x28\n", "c.yaml:2: "),
        (b"a" * (MAX_FILE_BYTES + 1), "larger than"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            load_config(path)
    for missing, words in ((tmp_path / "none.yaml", "no such file"), (tmp_path, "regular file"), ("a\0b", "cannot be")):
        with pytest.raises(ConfigError, match=words):
            load_config(missing)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="regular file"):
        load_config(fifo)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(ConfigError, match="permission denied"):
        load_config(path)


def test_the_example_holds_the_defaults() -> None:
    assert load_config(ROOT / "configs" / "dqplbd.yaml") == Config()


def test_fields_are_found_by_key_path() -> None:
    for path in (("devices", 0, "rate_bps"), ("profiles", "peers", "h", "qps"), ("profiles", "classes", "rack", "qps")):
        model, field = field_at(path)
        assert model is not None
        assert field is not None
    assert field_at(("devices", 0, "x"))[1] is None
    assert field_at(("devices", 0, "rdma_device"))[0] is VerbsDeviceConfig
    assert field_at(("devices", 0, "<tcp>", "rdma_device"))[1] is None
    assert field_at(("devices", 0, "<verbs>", "port"))[0] is VerbsDeviceConfig
    assert field_at(("nothing", "x"))[1] is None


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.text(max_size=8) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "address", "provider", "rdma_device", "rack", "qps", "host_id", "x", "peer"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@settings(max_examples=200)
@given(st.data())
def test_any_values_for_any_keys_give_a_configuration_or_a_config_error(data: st.DataObject) -> None:
    document: dict[str, object] = {}
    for section in data.draw(st.sets(st.sampled_from([*Config.model_fields, "other"]), max_size=4)):
        field = Config.model_fields.get(section)
        keys = getattr(field.annotation, "model_fields", {"name": None}) if field is not None else {"x": None}
        document[section] = data.draw(
            _VALUES | st.dictionaries(st.sampled_from(list(keys)), _VALUES, max_size=3), label=section
        )
    try:
        config = parse_config(yaml.safe_dump(document))
    except ConfigError as error:
        for problem in error.problems:
            assert problem.what
            assert problem.expected
            assert problem.line is None or problem.line >= 1
    else:
        assert config.rdma


@given(st.text(max_size=120))
def test_any_text_gives_a_configuration_or_a_config_error(text: str) -> None:
    try:
        parse_config(text)
    except ConfigError as error:
        said = [str(problem) for problem in error.problems]
    else:
        said = ["accepted"]
    assert said
