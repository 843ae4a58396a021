"""`hearth keys`: API keys of the service, added, changed, listed and removed. Keeps only hashes of keys."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from hearth.cli import local_models
from hearth.cli.console import DEFAULT_DATA_DIR, AsJson, DataDirectory, app, err, print_columns, warn
from hearth.cli.environment import variable_of
from hearth.cli.figures import count, duration
from hearth.cli.tab_completion import complete_group, complete_key
from hearth.control.datadir import DataDir, running_service
from hearth.control.keys import keys
from hearth.control.keys.key_usage import KeyUse, UsageRecord, read_usage
from hearth.control.keys.keys import KeyInfo
from hearth.control.requests.caller import SERVICE_CLASSES, KeyTerms, Role
from hearth.core.errors import ConfigError, DataDirError, HearthError

KeysFile = Annotated[
    Path | None,
    typer.Option(
        "--api-keys-file",
        metavar="FILE",
        envvar=variable_of("service.api_keys_file"),
        help="By default keys.json in the data directory.",
    ),
]
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.")]

KnownKey = Annotated[
    str, typer.Argument(metavar="NAME", help="Whose key it is.", autocompletion=complete_key)
]

RequestsPerMinute = Annotated[
    str | None, typer.Option("--rpm", metavar="N", help="Requests per minute, or none for no limit.")
]
TokensPerMinute = Annotated[
    str | None,
    typer.Option("--tpm", metavar="N", help="Tokens of prompts and answers per minute, or none."),
]
Concurrent = Annotated[
    str | None, typer.Option("--concurrent", metavar="N", help="Requests at a time, or none for no limit.")
]
Models = Annotated[
    str | None,
    typer.Option("--models", metavar="NAMES", help="The models it may use, with commas between, or all."),
]
Class = Annotated[
    str | None,
    typer.Option(
        "--class",
        metavar="CLASS",
        help="interactive, or batch: its requests have no pace and give way to others.",
    ),
]

keys_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(keys_app, name="keys", help="Add, change, list and remove API keys.", rich_help_panel="Service")


@keys_app.command()
def add(
    name: KeyName,
    admin: Annotated[
        bool, typer.Option("--admin", help="May also deploy, remove and unload; implies --monitor.")
    ] = False,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="May also look at the whole service: ps, metrics, all requests.")
    ] = False,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="GROUP",
            help="Share cached prompts with all keys of this group; by default with no other key.",
            autocompletion=complete_group,
        ),
    ] = None,
    rpm: RequestsPerMinute = None,
    tpm: TokensPerMinute = None,
    concurrent: Concurrent = None,
    models: Models = None,
    service_class: Class = None,
    file: KeysFile = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Make a key and print it.

    It is shown this once: only its hash is kept. From the first key on a service asks for one, also if it
    runs already, and takes further ones at once.

    A prompt that begins like an earlier one is answered sooner, and `cached_tokens` in the answer's usage
    says so. So that nobody learns what others ask, only prompts of the same key count. Keys of one group
    trust each other: what they have in common, such as a system prompt, is computed once for all of them,
    and each may explain the requests of the others. Limits are each key's own.

    A request beyond a limit is answered with 429 and the time to come back, which OpenAI's clients keep by
    themselves. A model that a key may not use does not exist for it. `hearth keys set` changes limits.

    [bold]Examples[/bold]

      hearth keys add ada

      hearth keys add support-1 --group support

      hearth keys add ada --rpm 60 --tpm 100000 --concurrent 4 --models smollm2

      hearth keys add nightly --class batch

      hearth keys add prometheus --monitor

      hearth keys add deployer --admin
    """
    path = _path(file, data_dir)
    role: Role = "admin" if admin else "monitor" if monitor else "user"
    terms = _changed(KeyTerms(), rpm, tpm, concurrent, models, service_class)
    typer.echo(keys.add(path, name, role, group, terms))
    err.print(Text("keep it: it is not shown again", style="dim"))
    _note_unknown_models(terms, data_dir)
    _tell_of_service(path, data_dir, "asks everybody for a key from now on, and takes this one")


@keys_app.command("set")
def set_limits(
    name: KnownKey,
    rpm: RequestsPerMinute = None,
    tpm: TokensPerMinute = None,
    concurrent: Concurrent = None,
    models: Models = None,
    service_class: Class = None,
    file: KeysFile = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Change the limits of a key.

    The key stays the same, and so does each limit that is not named.

    [bold]Examples[/bold]

      hearth keys set ada --rpm 120

      hearth keys set ada --tpm none --models all
    """
    if all(one is None for one in (rpm, tpm, concurrent, models, service_class)):
        raise typer.BadParameter("name what to change: --rpm, --tpm, --concurrent, --models or --class")
    path = _path(file, data_dir)
    terms = keys.change(
        path, name, lambda before: _changed(before, rpm, tpm, concurrent, models, service_class)
    )
    typer.echo(f"{name}: {_spell_terms(terms)}")
    _note_unknown_models(terms, data_dir)
    _tell_of_service(path, data_dir, "goes by that from the next request on")


@keys_app.command("list")
def list_keys(
    file: KeysFile = None, data_dir: DataDirectory = DEFAULT_DATA_DIR, as_json: AsJson = False
) -> None:
    """List who has a key, for what, with which limits, and how much was asked with each.

    Keys of one GROUP share cached prompts. RPM and TPM are requests and tokens per minute. REQUESTS and
    TOKENS are all since the key was made, a few seconds old where a service runs.
    """
    known = keys.list_keys(_path(file, data_dir))
    usage = _usage(data_dir)
    if as_json:
        typer.echo(msgspec.json.encode([_as_json(key, usage) for key in known]))
        return
    header = ["NAME", "ROLE", "GROUP", "CLASS", "RPM", "TPM", "CONCURRENT", "MODELS"]
    print_columns([*header, "REQUESTS", "TOKENS", "USED", "CREATED"], [_row(key, usage) for key in known])
    if usage.keys and any(key.created_at_s < usage.since_s for key in known):
        since = f"requests and tokens are counted since {duration(time.time() - usage.since_s)} ago"
        err.print(Text(since, style="dim"), soft_wrap=True)


@keys_app.command()
def rm(name: KnownKey, file: KeysFile = None, data_dir: DataDirectory = DEFAULT_DATA_DIR) -> None:
    """Remove a key: whoever has it is refused from now on.

    With the last key gone a service that runs refuses everybody until there is another. One that is started
    then asks for none on this machine's own address, and does not start on another.
    """
    path = _path(file, data_dir)
    keys.remove(path, name)
    typer.echo(f"removed the key of {name}")
    if keys.list_keys(path):
        _tell_of_service(path, data_dir, "refuses it from now on")
    else:
        _tell_of_service(
            path, data_dir, "refuses everybody from now on, until a key is added or it is restarted"
        )


def _note_unknown_models(terms: KeyTerms, data_dir: Path) -> None:
    """Name the models of a key that are not deployed here; such a name may be an alias of a service."""
    for name in terms.models or ():
        try:
            local_models.find(data_dir, name)
        except HearthError as error:  # the key is made all the same
            warn(f"note: {error}")


def _tell_of_service(path: Path, data_dir: Path, effect: str) -> None:
    """Say what a change of keys means for the service on the data directory, which may have other keys."""
    try:
        service = running_service(data_dir)
    except DataDirError as error:  # the keys are changed all the same
        warn(f"whether a service runs that reads these keys cannot be told: {error}")
        return
    if service is None:
        return
    if Path(service.keys_path).resolve() == path.resolve():
        err.print(Text(f"the service at {service.url} {effect}", style="dim"), soft_wrap=True)
    else:
        warn(
            f"the service at {service.url} has other keys: it reads `{service.keys_path}`, and this was "
            f"`{path}`; name that with `--api-keys-file`"
        )


def _changed(
    terms: KeyTerms,
    rpm: str | None,
    tpm: str | None,
    concurrent: str | None,
    models: str | None,
    service_class: str | None,
) -> KeyTerms:
    """Return terms with what the options name changed. Raises BadParameter: one means nothing."""
    limits = terms.limits
    if rpm is not None:
        limits = replace(limits, requests_per_min=_limit("--rpm", rpm))
    if tpm is not None:
        limits = replace(limits, tokens_per_min=_limit("--tpm", tpm))
    if concurrent is not None:
        limits = replace(limits, concurrent=_limit("--concurrent", concurrent))
    terms = replace(terms, limits=limits)
    if models is not None:
        names = tuple(dict.fromkeys(one.strip() for one in models.split(",") if one.strip()))
        terms = replace(terms, models=None if names == ("all",) else names)
    if service_class is not None:
        named = next((one for one in SERVICE_CLASSES if one == service_class), None)
        if named is None:
            raise typer.BadParameter(f"--class is {' or '.join(SERVICE_CLASSES)}, given: {service_class:.80}")
        terms = replace(terms, service_class=named)
    return terms


def _limit(option: str, text: str) -> int | None:
    if text == "none":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text)):
        raise typer.BadParameter(f"{option} is a number above 0, or none for no limit, given: {text:.80}")
    return int(text)


def _spell_terms(terms: KeyTerms) -> str:
    limits = terms.limits
    return (
        f"rpm {limits.requests_per_min or 'none'}, tpm {limits.tokens_per_min or 'none'}, concurrent "
        f"{limits.concurrent or 'none'}, models {','.join(terms.models or ['all'])}, {terms.service_class}"
    )


def _usage(data_dir: Path) -> UsageRecord:
    """Return what services on the data directory have counted; nothing, where there was none."""
    try:
        return read_usage(DataDir(data_dir.expanduser().absolute()).usage_path)
    except ConfigError as error:  # the keys can be listed all the same
        warn(str(error))
        return UsageRecord()


def _row(key: KeyInfo, usage: UsageRecord) -> list[str]:
    limits, use, now_s = key.terms.limits, usage.keys.get(key.key_id, KeyUse()), time.time()
    limited = (limits.requests_per_min, limits.tokens_per_min, limits.concurrent)
    return [
        *(key.name, key.role, key.group or "-", key.terms.service_class),
        *("-" if limit is None else str(limit) for limit in limited),
        ",".join(key.terms.models or ["all"]),
        *(str(use.num_requests), count(use.prompt_tokens + use.output_tokens)),
        "never" if use.last_used_at_s is None else f"{duration(now_s - use.last_used_at_s)} ago",
        f"{duration(now_s - key.created_at_s)} ago",
    ]


def _as_json(key: KeyInfo, usage: UsageRecord) -> dict[str, object]:
    return {
        "name": key.name,
        "role": key.role,
        "created_at_s": key.created_at_s,
        "group": key.group,
        **asdict(key.terms.limits),
        "models": key.terms.models,
        "service_class": key.terms.service_class,
        **asdict(usage.keys.get(key.key_id, KeyUse())),
        "counted_since_s": max(usage.since_s, key.created_at_s) if usage.keys else None,
    }


def _path(file: Path | None, data_dir: Path) -> Path:
    return DataDir.open(data_dir).keys_path if file is None else file.expanduser()
