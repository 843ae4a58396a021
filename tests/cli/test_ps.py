from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from io import BytesIO, TextIOWrapper
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from rich.console import Console

from hearth.control.datadir import DataDir
from hearth.control.deploy.registry import Registry
from hearth.control.observe.log_rotation import rotate
from hearth.control.observe.views import UnloadView
from tests.cli.fake_service import POOL, PROCESSES, FakeService, serving
from tests.cli.shell import Hearth


@contextmanager
def usual_port_leads_to(service: FakeService) -> Iterator[None]:
    """Have connections to port 8000 of this machine reach a service, without taking the port."""
    connect, target = socket.create_connection, urlsplit(service.url)

    def redirected(address: tuple[str, int], *rest: object, **options: object) -> socket.socket:
        usual = address[1] == 8000
        return connect((target.hostname, target.port) if usual else address, *rest, **options)  # type: ignore[arg-type] # as they came

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", redirected)
        yield


@pytest.fixture
def recorded(data_dir: Path, service: FakeService) -> Iterator[FakeService]:
    """The service as one that runs on the data directory and wants its token."""
    service.key = "token"
    with DataDir.hold(data_dir) as held:
        service.announce(held)
        yield service


def test_ps_and_doctor_say_why_a_worker_is_not_ready(
    hearth: Hearth, recorded: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "worker 0 ended 3 times before it was ready: it has no memory; next try in 8 s"
    worker = replace(PROCESSES.workers[0], state="failing", reason=reason)
    monkeypatch.setattr("tests.cli.fake_service.PROCESSES", replace(PROCESSES, workers=(worker,)))
    shown = hearth("ps").out.splitlines()
    assert "failing" in shown[1]
    assert reason in shown
    (told,) = json.loads(hearth("doctor", "--json").out)["service"]["workers"]
    assert told.endswith(reason)


def test_open_prints_the_address_and_opens_a_browser_where_there_is_one(
    hearth: Hearth, recorded: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert hearth("open").out == f"{recorded.url}/\n"
    assert not opened
    monkeypatch.setenv("DISPLAY", ":0")
    hearth("open")
    assert opened == [f"{recorded.url}/"]
    assert hearth("open", "--url", "http://127.0.0.1:9").code == 3


def test_ps_shows_workers_models_and_the_queue(hearth: Hearth, recorded: FakeService) -> None:
    assert hearth("ps").out.splitlines() == [
        "WORKER  PID   DEVICE       STATE  MEMORY              RESTARTS",
        "w0      4711  Neoverse-N1  ready  3.7 GiB of 8.0 GiB  1",
        "",
        "w0  8.0 GiB",
        "  ░░░░░░░░░░░░░░░░░░░░░░████▒≈································",
        "  aaaaaaaaaaaaaaaaaaaaaabbbbb",
        "  █ weights 538 MiB  ░ retained 3.0 GiB  ▒ KV 100 MiB  ≈ workspace 100 MiB",
        "  · free 4.3 GiB",
        "",
        "MODEL  KEY  WORKER  STATE     WEIGHTS             SHARED  KV BLOCKS              RUNNING   TURN  "
        "TIME LEFT",
        "qwen   a    w0      retained  3.0 GiB of 4.0 GiB  -       -                      0         -     -",
        "smol   b    w0      busy      538 MiB of 538 MiB  -       30+10 of 100, 100 MiB  1 of 256  now   -",
        "",
        "host memory: 1.5 GiB of 4.0 GiB",
        "",
        "requests: 1 running, 2 waiting",
    ]


def test_ps_shows_whose_turn_it_is_and_who_is_due_when(
    hearth: Hearth, recorded: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen, smol = PROCESSES.models
    waiting = replace(qwen, state="paused", num_running=1, due_in_s=0.3, is_pin_refused=True)
    late = replace(smol, is_in_turn=False, due_in_s=-1.25, state="waiting")
    monkeypatch.setattr("tests.cli.fake_service.PROCESSES", replace(PROCESSES, models=(waiting, late)))
    lines = hearth("ps").out.splitlines()
    assert [line.split()[3] for line in lines if line[:4] in ("qwen", "smol")][:2] == ["paused", "waiting"]
    assert any("due in 300 ms" in line for line in lines)
    assert any("1.250 s late" in line for line in lines)
    assert "qwen cannot be pinned: other models would have no memory for their turns" in lines


def test_ps_shows_how_long_steps_take_in_stages_and_on_their_way(
    hearth: Hearth, recorded: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    smol = PROCESSES.models[1]
    first = replace(smol, layers=(0, 16), stage_s=(0.0019, 0.002), hops_s=0.00011, num_flights=2)
    last = replace(smol, worker="w1", layers=(16, 30), transport="shared memory", is_dropped=True)
    monkeypatch.setattr("tests.cli.fake_service.PROCESSES", replace(PROCESSES, models=(first, last)))
    assert hearth("ps").out.splitlines()[-8:-4] == [
        "smol is in stages: w0 has layers 0 to 15",
        "  a decode step takes 1.9 ms + 2.0 ms in its stages and 0.1 ms between them, 2 are in flight",
        "",
        "smol is in stages to have more KV memory: w1 has layers 16 to 29, its input by shared memory",
    ]


@pytest.mark.parametrize(
    ("is_measured", "line"),
    [
        (True, "  outside the pool: at most 1.5 GiB, measured"),
        (False, "  outside the pool: at most 1.5 GiB, estimated until its models have snapshots"),
    ],
)
def test_ps_shows_what_a_worker_may_take_besides_its_pool(
    hearth: Hearth, recorded: FakeService, monkeypatch: pytest.MonkeyPatch, is_measured: bool, line: str
) -> None:
    pool = replace(POOL, torch_limit_bytes=3 << 29, is_torch_limit_measured=is_measured)
    worker = replace(PROCESSES.workers[0], pool=pool)
    monkeypatch.setattr("tests.cli.fake_service.PROCESSES", replace(PROCESSES, workers=(worker,)))
    assert line in hearth("ps").out.splitlines()


def test_ps_draws_with_plain_signs_where_the_terminal_has_no_others(
    hearth: Hearth, recorded: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = TextIOWrapper(BytesIO(), "ascii")
    monkeypatch.setattr("hearth.cli.ps.out", Console(file=shown, width=80))
    assert hearth("ps").code == 0
    shown.seek(0)
    assert "  ======================####+~................................\n" in shown.read()


def test_ps_json_is_what_the_service_says(hearth: Hearth, recorded: FakeService) -> None:
    view = json.loads(hearth("ps", "--json").out)
    assert (view["workers"][0]["pid"], view["models"][1]["state"], view["num_waiting"]) == (4711, "busy", 2)
    assert view["workers"][0]["pool"]["parts"][0] == {
        **{"kind": "weights", "state": "retained", "model": "qwen", "num_bytes": 3 << 30}
    }
    assert (view["models"][0]["is_hosted"], view["models"][1]["kv_cached_blocks"]) == (False, 10)


KEPT, HALF = 512 << 20, 256 << 20


@pytest.mark.parametrize(
    ("view", "said"),
    [
        (
            UnloadView("smol", False, True, 0, KEPT, 0),
            "keeps 512 MiB of device memory until it is needed",
        ),
        (UnloadView("smol", True, True, 0, KEPT, 0), "frees 512 MiB of device memory"),
        (
            UnloadView("smol", False, True, 1, KEPT, 0),
            "finishes 1 request, then it keeps 512 MiB of device memory until it is needed",
        ),
        (
            UnloadView("smol", True, True, 2, KEPT, HALF),
            "finishes 2 requests, then it frees 512 MiB of device memory; 256 MiB stay in host memory "
            "until it is needed",
        ),
        (UnloadView("smol", True, True, 0, 0, 0), "frees its memory"),  # it is on its way there
        (UnloadView("smol", False, False, 0, 0, 0), "is not in device memory"),
        (
            UnloadView("smol", True, False, 0, 0, HALF),
            "is not in device memory; 256 MiB stay in host memory until it is needed",
        ),
        (UnloadView("smol", False, False, 3, 0, 0), "is not in device memory yet: 3 requests will load it"),
    ],
)
def test_stop_says_what_becomes_of_the_model_and_of_its_memory(
    hearth: Hearth, recorded: FakeService, view: UnloadView, said: str
) -> None:
    recorded.unloaded = view
    shown = hearth("stop", "smol", *(["--free"] if view.free else []))
    assert (shown.code, shown.out) == (0, f"smol {said}\n")
    assert recorded.asked == [("POST", "/hearth/models/smol/unload", {"free": view.free})]


def test_a_key_that_is_given_beats_the_token(hearth: Hearth, recorded: FakeService) -> None:
    shown = hearth("ps", "--api-key", "wrong")
    assert (shown.code, shown.err) == (
        2,
        "hearth: the API key is missing or wrong; pass the key that `hearth keys add` printed, by "
        "`--api-key` or HEARTH_API_KEY\n",
    )


def test_an_unknown_request_is_exit_code_3(hearth: Hearth, recorded: FakeService) -> None:
    shown = hearth("explain", "r9")
    assert (shown.code, shown.err) == (3, "hearth: nothing is known of request `r9`\n")


def test_without_an_id_explain_takes_the_last_request(hearth: Hearth, recorded: FakeService) -> None:
    assert hearth("explain").err == "hearth: nothing is known of request `last`\n"


def test_explain_prints_the_waterfall(hearth: Hearth, recorded: FakeService) -> None:
    shown = hearth("explain", "r1").out
    assert shown.startswith("r1  smol  stop\n")
    assert "estimated cost per worker" in shown
    assert "█" in shown


def test_explain_json_is_what_the_service_says(hearth: Hearth, recorded: FakeService) -> None:
    explained = json.loads(hearth("explain", "r1", "--json").out)
    assert (explained["why"], explained["spans"][1]["what"]) == ("free_room", "load")


@pytest.mark.parametrize("command", [("ps",), ("stop", "smol"), ("explain", "r1")])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_directory_without_a_service_is_exit_code_3_whoever_else_listens(
    hearth: Hearth, tmp_path: Path, service: FakeService, command: tuple[str, ...], is_there: bool
) -> None:
    """The service of another directory listens where services usually do."""
    other, asked = tmp_path / "other", tmp_path / "asked"
    if is_there:
        DataDir.open(asked)
    with DataDir.hold(other) as held, usual_port_leads_to(service):
        service.announce(held)
        shown = hearth(*command, "--data-dir", str(asked))

    assert (shown.code, shown.out, shown.err.count("\n")) == (3, "", 1)
    assert (
        f"no service runs on the data directory `{asked}`; start one with `hearth serve --data-dir"
        in shown.err
    )
    assert "`--url`" in shown.err
    assert (service.asked, service.health_keys) == ([], [])
    assert asked.exists() == is_there


@pytest.mark.parametrize(
    "command", [("ps",), ("stop", "smol"), ("list",), ("show", "smol"), ("run", "smol", "x")]
)
def test_a_service_that_is_not_the_directorys_is_asked_nothing_and_sees_no_token(
    hearth: Hearth, data_dir: Path, service: FakeService, command: tuple[str, ...]
) -> None:
    with DataDir.hold(data_dir) as held:
        service.announce(held)
        service.instance_id = "of another machine"
        shown = hearth(*command)

    assert (shown.code, shown.out) == (3, "")
    assert f"should be at `{service.url}`, but another service answers there" in shown.err
    assert (service.asked, service.health_keys) == ([], [None])


def test_a_service_that_does_not_answer_where_it_says_is_told_with_its_directory(
    hearth: Hearth, data_dir: Path, service: FakeService
) -> None:
    with DataDir.hold(data_dir) as held:
        service.url = "http://127.0.0.1:1"
        service.announce(held)
        shown = hearth("ps")
    assert (shown.code, shown.out) == (3, "")
    assert f"the service on `{data_dir}`" in shown.err
    assert "no service answers at `http://127.0.0.1:1`" in shown.err


def test_no_proxy_stands_between_a_directory_and_its_service(
    hearth: Hearth, data_dir: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    service.url = service.url.replace("127.0.0.1", "0.0.0.0")  # this machine too, and no loopback address
    with DataDir.hold(data_dir) as held:
        service.announce(held)
        assert hearth("ps").code == 0


def test_doctor_says_what_is_wrong_with_the_file_of_a_service(hearth: Hearth, data_dir: Path) -> None:
    with DataDir.hold(data_dir) as held:
        (held.run_path / "service.json").write_text("{}")
        report = json.loads(hearth("doctor", "--json").out)["service"]
    assert "was not written by a service of this Hearth" in report["status"]
    assert report["url"] is None


def test_a_url_beats_the_directory_of_the_environment(
    hearth: Hearth, data_dir: Path, service: FakeService
) -> None:
    with serving() as other, DataDir.hold(data_dir) as held:
        other.announce(held)
        assert hearth("ps", "--url", service.url).code == 0
        assert (other.asked, other.health_keys) == ([], [])
    assert service.bodies("/hearth/ps") == [None]


def test_a_url_and_a_directory_may_name_one_service(
    hearth: Hearth, recorded: FakeService, data_dir: Path
) -> None:
    recorded.url = recorded.url.replace("127.0.0.1", "localhost")
    assert hearth("ps", "--url", recorded.url, "--data-dir", str(data_dir)).code == 0


@pytest.mark.parametrize("is_held", [False, True])
def test_a_url_and_a_directory_of_two_services_are_wrong_input(
    hearth: Hearth, service: FakeService, tmp_path: Path, is_held: bool
) -> None:
    with ExitStack() as stack:
        if is_held:
            other = stack.enter_context(serving())
            other.instance_id = "another"
            other.announce(stack.enter_context(DataDir.hold(tmp_path)))
        shown = hearth("stop", "smol", "--url", service.url, "--data-dir", str(tmp_path))
    assert (shown.code, shown.out) == (2, "")
    assert "drop one of them" in shown.err
    assert service.asked == []


@pytest.mark.parametrize("command", [("ps",), ("stop", "smol"), ("explain", "r1")])
def test_no_service_is_one_line_and_exit_code_3(
    hearth: Hearth, data_dir: Path, command: tuple[str, ...]
) -> None:
    shown = hearth(*command, "--url", "http://127.0.0.1:1")
    assert (shown.code, shown.out, shown.err.count("\n")) == (3, "", 1)
    assert "no service answers at `http://127.0.0.1:1`" in shown.err


def test_a_service_that_was_killed_is_not_asked(hearth: Hearth, data_dir: Path, service: FakeService) -> None:
    with DataDir.hold(data_dir) as held:
        service.announce(held)
        left = (held.run_path / "service.json").read_bytes()
    (data_dir / "run" / "service.json").write_bytes(left)

    assert json.loads(hearth("list", "--json").out) == []
    assert (service.asked, service.health_keys) == ([], [])


def test_a_service_that_starts_is_waited_for(
    hearth: Hearth, data_dir: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.key = "token"
    with DataDir.hold(data_dir) as held:

        def sleep(delay_s: float) -> None:
            service.announce(held)

        monkeypatch.setattr("hearth.cli.endpoint.time.sleep", sleep)
        assert json.loads(hearth("list", "--json").out)[0]["name"] == "smol"


def test_a_service_that_ends_is_waited_for(
    hearth: Hearth, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        stack.enter_context(DataDir.hold(data_dir))
        monkeypatch.setattr("hearth.cli.endpoint.time.sleep", lambda delay_s: stack.close())
        assert json.loads(hearth("list", "--json").out) == []


@pytest.mark.parametrize(
    "command", [("deploy", "hf:A/B"), ("rm", "tiny", "--yes"), ("list",), ("run", "m", "x")]
)
def test_nothing_is_done_behind_the_back_of_a_service_that_starts(
    hearth: Hearth, data_dir: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("hearth.cli.endpoint.WAIT_S", 0.0)
    with DataDir.hold(data_dir) as held:
        shown = hearth(*command)
        assert not held.registry_path.exists()
    assert (shown.code, shown.out) == (1, "")
    told = " ".join(shown.err.split())
    assert "has not announced its address within" in told
    assert "first start after an update may take minutes" in told


def test_doctor_does_not_wait(hearth: Hearth, data_dir: Path) -> None:
    with DataDir.hold(data_dir):
        assert json.loads(hearth("doctor", "--json").out)["service"]["status"] == "starting or stopping"


def test_logs_prints_the_end_of_the_log(hearth: Hearth, data_dir: Path) -> None:
    path = DataDir.open(data_dir).log_path
    path.write_text("one\ntwo\nthree\n", encoding="utf-8")
    assert hearth("logs", "-n", "2").out == "two\nthree\n"


def test_logs_goes_on_in_what_was_rotated(hearth: Hearth, data_dir: Path) -> None:
    path = DataDir.open(data_dir).log_path
    path.write_text("one\ntwo\nthree\n", encoding="utf-8")
    rotate(path, max_bytes=10)
    with path.open("a", encoding="utf-8") as log:
        log.write("four\n")
    assert hearth("logs", "-n", "2").out == "three\nfour\n"


def test_logs_follows_what_is_added(data_dir: Path) -> None:
    path = DataDir.open(data_dir).log_path
    path.write_text("one\ntwo\n", encoding="utf-8")
    command = [sys.executable, "-m", "hearth", "logs", "-f", "-n", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "two\n"
        with path.open("a", encoding="utf-8") as log:
            log.write("three\n")
        assert following.stdout.readline() == "three\n"
        following.terminate()


def test_a_missing_log_says_where_it_should_be(hearth: Hearth, data_dir: Path) -> None:
    shown = hearth("logs")
    assert (shown.code, shown.out) == (1, "")
    assert str(data_dir / "logs" / "service.log") in shown.err.replace("\n", "")


def test_doctor_tells_of_the_service(hearth: Hearth, recorded: FakeService) -> None:
    report = json.loads(hearth("doctor", "--json").out)
    assert report["service"] == {
        **{"data_dir": os.environ["HEARTH_DATA_DIR"], "num_models": 0, "status": "ok"},
        "url": recorded.url,
        "workers": ["w0: Neoverse-N1, ready, 3.7 GiB of 8.0 GiB in use, 1 restarts"],
        "notes": [],
    }


def test_doctor_names_the_node_of_a_worker(
    hearth: Hearth, recorded: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own,) = PROCESSES.workers
    workers = own, replace(own, worker="gpu-2/w0", node="gpu-2")
    monkeypatch.setattr("tests.cli.fake_service.PROCESSES", replace(PROCESSES, workers=workers))
    told = json.loads(hearth("doctor", "--json").out)["service"]["workers"]
    assert [line.partition(": ")[0] for line in told] == ["w0 on node local", "gpu-2/w0 on node gpu-2"]


def test_doctor_says_what_the_service_does_without(
    hearth: Hearth, recorded: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "the journal has stopped: no room"
    monkeypatch.setattr("tests.cli.fake_service.PROCESSES", replace(PROCESSES, notes=(note,)))
    assert f"note: {note}" in hearth("doctor").out
    assert json.loads(hearth("doctor", "--json").out)["service"]["notes"] == [note]


def test_doctor_names_the_fallbacks_of_pools(
    hearth: Hearth, recorded: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = PROCESSES.workers
    assert worker.pool is not None
    fallen = replace(worker, pool=replace(worker.pool, fallbacks={"address": 1}))
    monkeypatch.setattr("tests.cli.fake_service.PROCESSES", replace(PROCESSES, workers=(fallen,)))
    (told,) = json.loads(hearth("doctor", "--json").out)["service"]["workers"]
    assert told.endswith("1 restarts, fallback address: 1 at another address than planned")


def test_doctor_names_models_that_should_be_pinned(
    hearth: Hearth, recorded: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tuple(replace(model, is_pin_refused=model.model == "smol") for model in PROCESSES.models)
    monkeypatch.setattr("tests.cli.fake_service.PROCESSES", replace(PROCESSES, models=models))
    (told,) = json.loads(hearth("doctor", "--json").out)["service"]["workers"]
    assert told.endswith("1 restarts, smol cannot be pinned yet")


def test_doctor_names_settings_of_models_that_are_not_deployed(hearth: Hearth, data_dir: Path) -> None:
    report = json.loads(hearth("doctor", "--json", "--set", "models.nosuch.pinned=true").out)
    (note,) = (note for note in report["notes"] if "nosuch" in note)
    assert note.startswith("the settings in [models.nosuch] are unused")
    assert note.endswith("by `hearth deploy`")


def test_doctor_looks_at_the_disk_of_the_data_directory_too(
    hearth: Hearth, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.cli.doctor_checks._has_direct_reads", lambda directory: directory != data_dir)
    DataDir.open(data_dir)
    report = json.loads(hearth("doctor", "--json", "--set", f"store.path={tmp_path}").out)
    assert (report["store"]["path"], report["service_store"]["path"]) == (str(tmp_path), str(data_dir))
    assert [note for note in report["notes"] if "direct reads" in note] == [
        f"no direct reads in {data_dir}: chunks are read through the page cache"
    ]


def test_doctor_looks_also_at_a_directory_of_another_hearth(hearth: Hearth, data_dir: Path) -> None:
    Registry(DataDir.open(data_dir)).close()
    (data_dir / "VERSION").write_text("999\n")

    shown, report = hearth("doctor"), json.loads(hearth("doctor", "--json").out)

    assert shown.code == 0
    assert (report["service"]["num_models"], report["service"]["status"]) == (None, "not running")
    (note,) = (note for note in report["notes"] if "format version '999'" in note)
    assert "deploy the models again" in note


def test_doctor_says_that_no_service_runs(hearth: Hearth, data_dir: Path) -> None:
    shown = hearth("doctor").out
    assert "not running" in shown
    assert "0 deployed" in shown


def test_logs_json_is_an_object_per_line(hearth: Hearth, data_dir: Path) -> None:
    line = (
        "2026-01-02 03:04:05,678 WARNING hearth.x keeper_lost worker=w0 reason=`no answer in 3 s` load_s=0.5"
    )
    DataDir.open(data_dir).log_path.write_text(
        f"{line}\nTraceback (most recent call last):\n", encoding="utf-8"
    )
    first, second = map(json.loads, hearth("logs", "--json").out.splitlines())
    assert datetime.fromisoformat(first.pop("time")) == datetime(2026, 1, 2, 3, 4, 5, 678_000).astimezone()
    assert first == {
        "level": "WARNING",
        "logger": "hearth.x",
        "event": "keeper_lost",
        "fields": {"worker": "w0", "reason": "no answer in 3 s", "load_s": "0.5"},
        "text": "keeper_lost worker=w0 reason=`no answer in 3 s` load_s=0.5",
    }
    assert second == {"text": "Traceback (most recent call last):"}


def test_logs_json_follows_what_is_added_too(data_dir: Path) -> None:
    path = DataDir.open(data_dir).log_path
    path.write_text("one\n", encoding="utf-8")
    command = [sys.executable, "-m", "hearth", "logs", "-f", "--json", "-n", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"text": "one"}
        with path.open("a", encoding="utf-8") as log:
            log.write("two\n")
        assert json.loads(process.stdout.readline()) == {"text": "two"}
        process.terminate()


def test_ps_watches_until_it_is_interrupted(
    hearth: Hearth, recorded: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = []

    def interrupted(pause_s: float) -> None:
        views.append(pause_s)
        if len(views) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("hearth.cli.ps.time.sleep", interrupted)
    shown = hearth("ps", "--watch")
    assert shown.code == 130
    assert shown.out.count("requests: ") == 2
