"""The journal records events and actions, and its replay is exact."""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import random
import resource
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest

from bench.failing_disk import failing_writes
from hearth.control.driver import Driver
from hearth.control.journal import RETRY_S, TAGS, VERSION, Journal, Replay, previous, replay
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.observer import Observer
from hearth.control.observe.pool_reports import PoolReports
from hearth.control.snapshots import Snapshots
from hearth.core.errors import DataDirError
from hearth.core.messages import HostModel
from hearth.core.types import ModelId, RequestId, WorkerId
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import BrainConfig, LoadModel, RequestArrived, WorkerJoined, WorkerLost
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.fleet_state import STORED, FleetState
from tests.control.broken_driver import run_broken_driver
from tests.policy.fleet.world import MOVES, World

PLENTY = 1 << 30
#: Recorded by services in `bench`.
JOURNALS = Path(__file__).parents[1] / "data" / "journals"


def recorded(path: Path, seed: int = 1, max_bytes: int = PLENTY) -> World:
    """A world in which anything happens, and its journal."""
    choose = random.Random(seed)
    world = World(BrainConfig(patience_s=1.5, takes_turns=seed % 2 == 0))
    for number in (0, 1, 9):
        world.join(number)
    for number in (1, 32, 135, 61, 88, 5):
        world.deploy(number)
    for _ in range(400):
        world.move(choose.choice([*MOVES, *["arrive"] * 6]), choose.randrange(10_000))
    with Journal(path, world.fleet.config, max_bytes) as journal:
        for event, actions in zip(world.events, world.actions, strict=True):
            journal.record(event, actions)
    return world


@pytest.mark.parametrize("seed", range(5))
def test_a_replay_of_a_recording_takes_the_same_actions(tmp_path: Path, seed: int) -> None:
    world = recorded(tmp_path / "journal", seed)
    assert replay(tmp_path / "journal") == Replay(len(world.events), None, is_torn=False)


def test_the_recording_contains_infinite_keep_alives_and_the_replay_honours_them(tmp_path: Path) -> None:
    world = recorded(tmp_path / "journal")
    keep_alives = [event.keep_alive_s for event in world.events if isinstance(event, RequestArrived)]
    assert math.inf in keep_alives
    assert b"Infinity" in (tmp_path / "journal").read_bytes()


@pytest.mark.parametrize("name", ["soak", "turns", "chaos"])
def test_a_kept_journal_gives_the_same_actions_again(tmp_path: Path, name: str) -> None:
    """If decisions have changed on purpose, record all of them again: `make journals`."""
    path, data = tmp_path / "journal", gzip.decompress((JOURNALS / f"{name}.jsonl.gz").read_bytes())
    path.write_bytes(data)
    found = replay(path)
    assert found.first_difference is None
    assert found.num_events > 500
    header = json.loads(data.partition(b"\n")[0])
    assert (header["fleet"] is not None) is (name == "soak"), "one begins with the state of a fleet"


def test_a_changed_action_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    recorded(path)
    lines = path.read_text().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if "Dispatch" in line)
    entry = json.loads(lines[at])
    next(fields for tag, fields in entry["actions"] if tag == "Dispatch")["waited_s"] = 1e-300
    lines[at] = json.dumps(entry) + "\n"
    path.write_text("".join(lines))
    result = replay(path)
    assert result.num_events == at
    assert result.first_difference is not None
    assert "1e-300" in result.first_difference


def test_events_in_a_row_reach_the_system_together_also_if_one_of_them_breaks_the_brain(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    world = recorded(tmp_path / "whole")
    first, second, third = zip(world.events[:3], world.actions[:3], strict=True)
    with Journal(path, world.fleet.config, 1 << 20) as journal:
        journal.record(*first)
        num_lines = path.read_bytes().count(b"\n")

        def break_the_brain() -> None:
            with journal.flushing_once():
                journal.record(*second)
                assert path.read_bytes().count(b"\n") == num_lines
                journal.record(*third)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            break_the_brain()
        assert path.read_bytes().count(b"\n") == num_lines + 2
        assert replay(path) == Replay(3, None, is_torn=False)
        journal.record(world.events[3], world.actions[3])
        assert path.read_bytes().count(b"\n") == num_lines + 3


def test_a_torn_last_line_is_reported_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    world = recorded(path)
    path.write_bytes(path.read_bytes()[:-10])
    assert replay(path) == Replay(len(world.events) - 1, None, is_torn=True)


def test_recording_ends_at_its_limit_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    recorded(path, max_bytes=20_000)
    assert path.stat().st_size <= 20_000
    assert replay(path).first_difference is None
    assert [record.message.split()[0] for record in caplog.records] == ["journal_stopped"]


def rotated(path: Path, seed: int, max_bytes: int) -> World:
    """The same, by a journal that rotates as it does in the service."""
    world = recorded(path.with_name("whole"), seed)
    fleet = Fleet(world.fleet.config)
    with Journal(path, fleet.config, max_bytes) as journal:
        for event in world.events:
            journal.record(event, step(fleet, event))
            if journal.must_rotate:
                journal.rotate(fleet)
    return world


@pytest.mark.parametrize("seed", range(5))
def test_a_journal_rotates_and_keeps_the_newest_which_replays_from_a_snapshot(
    tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "journal"
    world = rotated(path, seed, max_bytes=60_000)
    older, newer = replay(previous(path)), replay(path)
    assert older.first_difference is newer.first_difference is None
    assert 0 < older.num_events + newer.num_events < len(world.events), "the oldest have given way"
    newest = (tmp_path / "whole").read_bytes().splitlines()[-older.num_events - newer.num_events :]
    files = [file.read_bytes().splitlines()[1:] for file in (previous(path), path)]
    assert [line for lines in files for line in lines] == newest
    assert path.stat().st_size + previous(path).stat().st_size < 60_000 + max(map(len, newest))


def test_a_snapshot_that_leaves_no_room_for_events_ends_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rotated(tmp_path / "journal", 1, max_bytes=3000)
    assert replay(tmp_path / "journal").first_difference is None
    (record,) = caplog.records
    assert "journal_stopped" in record.message
    assert "limit, a quarter of all: 750" in record.message


def test_a_driver_rotates_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, BrainConfig(), 20_000) as journal:
        observer, fleet = Observer(Metrics()), Fleet(BrainConfig())
        driver = Driver(fleet, journal, observer, PoolReports(), Snapshots(Metrics()), _no_order, list)
        for number in range(300):
            driver.post(WorkerJoined(number, WorkerId(f"w{number}"), "cpu", 100))
            driver.post(WorkerLost(number, WorkerId(f"w{number}")))
    assert b'"w299"' in path.read_bytes()
    assert replay(previous(path)).first_difference is replay(path).first_difference is None


def _no_order(order: LoadModel, hosting: int) -> HostModel:
    raise AssertionError(f"nothing is deployed: {order=} {hosting=}")


def test_a_snapshot_can_be_read_after_a_class_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotated(tmp_path / "journal", 1, max_bytes=60_000)
    monkeypatch.delattr("hearth.policy.fleet.fleet.Fleet")
    assert replay(tmp_path / "journal").first_difference is None


def test_a_snapshot_whose_records_do_not_belong_together_is_refused(tmp_path: Path) -> None:
    for seed in range(20):  # until one is rotated while a model is hosted
        path = tmp_path / f"journal{seed}"
        rotated(path, seed, max_bytes=60_000)
        header, *events = path.read_text().splitlines(keepends=True)
        changed = json.loads(header)
        if changed["fleet"] is not None and changed["fleet"]["replicas"]:
            break
    changed["fleet"]["replicas"][0]["worker"] = "nowhere"
    path.write_text("".join([json.dumps(changed) + "\n", *events]))
    with pytest.raises(DataDirError, match="line 1 of the journal is damaged: KeyError\\('nowhere'\\)"):
        replay(path)


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        ("{]", "JSONDecodeError"),
        ('{"event": ["RequestArrived"], "actions": []}', "not enough values to unpack"),
        ('{"event": ["WorkerRose", {"now_s": 1.0}], "actions": []}', "KeyError\\('WorkerRose'\\)"),
        ('{"event": ["TimerFired", {"now_s": "soon"}], "actions": []}', "Expected `float`, got `str`"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damaged: str, why: str) -> None:
    path = tmp_path / "journal"
    recorded(path)
    lines = path.read_text().splitlines()
    lines[2] = damaged
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataDirError, match=f"line 3 of the journal is damaged: .*{why}.*; file: {path}"):
        replay(path)


#: Fields of events and actions by tag. Of everything else the name of the class, which no journal contains,
#: and its fields, or its values if it is an enumeration.
FORMAT = {
    "BrainConfig": (
        "max_queue patience_s max_drain_s takes_turns max_resumes queue_weight load_weight packing_s "
        "spread_s scaling while_loading first_token_s prewarming priors"
    ),
    "Arrivals": "last_s num_short num_long",
    "CancelRun": "request_id worker",
    "ComputedPrompt": "num_tokens seconds",
    "Demand": "history_by_model by_last_use",
    "DemandHistory": "last_s mean_interval_s",
    "DemandForecast": "now_s model step_s mean_per_s high_per_s age_s",
    "DeviceReported": "now_s worker bytes_by_model",
    "Dispatch": "request_id model worker why waited_s options",
    "DropState": "dropped preparing restoring whole",
    "DrainState": "model worker began_s victims gone more",
    "End": "done failed stopped",
    "Estimates": "reload mean_run_s run_s_by_model links token_s_by_model least_token_s arrivals head_layers",
    "Evict": "model worker cost_s is_freed",
    "FleetState": (
        "now_s step_number num_added most_by_node next_number timer_s kept_until_s estimates resting "
        "draining kinds workers adapters models replicas drains unplaced refused_pins next_scaling_s used_s "
        "no_pipeline_until_s gathering replaced prewarm_budget"
    ),
    "Footprint": "fixed_bytes min_kv_bytes max_kv_bytes workspace_bytes tables_bytes sink_bytes max_seqs "
    "keeps_all kv_token_bytes",
    "Hold": "0 1 2 3 4",
    "KnownAdapters": "used",
    "KnownPrefixes": "max_digests used",
    "LoadFailure": "message delay_s until_s is_deadly",
    "LoadModel": "model worker kv_floor_bytes max_kv_bytes promise pipeline is_ahead",
    "LoadProgressed": "now_s worker model num_bytes",
    "Model": (
        "name profile named_keep_alive_s is_stopped num_deadly_loads failure residency largest_holders "
        "resident_bytes drop forecast forecast_due_s advised host_prewarmed_s"
    ),
    "ModelDeployed": "now_s profile",
    "Member": "worker begin end gpu",
    "ModelFailed": "now_s worker model reason is_cut_off",
    "ModelProfile": "model num_bytes footprints keep_alive_s is_pinned weight digest labels min_replicas "
    "max_replicas may_drop stages",
    "ModelReady": "now_s worker model rungs total_s ahead_bytes shared_bytes",
    "ModelRemoved": "now_s model",
    "ModelState": "facts waiting failed_on",
    "ModelStopped": "now_s model is_freed",
    "Option": "worker queue_s load_s utilisation cost_s obstacle evict_s missing_bytes prompt_s "
    "cached_tokens",
    "ParameterDrop": "state hold_s relieved_s restored_s blocked_until_s",
    "PartBytes": "layer_bytes first_bytes last_bytes",
    "Prewarm": "model worker to_host lead_s expected_per_s cost_s is_advice",
    "PrewarmBudget": "device_s at_s per_s machine_s",
    "PrewarmHold": "until_s cost_s",
    "Prewarming": "budget is_advice",
    "PressureReported": "now_s worker model demand_tokens room_tokens",
    "Promise": "own_bytes workspace_bytes standing_bytes",
    "RefusePin": "model worker message",
    "Replacement": "node until_s",
    "Reject": "request_id reason message retry_s",
    "RejectReason": "load_failed model_removed never_fits pinned_out queue_full unknown_model workers_lost",
    "ReloadCosts": "priors demand rates",
    "Replica": (
        "promise total_bytes digest max_seqs number reused_bytes loaded_bytes is_ready ready_s has_served "
        "is_in_turn has_had_turn turn_changed_s idle_since_s is_stale stop has_pin is_pin_refused "
        "notified_hold is_dropped kv_share whole_tokens prefixes num_prompt_tokens max_kv_tokens "
        "demand_tokens room_tokens prompts_until_s spare prewarmed dissolves_s"
    ),
    "ReplicaState": "model worker facts running stages",
    "Request": (
        "request_id number keep_alive_s digest line_s is_batch adapter prefixes num_prompt_tokens key "
        "num_losses queued_s queued_step started_s awaits_turn"
    ),
    "RequestArrived": (
        "now_s request_id model num_prompt_tokens max_tokens keep_alive_s digest is_batch adapter prefixes "
        "key"
    ),
    "RequestCancelled": "now_s request_id",
    "RequestFinished": "now_s request_id num_output_tokens how prompt",
    "ResidencyReported": "now_s model bytes_by_rung node",
    "Rung": "disk host object peer",
    "RungUse": "rung num_bytes seconds",
    "RunningRate": "num_bytes seconds",
    "SetHold": "model worker hold",
    "SetTimer": "at_s",
    "Spare": "need warm_s",
    "StageSizes": "num_layers stored placed spare_bytes unit_bytes kv_layer_bytes kv_unit_bytes "
    "num_lost_blocks workspace_bytes tables_bytes context_blocks max_seqs",
    "StagesMeasured": "now_s worker model stage_s",
    "StageState": "worker promise begin end total_bytes loaded_bytes is_ready",
    "Stop": "number is_freed",
    "TimerFired": "now_s",
    "TurnBegan": "now_s worker model",
    "TurnEnd": "ahead idle time",
    "TurnEnded": "now_s worker model why",
    "WantedAdapter": "adapter num_bytes",
    "WhileLoading": "gather_s min_gain_s",
    "Why": "demand dropped evicted free_room loading resident restored staged switched turns waited",
    "WorkerJoined": "now_s worker kind budget_bytes shares_workspace node gpu runs_stages device_share",
    "WorkerLost": "now_s worker culprit has_answered reason in_step is_with_node",
    "WorkersExpected": "now_s node num_workers",
    "Link": "bytes_per_s latency_s",
    "MoveKv": "request_id model senders target num_bytes move_s prompt_s wait_s is_moved",
    "NodeLost": "now_s node",
    "NodeDraining": "now_s node is_draining",
    "LinkMeasured": "now_s source target bytes_per_s latency_s",
    "AddWorkers": "model",
    "ReleaseWorkers": "node",
    "Pipeline": "name members num_blocks",
    "Scaling": "out_after_s in_after_s min_nodes",
}


def test_the_format_changes_only_on_purpose() -> None:
    """Whoever renames a class keeps its tag in `TAGS`; whoever changes a field raises `VERSION` if an old
    journal cannot be read any more. Then change `FORMAT`.
    """
    stored = [get_type_hints(kind)[name] for kind, names in STORED.items() for name in names]
    kinds = [*TAGS, BrainConfig, FleetState, *stored]
    _, schemas = msgspec.json.schema_components(kinds, schema_hook=lambda _: {"title": "facts of a record"})
    found = {name: schema.get("properties") or schema["enum"] for name, schema in schemas.items()}
    found |= {kind.__name__: names for kind, names in STORED.items()}
    for kind, tag in TAGS.items():
        found[tag] = found.pop(kind.__name__)
    assert {name: " ".join(map(str, names)) for name, names in found.items()} == FORMAT
    assert VERSION == 10


def test_a_disk_that_takes_no_more_ends_the_recording_and_not_the_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        recorded(tmp_path / "journal")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert replay(tmp_path / "journal").first_difference is None
    assert [record.message.split()[0] for record in caplog.records] == ["journal_stopped"]


def test_a_journal_goes_on_when_the_disk_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, fleet = tmp_path / "journal", Fleet(BrainConfig())

    def post(journal: Journal, now_s: float) -> None:
        event = WorkerJoined(now_s, WorkerId(f"w{now_s:.0f}"), "cpu", 100)
        journal.record(event, step(fleet, event))
        if journal.must_rotate:
            journal.rotate(fleet)

    with caplog.at_level(logging.INFO), Journal(path, fleet.config, 1 << 20) as journal:
        post(journal, 1.0)
        with failing_writes([os.getpid()]):
            post(journal, 2.0)
            post(journal, 2.0 + RETRY_S)  # a try that fails keeps what is there
            assert replay(path).num_events == 1
            assert journal.note is not None
            assert journal.note.startswith(f"the journal `{path}` has stopped: the next file cannot be begun")
        post(journal, 3.0 + RETRY_S)
        assert journal.is_stopped, "it is not asked with every event"
        for number in range(3):
            post(journal, 4.0 + (2 + number) * RETRY_S)
    assert (replay(path).num_events, replay(path).first_difference) == (2, None)
    assert replay(previous(path)).first_difference is None
    assert [record.message.split()[0] for record in caplog.records] == ["journal_stopped", "journal_resumed"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["journal", "journal.1"]


def test_a_journal_that_cannot_be_begun_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataDirError, match=r"cannot be begun: .*choose another: `--data-dir`"):
        Journal(tmp_path / "nowhere" / "journal", BrainConfig(), PLENTY)


def test_each_start_has_a_journal_and_the_one_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    recorded(path, seed=1)
    first = path.read_bytes()
    recorded(path, seed=2)
    assert (tmp_path / "events.1.jsonl").read_bytes() == first


def test_what_was_recorded_is_on_disk_when_the_journal_is_closed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", BrainConfig(), PLENTY)
    journal.record(RequestArrived(1.0, RequestId("r"), ModelId("m"), 3, None), [])
    journal.close()
    header, line = (tmp_path / "journal").read_text().splitlines()
    assert json.loads(header)["config"]["max_queue"] == BrainConfig().max_queue
    assert json.loads(line) == {
        "event": [
            "RequestArrived",
            {
                "now_s": 1.0,
                "request_id": "r",
                "model": "m",
                "num_prompt_tokens": 3,
                "max_tokens": None,
                "keep_alive_s": None,
                "digest": None,
                "is_batch": False,
                "adapter": None,
                "prefixes": [],
                "key": None,
            },
        ],
        "actions": [],
    }


def test_the_event_that_breaks_the_brain_is_recorded(tmp_path: Path) -> None:
    ended = run_broken_driver(tmp_path / "journal", "driver.post(JOINED)")
    assert "service_broken part=driver error=AssertionError" in ended.stderr
    lines = (tmp_path / "journal").read_text().splitlines()
    assert [json.loads(line)["event"][0] for line in lines[1:]] == ["WorkerJoined"] * 2


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("[]\n")
    with pytest.raises(DataDirError, match="not a journal"):
        replay(tmp_path / "other")


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "newer").write_text('{"version": 99, "config": {}}\n')
    with pytest.raises(DataDirError, match="version 99"):
        replay(tmp_path / "newer")
