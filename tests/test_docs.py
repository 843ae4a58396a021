"""The documents tell the truth: code runs, commands, files and links exist, tables are fresh.

In code and commands of a document `path/to/model` stands for a model's directory; here that of a tiny one.
Code that asks the service on port 8000 asks a fake one here, which speaks the same JSON.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints
from unittest.mock import Mock

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from hearth import cli
from hearth.api.app import ApiLimits, create_app
from hearth.cli.commands import whole_app
from hearth.cli.familiar import translated
from hearth.cli.snapshot import MakingGroup
from hearth.core.config import HearthConfig, ModelConfig, load
from hearth.core.errors import HearthError
from hearth.models.families import FAMILIES
from tests.cli.fake_service import serving
from tests.models.speaking import save_speaking
from tests.store.format.peft_files import write_peft

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "hearth"
README = ROOT / "README.md"
STRUCTURE = ROOT / "docs" / "structure.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGURATION = ROOT / "docs" / "configuration.md"
EXAMPLE = ROOT / "examples" / "hearth.toml"
PLACEHOLDER, ADAPTER_PLACEHOLDER = "path/to/model", "path/to/adapter"
SERVICE = "http://127.0.0.1:8000"
MAX_README_LINES = 150
#: What a person reads in ten minutes.
MAX_MAP_LINES, MAX_MAP_CHARS = 170, 120


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    line: int  #: of its first line of code, counted from 0
    code: str


def blocks(document: Path, language: str) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    found = re.finditer(r"^( *)```(\w+)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    all_blocks = [Block(m[2], text.count("\n", 0, m.start(3)), textwrap.dedent(m[3])) for m in found]
    return [block for block in all_blocks if block.language == language]


def spans(document: Path) -> list[str]:
    """Code within sentences."""
    prose = re.sub(
        r"^ *```.*?^ *```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    return re.findall(r"`([^`\n]+)`", prose)


def shell_lines() -> list[str]:
    return [line for block in blocks(README, "sh") for line in block.code.splitlines()]


@dataclass(frozen=True, slots=True)
class Command:
    program: str  #: without its folder
    words: list[str]
    is_whole: bool  #: one to copy, not one that a sentence only names


def commands(document: Path) -> Iterator[Command]:
    """Shell commands in blocks and sentences, those behind pipes and variables included."""
    code = "\n".join(block.code for block in blocks(document, "sh")).replace("\\\n", " ")
    lines = [*((line, True) for line in code.splitlines()), *((line, False) for line in spans(document))]
    for line, is_whole in lines:
        for part in re.split(r" \| | && |; ", line):
            if re.match(r"(\w+=\S* )*(\.venv/bin/\w+|make|hearth|curl)( |$)", part):
                words = shlex.split(re.sub(r"^(\w+=\S* )*", "", part), comments=True)
                yield Command(Path(words[0]).name, words[1:], is_whole)


def listed(document: Path, heading: str) -> list[str]:
    """What the bullets under a heading begin with."""
    section = document.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^- `([^`]+)`: ", section, re.MULTILINE)


def rooms() -> list[str]:
    """The folders of the package."""
    return [f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of single bytes and a chat template."""
    return save_speaking(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all commands of a document: what one deploys, the next one asks."""
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "python")], ids=name)
def test_python_in_documents_runs(document: Path, model_directory: Path, tmp_path: Path) -> None:
    namespace: dict[str, object] = {"__name__": document.stem}
    with serving() as service:
        for block in blocks(document, "python"):
            code = block.code.replace(PLACEHOLDER, str(model_directory)).replace(SERVICE, service.url)
            if ADAPTER_PLACEHOLDER in code:
                code = code.replace(ADAPTER_PLACEHOLDER, str(write_peft(tmp_path / "lora")))
            # The empty lines let a traceback name the line of the document.
            exec(compile("\n" * block.line + code, str(document), "exec"), namespace)


@pytest.mark.parametrize("line", [line for line in shell_lines() if line.startswith(".venv/bin/hearth ")])
def test_hearth_commands_of_the_readme_succeed(
    line: str,
    model_directory: Path,
    data_directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEARTH_DATA_DIR", str(data_directory))
    argv = shlex.split(line.replace(PLACEHOLDER, str(model_directory)), comments=True)[1:]

    with pytest.raises(SystemExit) as caught:
        cli.main(argv)

    assert caught.value.code == 0
    assert capsys.readouterr().out


def test_the_readme_opens_with_the_two_commands_and_shows_how_to_ask() -> None:
    assert [line.split()[:2] for line in shell_lines()[:2]] == [["make", "demo"], ["make", "test"]]
    assert shell_lines()[2].startswith(f"curl {SERVICE}/v1/chat/completions ")
    assert [block.code.split()[1] for block in blocks(README, "python")] == ["openai", "hearth"]
    assert any(line.startswith(f".venv/bin/hearth run {PLACEHOLDER} ") for line in shell_lines())


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_commands_in_documents_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for command in commands(document):
        match command.program:
            case "make":
                assert not command.words or command.words[0] in targets, f"no such target: {command.words}"
            case "hearth":
                check_parses(command)
            case "curl":
                check_route(command)
            case program:
                assert (Path(sys.executable).parent / program).exists(), f"not in .venv: {program}"


@cache
def command_line() -> object:
    return get_command(whole_app())


def check_parses(command: Command) -> None:
    """Have the real command read the words of one to copy, and know the options of one that is only named."""
    called, words = command_line(), translated(command.words)
    while isinstance(called, TyperGroup) and words and not words[0].startswith("-"):
        words = called.resolve_words(words) if isinstance(called, MakingGroup) else words
        assert words[0] in called.commands, f"no such command: hearth {shlex.join(command.words)}"
        called, words = called.commands[words[0]], words[1:]
    if command.is_whole:
        with suppress(HearthError):  # of a file that is not here: the words are fine
            called.make_context("hearth", [*words])
        return
    flags = {flag for parameter in called.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    known = flags | {"-h", "--help"}
    unknown = [word for word in words if re.match("--?[a-z]", word) and word.partition("=")[0] not in known]
    assert not unknown, f"no such option: hearth {shlex.join(command.words)}"


@cache
def routes() -> list[re.Pattern[str]]:
    """The paths that a service answers."""
    paths = create_app(Mock(), ApiLimits(1, 1.0, 0)).openapi()["paths"]  # the gateway is asked nothing
    return [
        re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(path))) for path in [*paths, "/openapi.json", "/docs"]
    ]


def check_route(command: Command) -> None:
    urls = [word for word in command.words if word.startswith(SERVICE)]
    assert urls, f"asks nobody: curl {shlex.join(command.words)}"
    path = urls[0].removeprefix(SERVICE).partition("?")[0]
    assert any(route.fullmatch(path) for route in routes()), f"no such route: {path}"


#: Entries of the log describe the code of their day.
TODAY = [document for document in DOCUMENTS if document.parent.name != "log"]


@pytest.mark.parametrize("document", TODAY, ids=name)
def test_files_named_in_documents_exist(document: Path) -> None:
    files = [span for span in spans(document) if re.fullmatch(r"[\w/]+\.py|(scripts|examples)/[\w.]+", span)]
    assert [f for f in files if not (PACKAGE / f).exists() and not (ROOT / f).exists()] == []


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    for target in (target for target in targets if "://" not in target):
        path, _, anchor = target.partition("#")
        where = (document.parent / path).resolve() if path else document
        assert where.exists(), f"leads nowhere: {target}"
        assert not anchor or anchor in anchors(where), f"no such heading: {target}"


def anchors(document: Path) -> set[str]:
    """The names that a page gives its headings: small letters, no punctuation, hyphens for spaces."""
    prose = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_guide_is_listed() -> None:
    guides = sorted(path.name for path in (ROOT / "docs" / "guides").glob("*.md") if path.stem != "README")
    listed_guides = re.findall(
        r"\]\((\w+\.md)\) \|$", (ROOT / "docs/guides/README.md").read_text(), re.MULTILINE
    )
    assert sorted(listed_guides) == guides


def test_every_experiment_is_listed_in_the_log() -> None:
    log = ROOT / "docs" / "log"
    rows = re.findall(r"^\| \[(.+?)\]\((\S+?)#", (log / "README.md").read_text(), re.MULTILINE)
    titles = [
        (title, path.name)
        for path in log.glob("2*.md")
        for title in re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)
    ]
    assert sorted(rows) == sorted(titles)


def test_the_references_are_fresh() -> None:
    script = str(ROOT / "scripts" / "reference")
    checked = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_configuration_reference_explains_every_setting() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| *(.*) \|$", CONFIGURATION.read_text(encoding="utf-8"), re.MULTILINE
    )
    sections = [section for section in get_type_hints(HearthConfig).values() if is_dataclass(section)]
    keys = [field.name for section in [*sections, ModelConfig] for field in fields(section)]
    assert [key for key, _ in rows] == keys
    assert [key for key, meaning in rows if not meaning] == [], "write a `#:` comment beside the field"


def test_the_example_of_a_configuration_is_one() -> None:
    config = load(EXAMPLE)
    assert {"assistant", "qwen2.5-7b", "summaries"} == set(config.models)
    defaults = HearthConfig()
    for section in ("engine", "store", "service"):
        assert getattr(config, section) != getattr(defaults, section), f"[{section}] changes nothing"


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "toml")], ids=name)
def test_toml_in_documents_is_a_configuration(document: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(document, "toml")):
        path = tmp_path / f"{number}.toml"
        path.write_text(block.code, encoding="utf-8")
        load(path)


def test_the_map_has_a_line_for_every_folder_of_the_package_and_of_policy() -> None:
    section = STRUCTURE.read_text(encoding="utf-8").partition("\n## Folders\n")[2].partition("\n## ")[0]
    folders = [f"policy/{path.parent.name}/" for path in PACKAGE.glob("policy/*/__init__.py")]
    assert sorted(re.findall(r"^\| `([^`]+)` \| ", section, re.MULTILINE)) == sorted([*rooms(), *folders])


def test_the_map_names_every_file_at_the_top_of_the_package() -> None:
    files = [path.name for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "version")]
    assert [file for file in files if file not in spans(STRUCTURE)] == []


def test_the_map_is_one_page() -> None:
    lines = STRUCTURE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_MAP_LINES
    assert [line for line in lines if len(line) > MAX_MAP_CHARS and not line.startswith("|")] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_the_families_that_exist_are_listed() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(FAMILIES)
    assert f"[{len(FAMILIES)}\nfamilies](docs/models.md)" in README.read_text(encoding="utf-8")


def tables(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "scripts" / "tables")
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)


def test_tables_in_the_documents_are_fresh() -> None:
    checked = tables("--check")
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_table_of_clients_has_a_row_for_each_mark(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- clients -->\n<!-- end -->\n")
    (tmp_path / "tests" / "service").mkdir(parents=True)
    (tmp_path / "tests" / "service" / "test_x.py").write_text(
        '@pytest.mark.client("zeta", "chat")\n@pytest.mark.e2e\ndef test_chats(): ...\n'
        '@pytest.mark.client("alpha", "images", refused="send text")\ndef test_sees(): ...\n'
    )
    assert tables("--root", str(tmp_path)).returncode == 0
    assert (tmp_path / "README.md").read_text().splitlines()[3:-1] == [
        "| alpha | images | refused: send text | `test_x.py::test_sees` |",
        "| zeta | chat | works | `test_x.py::test_chats` |",
    ]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One document with a table, and no results."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("before\n<!-- table: engine -->\nold\n<!-- end -->\nafter\n")
    return tmp_path


def keep_results(repository: Path, *rows: dict[str, object]) -> None:
    folder = repository / "bench" / "results"
    folder.mkdir(parents=True)
    document = {"environment": {"device": "a toaster", "torch": "9.9", "triton": None}, "rows": rows}
    (folder / "engine.json").write_text(json.dumps(document))


def test_a_stale_table_fails_the_check_and_stays_as_it_is(repository: Path) -> None:
    checked = tables("--check", "--root", str(repository))
    assert (checked.returncode, checked.stdout) == (1, "")
    assert checked.stderr.startswith("README.md: its tables are stale")
    assert "\nold\n" in (repository / "README.md").read_text()


def test_a_table_without_results_says_how_to_measure(repository: Path) -> None:
    tables("--root", str(repository))
    line = "not measured yet: `make bench-gpu WHAT=engine`"
    text = f"before\n<!-- table: engine -->\n{line}\n<!-- end -->\nafter\n"
    assert (repository / "README.md").read_text() == text
    assert tables("--check", "--root", str(repository)).returncode == 0


def test_a_table_compares_with_the_bound_and_the_best_peer(repository: Path) -> None:
    rate = {"measure": "rate", "unit": "tokens/s", "value": 7456.2, "bound": 9000, "peers": {"A 1": 3728.1}}
    delay = {
        "measure": "delay",
        "unit": "ms",
        "value": 40.0,
        "bound": None,
        "peers": {"A 1": 60.0, "B 2": 50},
    }
    idle = {"measure": "idle", "unit": "share", "value": 0.081, "bound": 0, "peers": {}, "aim": "under 0.1"}
    keep_results(repository, rate, delay, idle)

    tables("--root", str(repository))

    assert (repository / "README.md").read_text().splitlines()[2:-2] == [
        "| measure | Hearth | bound | A 1 | B 2 | times the best peer's speed |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| rate (tokens/s) | 7,456 | 9,000 | 3,728 | - | 2 |",
        "| delay (ms) | 40 | - | 60 | 50 | 1.25 |",
        "| idle (share) | 0.081 | 0 | - | - | - |",
        "",
        "Measured on a toaster, torch 9.9.",
    ]


def test_a_table_may_show_only_rows_with_some_texts_and_leaves_notes_to_the_whole_one(
    repository: Path,
) -> None:
    names = ["7B at once", "7B one by one", "8B at once, again"]
    keep_results(repository, *({"measure": name, "unit": "s", "value": 2.0} for name in names))
    (repository / "bench" / "peers.json").write_text(json.dumps({"engine": {"source": "a friend"}}))
    readme = repository / "README.md"
    readme.write_text("<!-- table: engine: one by, 8B at -->\nold\n<!-- end -->\n")

    tables("--root", str(repository))

    assert readme.read_text().splitlines()[1:-1] == [
        "| measure | Hearth |",
        "| --- | ---: |",
        "| 7B one by one (s) | 2 |",
        "| 8B at once, again (s) | 2 |",
        "",
        "Measured on a toaster, torch 9.9.",
    ]
    readme.write_text("<!-- table: engine: 9B -->\nold\n<!-- end -->\n")
    assert "has no row with one of these texts: 9B" in tables("--root", str(repository)).stderr


def test_results_of_another_shape_are_refused_by_name(repository: Path) -> None:
    keep_results(repository, {"measure": "rate"})
    refused = tables("--root", str(repository))
    assert refused.returncode == 1
    assert "engine.json is no result" in refused.stderr


def test_a_table_without_an_end_is_refused(repository: Path) -> None:
    (repository / "README.md").write_text("<!-- table: engine -->\nold\n")
    refused = tables("--root", str(repository))
    assert "close each by `<!-- end -->`" in refused.stderr
