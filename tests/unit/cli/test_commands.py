# SPDX-License-Identifier: Apache-2.0
"""Each command: its output for people, its JSON, its exit code, and where each goes."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dqplbd
from dqplbd.admin.model import ConfigProblem, Live, PathClass, Peer, ProbeSample

if TYPE_CHECKING:
    from tests.unit.conftest import SampleView

Run = Callable[..., subprocess.CompletedProcess[str]]
AskJson = Callable[..., Any]

READING = [
    (["status"], "status"),
    (["devices"], "devices"),
    (["peers"], "peers"),
    (["paths"], "paths"),
    (["path", "explain", "peer1"], "explanations"),
    (["clients"], "clients"),
    (["config", "show"], "config"),
    (["top", "--once"], "top"),
    (["doctor"], "doctor"),
    (["probe", "peer1"], "probe"),
]


@pytest.mark.parametrize(("arguments", "kind"), READING, ids=lambda value: " ".join(value) if value else "")
def test_every_command_speaks_to_people_and_programs(
    ask: Run, ask_json: AskJson, arguments: list[str], kind: str
) -> None:
    assert ask_json(kind, *arguments)
    done = ask(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.endswith("\n")
    assert "\x1b" not in done.stdout
    assert not done.stdout.lstrip().startswith(("{", "["))


@pytest.mark.parametrize("arguments", [arguments for arguments, _ in READING], ids=" ".join)
def test_no_daemon_is_code_3_and_names_the_socket(dqplb: Run, tmp_path: Path, arguments: list[str]) -> None:
    missing = str(tmp_path / "none.sock")
    done = dqplb("--socket", missing, *arguments)
    assert done.returncode == 3
    said = done.stdout if arguments == ["doctor"] else done.stderr
    assert missing in said
    assert "systemctl status dqplbd" in said
    if arguments != ["doctor"]:
        assert done.stdout == ""


def test_the_socket_comes_from_the_environment(dqplb: Run, admin_socket: str) -> None:
    done = dqplb("status", env={"DQPLB_ADMIN_SOCKET": admin_socket})
    assert done.returncode == 0
    assert "self" in done.stdout
    done = dqplb("--socket", "/nowhere/x.sock", "status", env={"DQPLB_ADMIN_SOCKET": admin_socket})
    assert done.returncode == 3
    assert "/nowhere/x.sock" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["status", "--no-such"],
        ["paths", "--top", "0"],
        ["path", "explain"],
        ["probe", "x", "-c", "0"],
    ],
    ids=" ".join,
)
def test_usage_is_code_2(ask: Run, arguments: list[str]) -> None:
    done = ask(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Usage" in done.stderr


def test_a_refused_request_has_a_hint_and_is_code_2_when_an_option_is_wrong(ask: Run) -> None:
    for arguments, code in (
        (["path", "explain", "nobody"], 1),
        (["probe", "nobody"], 1),
        (["paths", "--sort", "colour"], 2),
        (["paths", "--class", "galaxy"], 2),
    ):
        done = ask(*arguments)
        assert done.returncode == code
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 2
        assert arguments[-1] in done.stderr


def test_tables_are_not_cut_when_piped(ask: Run, view: "SampleView") -> None:
    long = "x" * 200
    view.peer_list.append(Peer(host_id=long, source="static", state="refused", reason="r" * 300))
    done = ask("peers", env={"COLUMNS": "20"})
    row = next(line for line in done.stdout.splitlines() if long in line)
    assert row.endswith("r" * 300)


def test_names_cannot_move_the_cursor(ask: Run, view: "SampleView") -> None:
    view.client_list = [view.client_list[0].model_copy(update={"name": "a\x1b[2Jb\nc"})]
    done = ask("clients")
    assert "a?[2Jb?c" in done.stdout
    assert len(done.stdout.splitlines()) == 2


def test_paths_options(ask_json: AskJson) -> None:
    assert [path["peer"] for path in ask_json("paths", "paths", "--class", "rack")] == ["peer0"]
    assert [path["peer"] for path in ask_json("paths", "paths", "--sort", "rtt", "--top", "1")] == ["peer3"]
    assert ask_json("paths", "paths", "--peer", "nobody") == []


@pytest.mark.parametrize(("inflight_bytes", "shown"), [(0, "(62ms)"), (4096, "62ms")])
def test_a_delay_without_data_under_way_is_in_parentheses(
    ask: Run, view: "SampleView", inflight_bytes: int, shown: str
) -> None:
    live = Live(queue_delay_ns=62_000_000, inflight_bytes=inflight_bytes)
    view.path_list = [view.path("p1", "tcp0", PathClass.RACK, live=live)]
    assert ask("paths").stdout.splitlines()[1].split()[-1] == shown


def test_path_explain_gives_formula_numbers_and_limit(ask: Run, ask_json: AskJson) -> None:
    text = ask("path", "explain", "peer0").stdout
    assert "1. Measured" in text
    assert "2. Class" in text
    assert "3. Profile" in text
    window = next(line for line in text.splitlines() if line.startswith("window_bytes"))
    assert "512KiB" in window
    assert "gain x bdp_bytes" in window
    assert "1.25 x" in window
    assert window.endswith("bdp")
    [explanation] = ask_json("explanations", "path", "explain", "peer0")
    steps = {(step["topic"], step["name"]): step for step in explanation["steps"]}
    assert steps["profile", "window_bytes"]["value"] == 512 * 1024
    assert steps["class", "path_class"]["limited_by"] == "rtt"
    assert steps["measured", "rtt_ns"]["value"] == 8000
    for name in ("rtt_ns", "rate_bps", "bdp_bytes", "window_bytes", "segment_bytes", "qps", "outstanding_per_qp"):
        step = steps["profile", name]
        assert step["formula"], name
        assert step["substituted"], name


def test_json_has_base_units(ask_json: AskJson) -> None:
    allowed = re.compile(r"_(bytes|bps|ns|seconds|ratio)$")

    def floats(value: Any, key: str = "") -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                floats(inner, name)
        elif isinstance(value, list):
            for inner in value:
                floats(inner, key)
        elif isinstance(value, float):
            assert allowed.search(key), f"{key} is a fraction without a unit"

    for arguments, kind in READING:
        if kind not in ("config", "explanations"):
            floats(ask_json(kind, *arguments))


def test_reload_that_is_refused_is_code_78(ask: Run, ask_json: AskJson, view: "SampleView") -> None:
    assert ask("reload").returncode == 0
    view.reload_problems = [ConfigProblem(file="x.yaml", line=3, key="profiles.gain", problem="bad", expected="1..8")]
    done = ask("reload")
    assert done.returncode == 78
    assert "x.yaml:3: profiles.gain: bad; expected 1..8" in done.stderr
    assert "old configuration" in done.stderr
    assert ask_json("reload", "reload", code=78)["ok"] is False


def test_reset_peaks(ask: Run, view: "SampleView") -> None:
    assert "4 paths" in ask("reset-peaks").stdout
    assert view.resets == 1


def test_config_check_needs_no_daemon(dqplb: Run, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("profiles: {gain: 2}\n")
    bad.write_text("profiles:\n  gain: 99\n  gian: 1\n")
    done = dqplb("config", "check", str(good))
    assert (done.returncode, done.stderr) == (0, "")
    done = dqplb("config", "check", str(bad))
    assert done.returncode == 78
    assert done.stdout == ""
    assert f"{bad}:2: profiles.gain" in done.stderr
    assert f"{bad}:3: profiles.gian" in done.stderr
    done = dqplb("config", "check", str(bad), "--json")
    assert done.returncode == 78
    problems = json.loads(done.stdout)["data"]["problems"]
    assert [(problem["line"], problem["key"]) for problem in problems] == [(2, "profiles.gain"), (3, "profiles.gian")]
    assert dqplb("config", "check", str(tmp_path / "none.yaml")).returncode == 78


def test_what_config_show_prints_can_be_loaded_again(dqplb: Run, tmp_path: Path) -> None:
    shown = tmp_path / "shown.yaml"
    shown.write_text(dqplb("config", "show", "--defaults").stdout)
    assert dqplb("config", "check", str(shown)).returncode == 0
    shown.write_text(shown.read_text().replace("gain: 1.25", "gain: 1.5"))
    done = dqplb("config", "show", "--file", str(shown), "--json")
    assert json.loads(done.stdout)["data"]["config"]["profiles"]["gain"] == 1.5
    shown.write_text("nonsense: 1\n")
    assert dqplb("config", "show", "--file", str(shown)).returncode == 78


def test_what_is_not_an_admin_socket_is_named(dqplb: Run, tmp_path: Path) -> None:
    assert "is not a socket" in dqplb("--socket", str(tmp_path), "status").stderr
    other = tmp_path / "client.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(other))
        listener.listen()
        done = dqplb("--socket", str(other), "status")
    assert done.returncode == 3
    assert "socket of another kind" in done.stderr
    assert "admin.socket" in done.stderr


def test_no_path_of_that_peer_is_said(ask: Run, ask_json: AskJson) -> None:
    done = ask("paths", "--peer", "nobody")
    assert done.returncode == 0
    assert "no path is of that" in done.stderr
    assert ask_json("paths", "paths", "--peer", "nobody") == []


def test_config_schema_describes_every_section(dqplb: Run) -> None:
    schema = json.loads(dqplb("config", "schema").stdout)
    assert {"host", "devices", "peers", "profiles", "metrics"} <= set(schema["properties"])


def test_doctor_fails_on_a_failed_check(ask: Run, ask_json: AskJson, view: "SampleView") -> None:
    view.device_list = [view.device("tcp0", 0, up=False, error="interface eth9 is down", netdev="eth9")]
    done = ask("doctor")
    assert done.returncode == 1
    assert "ip link set eth9 up" in done.stdout
    findings = ask_json("doctor", "doctor", code=1)
    assert [one["check"] for one in findings if one["level"] == "fail"] == ["devices"]


def test_probe_fails_when_all_is_lost(ask: Run, view: "SampleView") -> None:
    async def lost(peer: str, count: int) -> Any:
        report = await type(view).probe(view, peer, count)
        fates = [ProbeSample(result="timeout"), ProbeSample(result="send_error"), ProbeSample(result="send_error")]
        changes = {"lost": 3, "samples": fates}
        return report.model_copy(update={"paths": [p.model_copy(update=changes) for p in report.paths]})

    view.probe = lost  # type: ignore[method-assign]
    done = ask("probe", "peer1")
    assert done.returncode == 1
    assert "1 without answer, 2 could not be sent" in done.stdout


def test_a_reader_that_goes_away_is_no_traceback(admin_socket: str, view: "SampleView", tmp_path: Path) -> None:
    view.path_list = [view.path(f"p{i}", "tcp0", PathClass.RACK, number=i, live=Live()) for i in range(3000)]
    package = str(Path(dqplbd.__file__).parents[1])
    command = f"{sys.executable} -P -m dqplbd.cli.main --socket {admin_socket} paths | head -1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": package}
    )
    assert done.stderr == ""
    assert done.stdout.startswith("PEER")


def on_terminal(arguments: list[str], env: dict[str, str], stop_after: bytes | None = None) -> bytes:
    """What a command writes on a terminal; it gets Ctrl-C once it wrote ``stop_after``."""
    package = str(Path(dqplbd.__file__).parents[1])
    pid, terminal = pty.fork()
    if pid == 0:
        clean = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and so would this
        os.execve(
            sys.executable,
            [sys.executable, "-P", "-m", "dqplbd.cli.main", *arguments],
            {**clean, "TERM": "xterm-256color", "COLUMNS": "200", "PYTHONPATH": package, **env},
        )
    output = b""
    asked = False
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # EIO: the other side is closed
            break
        if not chunk:
            break
        output += chunk
        if stop_after is not None and not asked and stop_after in output:
            os.write(terminal, b"\x03")
            asked = True
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, output
    return output


def test_a_terminal_gets_colour_unless_told_not_to(admin_socket: str) -> None:
    arguments = ["--socket", admin_socket, "peers"]
    assert b"\x1b[" in on_terminal(arguments, {})
    plain = on_terminal(arguments, {"NO_COLOR": "1"})
    assert b"\x1b" not in plain
    assert b"peer3" in plain


def test_top_runs_until_interrupted(admin_socket: str) -> None:
    output = on_terminal(["--socket", admin_socket, "top", "-d", "0.2"], {}, stop_after=b"peer3")
    assert output.count(b"peer3") >= 1
    assert output.rstrip().endswith((b"\x1b[?1049l", b"\x1b[?25h"))  # the screen is given back


def test_help_imports_nothing_heavy(dqplb: Run) -> None:
    """What takes long to import is imported by the command that needs it; importing is what start-up time is."""
    heavy = "pydantic|rich|aiohttp|yaml|prometheus_client|pyroute2|asyncio|cffi"
    code = f"""
import re, sys
from dqplbd.cli import main
try:
    main.app(["--help"], prog_name="dqplb")
except SystemExit:
    pass
print(sorted(name for name in sys.modules if re.fullmatch("{heavy}", name)), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(dqplbd.__file__).parents[1])},
    )
    assert done.stderr.strip() == "[]"
    # The wall clock only says something against that of the bare interpreter on the same machine at the same time.
    best = {}
    for name, arguments in (("bare", ["-c", "import typer"]), ("help", ["-P", "-m", "dqplbd.cli.main", "--help"])):
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, *arguments],
                check=True,
                capture_output=True,
                env={**os.environ, "PYTHONPATH": str(Path(dqplbd.__file__).parents[1])},
            )
            times.append(time.perf_counter() - begin)
        best[name] = min(times)
    assert best["help"] < 3 * best["bare"]
