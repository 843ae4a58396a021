"""`hearth keys`: add, change, list and remove API keys."""

from __future__ import annotations

import time
from dataclasses import replace
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
from hearth.control.keys.key_usage import KeyView, UsageRecord, read_usage, view_of
from hearth.control.requests.caller import SERVICE_CLASSES, KeyTerms, Role
from hearth.core.errors import ConfigError, DataDirError, HearthError

KeysFile = Annotated[
    Path | None,
    typer.Option(
        "--api-keys-file",
        metavar="FILE",
        envvar=variable_of("service.api_keys_file"),
        help="File of API keys; by default keys.json in the data directory.",
    ),
]
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.")]

KnownKey = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the key.", autocompletion=complete_key)
]

RequestsPerMinute = Annotated[
    str | None, typer.Option("--rpm", metavar="N", help="Requests per minute; none: no limit.")
]
TokensPerMinute = Annotated[
    str | None,
    typer.Option("--tpm", metavar="N", help="Prompt and answer tokens per minute; none: no limit."),
]
Concurrent = Annotated[
    str | None, typer.Option("--concurrent", metavar="N", help="Concurrent requests; none: no limit.")
]
Models = Annotated[
    str | None,
    typer.Option("--models", metavar="NAMES", help="Allowed models, separated by commas, or all."),
]
Class = Annotated[
    str | None,
    typer.Option(
        "--class",
        metavar="CLASS",
        help="interactive, or batch: no pace, lower priority.",
    ),
]

keys_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(keys_app, name="keys", help="Add, change, list and remove API keys.", rich_help_panel="Service")


@keys_app.command()
def add(
    name: KeyName,
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow to deploy, remove and unload; implies --monitor.")
    ] = False,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="Allow ps, metrics and explaining all requests.")
    ] = False,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="GROUP",
            help="Share cached prompts with the keys of this group; by default with no other key.",
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
    """Create a key and print it.

    The key is shown only once; the service stores its hash. Once a key exists, a running service requires
    keys immediately.

    Prompts that share a prefix are faster, which `cached_tokens` in the usage shows. So that no key learns
    what others ask, prefixes are only shared within a key, or within a --group of keys that trust each other.
    Keys of a group can also explain each other's requests. Limits are per key.

    Requests over a limit get status 429 and a time to retry, which OpenAI's clients respect. Models that a
    key may not use do not exist for it. `hearth keys set` changes limits.

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
    typer.echo(keys.add(path, name, role, group, terms).key)
    err.print(Text("store it now: it is not shown again", style="dim"))
    _note_unknown_models(terms, data_dir)
    _tell_of_service(path, data_dir, "requires a key from now on, and accepts this one")


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

    The key itself and all other limits stay the same.

    [bold]Examples[/bold]

      hearth keys set ada --rpm 120

      hearth keys set ada --tpm none --models all
    """
    if all(one is None for one in (rpm, tpm, concurrent, models, service_class)):
        raise typer.BadParameter("give at least one of --rpm, --tpm, --concurrent, --models and --class")
    path = _path(file, data_dir)
    terms = keys.change(
        path, name, lambda before: _changed(before, rpm, tpm, concurrent, models, service_class)
    ).terms
    typer.echo(f"{name}: {_spell_terms(terms)}")
    _note_unknown_models(terms, data_dir)
    _tell_of_service(path, data_dir, "applies this from the next request on")


@keys_app.command("list")
def list_keys(
    file: KeysFile = None, data_dir: DataDirectory = DEFAULT_DATA_DIR, as_json: AsJson = False
) -> None:
    """List the keys with their roles, limits and usage.

    Keys of one GROUP share cached prompts. RPM and TPM are requests and tokens per minute. REQUESTS and
    TOKENS are totals since the key was created; a running service updates them every few seconds.
    """
    usage = _usage(data_dir)
    known = [view_of(key, usage) for key in keys.list_keys(_path(file, data_dir))]
    if as_json:
        typer.echo(msgspec.json.encode(known))
        return
    header = ["NAME", "ROLE", "GROUP", "CLASS", "RPM", "TPM", "CONCURRENT", "MODELS"]
    print_columns([*header, "REQUESTS", "TOKENS", "USED", "CREATED"], [_row(key) for key in known])
    if usage.keys and any(key.created_at_s < usage.since_s for key in known):
        since = f"requests and tokens are counted since {duration(time.time() - usage.since_s)} ago"
        err.print(Text(since, style="dim"), soft_wrap=True)


@keys_app.command()
def rm(name: KnownKey, file: KeysFile = None, data_dir: DataDirectory = DEFAULT_DATA_DIR) -> None:
    """Remove a key, which is rejected from now on.

    Without any keys, a running service rejects all requests until a key is added. A service that is started
    without keys requires none on localhost, and does not start on other addresses.
    """
    path = _path(file, data_dir)
    keys.remove(path, name)
    typer.echo(f"removed the key of {name}")
    if keys.list_keys(path):
        _tell_of_service(path, data_dir, "rejects it from now on")
    else:
        _tell_of_service(path, data_dir, "rejects all requests until a key is added or it is restarted")


def _note_unknown_models(terms: KeyTerms, data_dir: Path) -> None:
    for name in terms.models or ():
        try:
            local_models.find(data_dir, name)
        except HearthError as error:  # the key is created anyway
            warn(f"note: {error}")


def _tell_of_service(path: Path, data_dir: Path, effect: str) -> None:
    try:
        service = running_service(data_dir)
    except DataDirError as error:  # the keys are changed anyway
        warn(f"cannot tell whether a running service reads these keys: {error}")
        return
    if service is None:
        return
    if Path(service.keys_path).resolve() == path.resolve():
        err.print(Text(f"the service at {service.url} {effect}", style="dim"), soft_wrap=True)
    else:
        warn(
            f"the service at {service.url} reads its keys from `{service.keys_path}`, but this was `{path}`; "
            "pass its file with `--api-keys-file`"
        )


def _changed(
    terms: KeyTerms,
    rpm: str | None,
    tpm: str | None,
    concurrent: str | None,
    models: str | None,
    service_class: str | None,
) -> KeyTerms:
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
            raise typer.BadParameter(
                f"--class must be {' or '.join(SERVICE_CLASSES)}, given: {service_class:.80}"
            )
        terms = replace(terms, service_class=named)
    return terms


def _limit(option: str, text: str) -> int | None:
    if text == "none":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text)):
        raise typer.BadParameter(f"{option} must be a number above 0, or none, given: {text:.80}")
    return int(text)


def _spell_terms(terms: KeyTerms) -> str:
    limits = terms.limits
    return (
        f"rpm {limits.requests_per_min or 'none'}, tpm {limits.tokens_per_min or 'none'}, concurrent "
        f"{limits.concurrent or 'none'}, models {','.join(terms.models or ['all'])}, {terms.service_class}"
    )


def _usage(data_dir: Path) -> UsageRecord:
    try:
        return read_usage(DataDir(data_dir.expanduser().absolute()).usage_path)
    except ConfigError as error:  # the keys can be listed anyway
        warn(str(error))
        return UsageRecord()


def _row(key: KeyView) -> list[str]:
    now_s, limited = time.time(), (key.requests_per_min, key.tokens_per_min, key.concurrent)
    return [
        key.name,
        key.role,
        key.group or "-",
        key.service_class,
        *("-" if limit is None else str(limit) for limit in limited),
        ",".join(key.models or ["all"]),
        str(key.num_requests),
        count(key.prompt_tokens + key.output_tokens),
        "never" if key.last_used_at_s is None else f"{duration(now_s - key.last_used_at_s)} ago",
        f"{duration(now_s - key.created_at_s)} ago",
    ]


def _path(file: Path | None, data_dir: Path) -> Path:
    return DataDir.open(data_dir).keys_path if file is None else file.expanduser()
