"""The deployed models, in a SQLite file that several processes may open. Touches no model's files."""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from hearth.config import ModelConfig
from hearth.control.datadir import DataDir
from hearth.control.nearest_name import NearestName
from hearth.errors import (
    ConfigError,
    DataDirError,
    NameTaken,
    RequestError,
    StoreError,
    StoreFull,
    UnknownModel,
)
from hearth.policy.fleet.footprint import Facts
from hearth.policy.memory.space_slots import choose_slot

#: How long one process waits for another's write. Writes take milliseconds; the event loop waits for less.
WAIT_S, LOOP_WAIT_S = 10.0, 1.0
#: Parts as hubs have them, `org/name:tag`. What begins with `hf:` would be a source.
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"(?!hf:){_PART}([/:]{_PART})*", re.ASCII)
MAX_NAME_CHARS = 128
#: The tag of a name that has none, as users of Ollama write it.
LATEST = ":latest"
#: The most names that a message lists.
_MAX_LISTED = 10

_SCHEMA = """
create table if not exists models (
    name text primary key, source text not null, location text not null, directory text not null,
    digest text not null, facts text not null, created_at_s real not null
) without rowid
"""
_SLOTS_SCHEMA = """
create table if not exists space_slots (
    name text primary key, digest text not null, slot integer not null unique
) without rowid
"""
_RENAMED_SCHEMA = "create table if not exists renamed_digests (old text primary key, new text not null)"
_FIELDS = "name, source, location, directory, digest, facts, created_at_s"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """The files of a model: where they are loaded from, and where its small files lie."""

    where: str  #: the directory or URL that it is loaded from
    directory: str  #: where its manifest and its tokenizer lie: `where`, or the local copy of a URL's


@dataclass(frozen=True, slots=True)
class Deployed:
    """A model that the service offers. Becomes JSON."""

    name: str
    source: str  #: what it was deployed from
    where: str  #: this and the next as in `ModelLocation`
    directory: str
    digest: str  #: of the manifest
    facts: Facts
    created_at_s: float  #: since the epoch

    @property
    def location(self) -> ModelLocation:
        return ModelLocation(self.where, self.directory)


def check_name(name: str) -> str:
    """Return a name that a model may have: in no path or address would it lead anywhere else.

    Raises:
        RequestError: it may not.
    """
    if len(name) > MAX_NAME_CHARS or _NAME.fullmatch(name) is None or ".." in name:
        raise RequestError(
            f"a name is 1 to {MAX_NAME_CHARS} letters, digits, `.`, `_` or `-`, in parts between `/` or `:` "
            "that begin with a letter or digit, without two dots in a row or `hf:` at its beginning, given: "
            f"{name!r:.80}"
        )
    return name


def file_name(name: str) -> str:
    """Return the name of a model as that of a file, which may stand for several models."""
    return re.sub("[/:]", "--", check_name(name))


class Registry:
    """A connection to the registry's file; used on the thread that opened it."""

    def __init__(self, data_dir: DataDir, wait_s: float = WAIT_S) -> None:
        self._path = data_dir.registry_path
        self._data_dir = data_dir
        with self._translated():
            # Without transactions of its own: a statement outside `transaction` is one.
            self._connection = sqlite3.connect(self._path, timeout=wait_s, isolation_level=None)
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute("pragma synchronous = full")
            self._connection.execute(_SCHEMA)
            self._connection.execute(_RENAMED_SCHEMA)
            self._connection.execute(_SLOTS_SCHEMA)
        self._give_slots()  # to models that were registered when there were none
        self._seen_version = -1

    @staticmethod
    def open(data_dir: DataDir, wait_s: float = WAIT_S) -> Registry:
        """Open the registry, which waits `wait_s` for others who write.

        Raises:
            DataDirError: the file is damaged or cannot be opened.
            StoreError: its disk fails.
        """
        return Registry(data_dir, wait_s)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all that is done within the context happen at once, or not at all if it raises."""
        self._execute("begin immediate")
        try:
            yield
            self._execute("commit")
        except BaseException:
            if self._connection.in_transaction:
                self._execute("rollback")
            raise

    def add(self, deployed: Deployed) -> None:
        """Register a model. Raises NameTaken."""
        try:
            self._write("insert", deployed)
        except sqlite3.IntegrityError:
            raise name_taken(deployed.name) from None

    def replace(self, deployed: Deployed) -> None:
        """Register a model instead of whatever had its name before."""
        self._write("insert or replace", deployed)

    def remove(self, name: str) -> ModelLocation:
        """Forget a model and return where its files lie. Raises UnknownModel."""
        with self.transaction():
            location = self.location(name)
            if location is None:
                raise Names(self.all(), {}).unknown(name)
            self._execute("delete from models where name = ?", name)
            self._give_slots()
            self._data_dir.forget_upgrade()
        return location

    def upgrade(self, changes: Iterable[tuple[Deployed, Deployed]]) -> None:
        """Write what an upgrade has made of models, each before and after, all at once.

        Which digest was which stays written down. The way back stays open.
        """
        with self.transaction():
            for old, new in changes:
                self._put("insert or replace", new)
                if old.digest != new.digest:
                    self._execute(
                        "insert or replace into renamed_digests values (?, ?)", old.digest, new.digest
                    )

    def renamed_digests(self) -> dict[str, str]:
        """Return the digests that models have now, by those that they had in an older format."""
        return dict(self._execute("select old, new from renamed_digests").fetchall())

    def back_up(self, path: Path) -> None:
        """Write a copy of the registry to a new file."""
        with self._translated(), closing(sqlite3.connect(path)) as copy:
            self._connection.backup(copy)

    def location(self, name: str) -> ModelLocation | None:
        """Return where the files of a model lie, also if its row cannot be read otherwise."""
        row = self._execute("select location, directory from models where name = ?", name).fetchone()
        return None if row is None else ModelLocation(*row)

    def locations(self) -> list[ModelLocation]:
        """Return where the files of all models lie, as `location` does."""
        return [
            ModelLocation(*row) for row in self._execute("select location, directory from models").fetchall()
        ]

    def all(self) -> list[Deployed]:
        """Return all models by name, without rows that cannot be read: they must not hide the others."""
        found = []
        for row in self._execute(f"select {_FIELDS} from models order by name").fetchall():
            try:
                found.append(self._deployed(row))
            except DataDirError as error:
                log.warning("row_skipped reason=%s", error)
        return found

    def space_slots(self) -> dict[str, int]:
        """Return by name which slot of device addresses each model has; none where all are taken."""
        return dict(self._execute("select name, slot from space_slots").fetchall())

    def _give_slots(self) -> None:
        """Give a slot to each model that has none. One that has another digest now loses its own first."""
        is_stale = "not exists (select 1 from models m where m.name = s.name and m.digest = s.digest)"
        stale = self._execute(f"select name from space_slots s where {is_stale}").fetchall()
        for (name,) in stale:
            self._execute("delete from space_slots where name = ?", name)
        taken = set(self.space_slots().values())
        lacking = self._execute(
            "select name, digest from models where name not in (select name from space_slots) order by name"
        )
        for name, digest in lacking.fetchall():
            if (slot := choose_slot(digest, taken)) is None:
                break
            # Another process may have been faster: then this one is given its slot the next time.
            self._execute("insert or ignore into space_slots values (?, ?, ?)", name, digest, slot)
            taken.add(slot)

    def has_changed(self) -> bool:
        """True if another connection has written since this was asked last. Takes microseconds."""
        (version,) = self._execute("pragma data_version").fetchone()
        before, self._seen_version = self._seen_version, version
        return bool(version != before)

    def _write(self, verb: str, deployed: Deployed) -> None:
        self._put(verb, deployed)
        self._data_dir.forget_upgrade()  # not before: a name that is taken changes nothing

    def _put(self, verb: str, deployed: Deployed) -> None:
        self._execute(
            f"{verb} into models ({_FIELDS}) values (?, ?, ?, ?, ?, ?, ?)",
            *(check_name(deployed.name), deployed.source, deployed.where, deployed.directory),
            *(deployed.digest, msgspec.json.encode(deployed.facts).decode(), deployed.created_at_s),
        )
        self._give_slots()

    def _execute(self, statement: str, *values: str | float) -> sqlite3.Cursor:
        with self._translated():
            return self._connection.execute(statement, values)

    def _deployed(self, row: tuple[str, str, str, str, str, str, float]) -> Deployed:
        name, source, where, directory, digest, facts, created_at_s = row
        try:
            known = msgspec.json.decode(facts, type=Facts)
        except msgspec.DecodeError as error:
            raise DataDirError(
                f"`{self._path}` holds facts of `{name}` that cannot be read: {error}; deploy it again with "
                "`--overwrite`, or remove it"
            ) from error
        return Deployed(name, source, where, directory, digest, known, created_at_s)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise
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


class Names:
    """The names that requests may call models by: their own, and aliases of the configuration."""

    def __init__(self, deployed: Iterable[Deployed], models: Mapping[str, ModelConfig]) -> None:
        """Read the aliases; the settings of a model that is not deployed yet wait for it.

        Raises:
            ConfigError: an alias means two models, or no model can have the name of a table.
        """
        self._by_name = {model.name: model for model in deployed}
        self._models = models
        self._name_by_alias: dict[str, str] = {}
        for name, config in models.items():
            _check_table(name)
            for alias in config.aliases:
                is_own = alias in self._by_name or alias in models
                other = alias if is_own else self._name_by_alias.get(alias, name)
                if other != name:
                    raise ConfigError(
                        f"the alias `{alias}` of model `{name}` means model `{other}` too; give it to one"
                    )
                self._name_by_alias[alias] = name

    def resolve(self, name: str, allowed: Collection[str] | None = None) -> Deployed:
        """Return the model that a name or an alias means, one of those that are `allowed`; None: all.

        Raises:
            UnknownModel: there is none, or it is not allowed, which nobody can tell apart.
        """
        found = self._by_name.get(self._own_name(name))
        if allowed is not None and (found is None or found.name not in self.allowed(allowed)):
            raise self._unknown_among(name, self.allowed(allowed))
        if found is None:
            raise self.unknown(name)
        return found

    def allowed(self, allowed: Collection[str]) -> set[str]:
        """Return the deployed models that names or aliases mean; what is not deployed means none."""
        return {self._own_name(one) for one in allowed} & self._by_name.keys()

    def waiting(self) -> dict[str, str]:
        """Return the models whose settings wait until they are deployed, with hints at what was meant."""
        return {name: self._hint(name) for name in self._models if name not in self._by_name}

    def unknown(self, name: str) -> UnknownModel:
        return UnknownModel(f"no model is deployed under `{name:.80}`; {self._hint(name)}")

    def _own_name(self, name: str) -> str:
        """Return the own name of the model that is meant; a tag `latest` may be there or left out."""
        for spelt in (name, name.removesuffix(LATEST), name + LATEST):
            if (own := self._name_by_alias.get(spelt, spelt)) in self._by_name:
                return own
        return name

    def _unknown_among(self, name: str, allowed: Collection[str]) -> UnknownModel:
        """Return the error for who may know of some models alone, and is told of no other."""
        aliases = (alias for alias, one in self._name_by_alias.items() if one in allowed)
        known = sorted({*allowed, *aliases})
        return UnknownModel(
            f"no model is deployed under `{name:.80}`; {_describe_known(name, known, NearestName(known))}"
        )

    def _hint(self, name: str) -> str:
        return _describe_known(name, self._known, self._nearest)

    # Made when the first unknown name is asked for, and kept: many may follow.

    @cached_property
    def _known(self) -> list[str]:
        aliases = (alias for alias, name in self._name_by_alias.items() if name in self._by_name)
        return sorted({*self._by_name, *aliases})

    @cached_property
    def _nearest(self) -> NearestName:
        return NearestName(self._known)


def _describe_known(name: str, known: Sequence[str], nearest: NearestName) -> str:
    """Say which of the known names may have been meant, or what there is."""
    if (meant := nearest.find(name)) is not None:
        return f"did you mean `{meant}`?"
    if not known:
        return "none is; deploy one with `hearth deploy SOURCE`"
    more = ", ..." if len(known) > _MAX_LISTED else ""
    return f"deployed: {', '.join(known[:_MAX_LISTED])}{more}"


def _check_table(name: str) -> None:
    try:
        check_name(name)
    except RequestError as error:
        raise ConfigError(f"no model can have the settings in [models.{name:.80}]: {error}") from error
