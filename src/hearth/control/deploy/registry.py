"""Deployed models, adapters (rows with a `base`) and presets, in SQLite, which several processes may open."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import msgspec

from hearth.control.datadir import DataDir
from hearth.control.deploy.deployed import AdapterFacts, Deployed, DeployedAdapter, ModelLocation
from hearth.control.deploy.names import Names, check_name, has_dependents, listed
from hearth.control.deploy.preset import DeployedPreset, Preset
from hearth.core.errors import (
    DataDirError,
    HasAdapters,
    NameTaken,
    RequestError,
    SnapshotError,
    StoreError,
    StoreFull,
    UnknownModel,
)
from hearth.policy.fleet.footprint import Facts
from hearth.policy.memory.space_slots import NUM_SLOTS, choose_slot
from hearth.snapshot.directory import SnapshotDirectory

#: How long one process waits for another's write. Writes take milliseconds; the event loop waits for less.
WAIT_S, LOOP_WAIT_S = 10.0, 1.0

_SCHEMA = """
create table if not exists models (
    name text primary key, source text not null, location text not null, directory text not null,
    digest text not null, facts text not null, created_at_s real not null, base text,
    labels text not null default ''
) without rowid
"""
_SLOTS_SCHEMA = """
create table if not exists space_slots (
    name text primary key, digest text not null, slot integer not null unique
) without rowid
"""
_PRESETS_SCHEMA = """
create table if not exists presets (
    name text primary key, base text not null, preset text not null, created_at_s real not null
) without rowid
"""
_FIELDS = "name, source, location, directory, digest, facts, created_at_s, base, labels"

_Row = tuple[str, str, str, str, str, str, float, str | None, str]

log = logging.getLogger(__name__)


class Registry:
    """A connection to the registry's file; used on the thread that opened it."""

    def __init__(self, data_dir: DataDir, wait_s: float = WAIT_S) -> None:
        """Open the file; `wait_s`: for other writers. Raises DataDirError, or StoreError for a bad disk."""
        self._path = data_dir.registry_path
        self._data_dir = data_dir
        with self._translated():
            # Without transactions of its own: a statement outside `transaction` is one.
            self._connection = sqlite3.connect(self._path, timeout=wait_s, isolation_level=None)
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute("pragma synchronous = full")
            self._connection.execute(_SCHEMA)
            self._connection.execute(_SLOTS_SCHEMA)
            self._connection.execute(_PRESETS_SCHEMA)
            self._add_labels()
        self._give_slots()  # to models that were registered when there were none
        self._seen_version = -1

    def _add_labels(self) -> None:
        """Add the column that registries of earlier versions lack."""
        if "labels" not in {row[1] for row in self._connection.execute("pragma table_info(models)")}:
            with suppress(sqlite3.OperationalError):  # another process was faster
                self._connection.execute("alter table models add column labels text not null default ''")

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._execute("begin immediate")
        try:
            yield
            self._execute("commit")
        except BaseException:
            if self._connection.in_transaction:
                self._execute("rollback")
            raise

    def add(self, deployed: Deployed | DeployedAdapter) -> None:
        self._write("insert", deployed)

    def replace(self, deployed: Deployed | DeployedAdapter) -> None:
        """Register a model or an adapter in the place of what has its name, also of a preset.

        Raises:
            UnknownModel: an adapter's base is not deployed.
            RequestError: an adapter has the name of its base or of another model.
            HasAdapters: the replaced model has adapters, which would not fit.
        """
        self._write("insert or replace", deployed)

    def put_preset(self, name: str, base: str, preset: Preset, created_at_s: float) -> None:
        """Register a preset, in the place of one of the same name. A preset of a preset has the same base.

        Raises UnknownModel: there is no such base. NameTaken: a model or an adapter has the name.
        """
        with self.transaction():
            if (under := next((one for one in self.presets() if one.name == base), None)) is not None:
                base, preset = under.base, preset.over(under.preset)
            if self.location(base) is None:
                raise Names([*self.all(), *self.adapters(), *self.presets()], {}).unknown(base)
            if self.location(check_name(name)) is not None:
                raise NameTaken(
                    f"`{name}` is the name of a model or an adapter; choose another for the preset"
                )
            content = msgspec.json.encode(preset).decode()
            values = (name, base, content, created_at_s)
            self._execute("insert or replace into presets values (?, ?, ?, ?)", *values)

    def presets(self) -> list[DeployedPreset]:
        """Return all presets by name. Rows that cannot be read are skipped."""
        found = list[DeployedPreset]()
        for name, base, content, created_at_s in self._execute(
            "select * from presets order by name"
        ).fetchall():
            try:
                preset = msgspec.json.decode(content, type=Preset)
                found.append(DeployedPreset(name, base, preset, created_at_s))
            except (msgspec.DecodeError, RequestError) as error:
                log.warning("row_skipped preset=%s reason=%s", name, error)
        return found

    def has_name(self, name: str) -> bool:
        named = self._execute("select name from models union select name from presets")
        return (name,) in named.fetchall()

    def remove(self, name: str, *, with_adapters: bool = False) -> list[ModelLocation]:
        """Return where the files lie, none of a preset.

        Raises UnknownModel, or HasAdapters if it has adapters or presets, unless `with_adapters`.
        """
        with self.transaction():
            if self._execute("delete from presets where name = ?", name).rowcount:
                return []
            location = self.location(name)
            if location is None:
                raise Names([*self.all(), *self.adapters(), *self.presets()], {}).unknown(name)
            rows = self._execute("select name, location, directory from models where base = ?", name)
            adapters = {adapter: ModelLocation(*place) for adapter, *place in rows.fetchall()}
            presets = [one.name for one in self.presets() if one.base in (name, *adapters)]
            if (adapters or presets) and not with_adapters:
                raise has_dependents(name, adapters, presets)
            for preset in presets:
                self._execute("delete from presets where name = ?", preset)
            self._execute("delete from models where name = ? or base = ?", name, name)
            self._give_slots()
        return [location, *adapters.values()]

    def location(self, name: str) -> ModelLocation | None:
        """Return where the files of a model lie, even if its row is otherwise unreadable."""
        row = self._execute("select location, directory from models where name = ?", name).fetchone()
        return None if row is None else ModelLocation(*row)

    def locations(self) -> list[ModelLocation]:
        return [
            ModelLocation(*row) for row in self._execute("select location, directory from models").fetchall()
        ]

    def all(self) -> list[Deployed]:
        """Return all models by name. Rows that cannot be read are skipped."""
        return [one for one in self._read("base is null") if isinstance(one, Deployed)]

    def adapters(self) -> list[DeployedAdapter]:
        return [one for one in self._read("base is not null") if isinstance(one, DeployedAdapter)]

    def outdated_adapters(self, new: Deployed | DeployedAdapter) -> list[str]:
        rows = self._execute(
            "select name from models where base = (select name from models where name = ? and digest <> ?) "
            "order by name",
            new.name,
            new.digest,
        )
        return [name for (name,) in rows.fetchall()]

    def space_slots(self) -> dict[str, int]:
        return dict(self._execute("select name, slot from space_slots").fetchall())

    def _give_slots(self) -> None:
        """Give a slot to each model without one. A changed digest or invalid slot frees the old one first."""
        is_same = "m.name = s.name and m.digest = s.digest and m.base is null"
        is_stale = f"slot >= {NUM_SLOTS} or not exists (select 1 from models m where {is_same})"
        stale = self._execute(f"select name from space_slots s where {is_stale}").fetchall()
        for (name,) in stale:
            self._execute("delete from space_slots where name = ?", name)
        taken = set(self.space_slots().values())
        lacking = self._execute(
            "select name, digest from models "
            "where base is null and name not in (select name from space_slots) order by name"
        )
        for name, digest in lacking.fetchall():
            if (slot := choose_slot(digest, taken, self._snapshot_slot(digest))) is None:
                break
            # Another process may have been faster: then this one is given its slot the next time.
            self._execute("insert or ignore into space_slots values (?, ?, ?)", name, digest, slot)
            taken.add(slot)

    def _snapshot_slot(self, digest: str) -> int | None:
        """Return the slot that a snapshot of a model was made for: it is of no use in another one."""
        path = self._data_dir.snapshots_path
        if not digest.isalnum() or not (path / digest).is_dir():  # a registry may be damaged
            return None
        try:
            directory = SnapshotDirectory.find(path)
            return None if directory is None else directory.slot_of(digest)
        except SnapshotError:  # reported when it is used
            return None

    def has_changed(self) -> bool:
        """True if another connection has written since the last call. Takes microseconds."""
        (version,) = self._execute("pragma data_version").fetchone()
        before, self._seen_version = self._seen_version, version
        return bool(version != before)

    def _adapters_of(self, base: str) -> list[DeployedAdapter]:
        return [one for one in self._read("base = ?", base) if isinstance(one, DeployedAdapter)]

    def _read(self, condition: str, *values: str) -> Iterator[Deployed | DeployedAdapter]:
        selected = f"select {_FIELDS} from models where {condition} order by name"
        for row in self._execute(selected, *values).fetchall():
            try:
                yield self._deployed(row)
            except DataDirError as error:
                log.warning("row_skipped reason=%s", error)

    def _write(self, verb: str, deployed: Deployed | DeployedAdapter) -> None:
        with nullcontext() if self._connection.in_transaction else self.transaction():
            self._check(deployed)
            if verb == "insert" and self.has_name(deployed.name):
                raise name_taken(deployed.name)
            self._execute("delete from presets where name = ?", deployed.name)
            self._put(verb, deployed)

    def _check(self, deployed: Deployed | DeployedAdapter) -> None:
        mine = self._adapters_of(deployed.name)
        if isinstance(deployed, DeployedAdapter):
            if deployed.base == deployed.name:
                raise RequestError(
                    f"an adapter needs a name of its own, and `{deployed.name}` is its base; choose another "
                    "with `--name`"
                )
            if self._is_model(deployed.name):
                raise name_of_model(deployed.name)
            if not self._is_model(deployed.base):
                raise UnknownModel(
                    f"the base of `{deployed.name}` is no model that is deployed: `{deployed.base}`; deploy "
                    "that first, or name another with `--base`"
                )
        else:
            mine = [adapter for adapter in mine if not adapter.fits(deployed.facts)]
        if mine:
            raise HasAdapters(
                f"`{deployed.name}` has adapters that would not fit what is to replace it: "
                f"{listed([adapter.name for adapter in mine])}; remove them first, or choose another name"
            )

    def _is_model(self, name: str) -> bool:
        rows = self._execute("select 1 from models where name = ? and base is null", name)
        return bool(rows.fetchall())

    def _put(self, verb: str, deployed: Deployed | DeployedAdapter) -> None:
        base = deployed.base if isinstance(deployed, DeployedAdapter) else None
        self._execute(
            f"{verb} into models ({_FIELDS}) values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            check_name(deployed.name),
            deployed.source,
            deployed.where,
            deployed.directory,
            deployed.digest,
            msgspec.json.encode(deployed.facts).decode(),
            deployed.created_at_s,
            base,
            " ".join(deployed.labels) if isinstance(deployed, Deployed) else "",
        )
        self._give_slots()

    def _execute(self, statement: str, *values: str | float | None) -> sqlite3.Cursor:
        with self._translated():
            return self._connection.execute(statement, values)

    def _deployed(self, row: _Row) -> Deployed | DeployedAdapter:
        name, source, where, directory, digest, facts, created_at_s, base, labels = row
        try:
            if base is None:
                known = msgspec.json.decode(facts, type=Facts)
                parts = tuple(labels.split())
                return Deployed(name, source, where, directory, digest, known, created_at_s, parts)
            of_adapter = msgspec.json.decode(facts, type=AdapterFacts)
            return DeployedAdapter(name, base, source, where, directory, digest, of_adapter, created_at_s)
        except msgspec.DecodeError as error:
            raise DataDirError(
                f"`{self._path}` holds facts of `{name}` that cannot be read: {error}; deploy it again with "
                "`--overwrite`, or remove it"
            ) from error

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise StoreFull(f"no room to write `{self._path}`; make room on its disk") from error
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_IOERR:  # such as a quota
                raise StoreError(
                    f"`{self._path}` cannot be read or written: {error}; check its disk: room, quotas, health"
                ) from error
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                raise DataDirError(f"another process keeps `{self._path}` busy; try again") from error
            raise DataDirError(
                f"`{self._path}` cannot be used: {error}; check its disk and permissions, or move the file "
                "away and deploy the models again"
            ) from error


def name_taken(name: str) -> NameTaken:
    return NameTaken(
        f"a model is deployed as `{name}` already; choose another name, or replace it with `--overwrite`"
    )


def name_of_model(name: str) -> RequestError:
    return RequestError(
        f"`{name}` is the name of a model, which no adapter replaces; choose another name or remove it"
    )
