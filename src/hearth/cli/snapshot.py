"""`hearth snapshot`: make, list, remove and verify snapshots, which make starts of models faster."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperGroup

from hearth.cli import local_models
from hearth.cli.client import Client
from hearth.cli.console import (
    DEFAULT_DATA_DIR,
    ApiKey,
    AsJson,
    DataDirectory,
    Url,
    app,
    print_columns,
)
from hearth.cli.endpoint import reached
from hearth.cli.figures import duration, size
from hearth.cli.progress import step_bar
from hearth.cli.tab_completion import ModelName, complete_model
from hearth.control.datadir import DataDir
from hearth.control.observe.views import SnapshotView
from hearth.core.errors import ConfigError, DataDirError, SnapshotError
from hearth.core.types import SnapshotPhase
from hearth.snapshot.cost_profile import SECTION as COSTS
from hearth.snapshot.cost_profile import MeasuredProfile, cost_profile_of
from hearth.snapshot.directory import SnapshotDirectory, SnapshotEntry
from hearth.snapshot.graph_names import graph_names, is_for_adapters
from hearth.snapshot.memory_profile import MemoryProfile


class MakingGroup(TyperGroup):
    """Commands with `make` as the default: `hearth snapshot qwen-7b`.

    Contexts are Click's, which only some versions of Typer bundle; hence `Any`.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, self.resolve_words(args))

    def resolve_words(self, words: list[str]) -> list[str]:
        is_name = bool(words) and not words[0].startswith("-") and words[0] not in self.commands
        return ["make", *words] if is_name else words

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        make = self.commands["make"]
        context = make.make_context("make", [], parent=ctx, resilient_parsing=True)
        name = next(one for one in make.get_params(context) if one.name == "name")
        return [*super().shell_complete(ctx, incomplete), *name.shell_complete(context, incomplete)]


snapshot_app = typer.Typer(cls=MakingGroup, no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(
    snapshot_app,
    name="snapshot",
    help="Make later starts of a model faster; also ls, rm and verify.",
    rich_help_panel="Models",
)

_Named = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]", help="Name of a deployed model; by default all.", autocompletion=complete_model
    ),
]


@dataclass(frozen=True, slots=True)
class _Found:
    model: str  #: empty: the model is no longer deployed
    path: str
    num_bytes: int
    used_at_s: float
    device: str
    unbooked_bytes: int
    sections: list[str]
    num_graphs: int  #: of steps without adapters
    num_adapter_graphs: int  #: of steps with adapters
    state: str  #: ok, or the problem in one word
    problem: str | None  #: why it cannot be used


@snapshot_app.command()
def make(
    context: typer.Context,
    name: ModelName,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Make a snapshot of a model now.

    A snapshot stores what the next start of the model would have to measure again: memory outside the pool,
    times of steps and loads, and on a GPU its CUDA graphs. The service makes one after the first start of a
    model, when it is idle. This command makes it now and replaces an existing one: the model is loaded, and
    measured once no model of its worker has requests.

    A snapshot is valid for the same model, machine, software and settings. If anything differs, the model
    starts without it, a new one is made, and `hearth doctor` says what differs.

    [bold]Examples[/bold]

      hearth snapshot qwen-7b

      hearth snapshot ls
    """
    with reached(context, url, api_key, data_dir) as client:
        view = made(client, name)
    typer.echo(msgspec.json.encode(view) if as_json else summary(view))


def made(client: Client, name: str) -> SnapshotView:
    view = None
    with step_bar(f"loading {name}") as advance:
        for event in client.make_snapshot(name):
            if isinstance(event, SnapshotView):
                view = event
            else:
                is_counted = event.phase == SnapshotPhase.MEASURING
                advance(event.num_done, event.num_steps if is_counted else None, f"{event.phase} {name}")
    if view is None:
        raise SnapshotError(f"no snapshot of `{name}` was made, and no reason was given; see `hearth logs`")
    return view


def summary(view: SnapshotView) -> str:
    return (
        f"made a snapshot of {view.model}: {size(view.num_bytes)} in {view.seconds:.1f} s; its worker uses "
        f"{size(view.unbooked_bytes)} outside the pool"
    )


@snapshot_app.command("ls")
def list_snapshots(data_dir: DataDirectory = DEFAULT_DATA_DIR, as_json: AsJson = False) -> None:
    """List the snapshots of this machine.

    BESIDES is the memory that a worker uses outside its pool. GRAPHS counts CUDA graphs, plus those of steps
    with adapters. STATE is the problem of a snapshot in one word; the service replaces such a snapshot, and
    `hearth snapshot verify` says more. Snapshots are removed together with their model; the least recently
    used ones are removed when all together exceed store.snapshot_bytes.

    [bold]Example[/bold]

      hearth snapshot ls
    """
    found = _LocalSnapshots.of(data_dir).found()
    if as_json:
        typer.echo(msgspec.json.encode([asdict(one) for one in found]))
        return
    rows = [
        [
            one.model or "-",
            size(one.num_bytes),
            f"{duration(max(0.0, time.time() - one.used_at_s))} ago",
            size(one.unbooked_bytes) if one.unbooked_bytes else "-",
            _graphs(one),
            one.device or "-",
            one.state,
        ]
        for one in found
    ]
    print_columns(["MODEL", "SIZE", "USED", "BESIDES", "GRAPHS", "DEVICE", "STATE"], rows)


@snapshot_app.command("rm")
def remove(
    name: ModelName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Remove the snapshots of a model.

    The next start is slower, and a new snapshot is made after it.

    [bold]Example[/bold]

      hearth snapshot rm qwen-7b --yes
    """
    digest = _digest_of(data_dir, name)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"cannot ask whether to remove snapshots of `{name}`: not a terminal; pass `--yes` to confirm"
            )
        typer.confirm(f"Remove the snapshots of {name}?", abort=True)
    directory = _LocalSnapshots.of(data_dir).directory
    num_removed = 0 if directory is None else directory.remove(digest)
    noun = "snapshot" if num_removed == 1 else "snapshots"
    typer.echo(f"removed {num_removed} {noun} of {name}")


@snapshot_app.command()
def verify(name: _Named = None, data_dir: DataDirectory = DEFAULT_DATA_DIR) -> None:
    """Verify snapshots byte by byte.

    Checks that they are complete, unchanged and written by this installation. The exit code is 1 if one is
    not; such a snapshot is never used.

    [bold]Examples[/bold]

      hearth snapshot verify

      hearth snapshot verify qwen-7b
    """
    digest = None if name is None else _digest_of(data_dir, name)
    directory, bad = _LocalSnapshots.of(data_dir).directory, 0
    entries = [] if directory is None else directory.entries(digest)
    if directory is None or not entries:
        typer.echo("no snapshots" if name is None else f"no snapshot of {name}")
        return
    for entry in entries:
        try:
            with directory.open_file(entry.path) as opened:
                opened.verify()
        except SnapshotError as error:
            bad += 1
            typer.echo(f"bad: {error}")
        else:
            typer.echo(f"ok: {entry.path}, {size(entry.num_bytes)}")
    if bad:
        what = "1 snapshot is" if bad == 1 else f"{bad} snapshots are"
        raise SnapshotError(f"{what} unusable; `hearth snapshot rm NAME`, and the service makes a new one")


@dataclass(frozen=True, slots=True)
class _LocalSnapshots:
    directory: SnapshotDirectory | None  #: None: it does not exist, and is not created
    names: dict[str, str]  #: of models, by the digests of their manifests

    @staticmethod
    def of(data_dir: Path) -> _LocalSnapshots:
        names = {one.digest: one.name for one in local_models.views(data_dir) if one.preset is None}
        return _LocalSnapshots(SnapshotDirectory.find(DataDir(data_dir).snapshots_path), names)

    def found(self, digest: str | None = None) -> list[_Found]:
        if self.directory is None:
            return []
        return [self._look(self.directory, entry) for entry in self.directory.entries(digest)]

    def _look(self, directory: SnapshotDirectory, entry: SnapshotEntry) -> _Found:
        known = (self.names.get(entry.model, ""), str(entry.path), entry.num_bytes, entry.used_at_s)
        try:
            with directory.open_file(entry.path) as opened:
                device, memory = opened.fingerprint.device, MemoryProfile.of(opened)
                names = graph_names(opened)
                num_adapters = sum(map(is_for_adapters, names))
                graphs = (len(names) - num_adapters, num_adapters)
                return _Found(*known, device, memory.unbooked_bytes, sorted(opened), *graphs, "ok", None)
        except SnapshotError as error:
            state = (
                error.label.removeprefix("snapshot_") if type(error) is not SnapshotError else "unreadable"
            )
            problem = str(error) if str(entry.path) in str(error) else f"`{entry.path}`: {error}"
            return _Found(*known, "", 0, [], 0, 0, state, problem)


def _graphs(found: _Found) -> str:
    if not found.num_graphs:
        return "-"
    more = f"+{found.num_adapter_graphs}" if found.num_adapter_graphs else ""
    return f"{found.num_graphs}{more}"


def _digest_of(data_dir: Path, name: str) -> str:
    view = local_models.find(data_dir, name)
    while view.base is not None:
        view = local_models.base_of(data_dir, view)
    return view.digest


def cost_profile(data_dir: Path, name: str) -> MeasuredProfile:
    """Return the measurements in the most recently used snapshot of a whole model. Raises HearthError."""
    digest, directory = _digest_of(data_dir, name), _LocalSnapshots.of(data_dir).directory
    opened = None if directory is None else directory.newest(digest, lambda one: COSTS in one)
    if opened is None:
        raise SnapshotError(
            f"`{name}` has no snapshot of the whole model; make one with `hearth snapshot {name}`"
        )
    with opened:
        return cost_profile_of(opened)


@dataclass(frozen=True, slots=True)
class SnapshotsReport:
    number: int
    num_bytes: int
    notes: tuple[str, ...]  #: why some cannot be used


def look_at_snapshots(data_dir: Path) -> SnapshotsReport:
    try:
        found = _LocalSnapshots.of(data_dir).found()
    except (SnapshotError, DataDirError) as error:
        return SnapshotsReport(0, 0, (str(error),) if isinstance(error, SnapshotError) else ())
    problems = tuple(one.problem for one in found if one.problem is not None)
    return SnapshotsReport(len(found), sum(one.num_bytes for one in found), problems)
