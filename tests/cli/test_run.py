from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hearth.cli import run
from hearth.cli.client import AnswerDelta
from hearth.cli.console import is_place
from hearth.control.datadir import DataDir
from hearth.control.deploy.preset import Preset
from tests.cli.fake_service import MODEL, FakeService
from tests.cli.shell import Hearth
from tests.cli.test_chat import Terminal


def test_a_name_is_asked_through_the_service(hearth: Hearth, data_dir: Path, service: FakeService) -> None:
    shown = hearth("run", "smol", "hi", "--max-tokens", "5", "--seed", "3", "--url", service.url)

    assert (shown.code, shown.out) == (0, "The sky is blue.\u2028Really.\n")
    assert shown.err.startswith("3 tokens, ")
    assert f"`hearth explain r1 --url {service.url}` shows details" in shown.err
    (body,) = service.bodies("/v1/chat/completions")
    assert isinstance(body, dict)
    assert (body["messages"], body["max_tokens"], body["seed"]) == ([{"role": "user", "content": "hi"}], 5, 3)


@pytest.mark.parametrize(("is_terminal", "seen"), [(True, "Hm. So\n\n"), (False, "")])
def test_reasoning_is_shown_at_a_terminal_and_is_no_part_of_the_answer(
    hearth: Hearth, service: FakeService, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, seen: str
) -> None:
    service.reasoning = ("Hm. ", "So")
    terminal = Console(file=io.StringIO(), force_terminal=is_terminal, color_system=None)
    monkeypatch.setattr("hearth.cli.answerer.err", terminal)

    shown = hearth("run", "smol", "hi", "--url", service.url)

    assert (shown.code, shown.out) == (0, "The sky is blue.\u2028Really.\n")
    assert isinstance(terminal.file, io.StringIO)
    assert terminal.file.getvalue() == seen


def test_an_answer_that_is_only_thinking_is_told(hearth: Hearth, service: FakeService) -> None:
    service.reasoning, service.answer = ("Hm. ", "So"), [""]

    shown = hearth("run", "smol", "hi", "--url", service.url)

    assert (shown.code, shown.out) == (0, "\n")
    assert shown.err.startswith("no answer, only thinking: ")
    told = json.loads(hearth("run", "smol", "hi", "--json", "--url", service.url).out)
    assert (told["text"], told["reasoning"]) == ("", "Hm. So")


def test_a_prompt_may_be_given_without_quotes(hearth: Hearth, data_dir: Path, service: FakeService) -> None:
    hearth("run", "smol", "--url", service.url, "Why", "is", "--seed", "1", "the", "sky", "blue?")
    (body,) = service.bodies("/v1/chat/completions")
    assert isinstance(body, dict)
    assert body["messages"] == [{"role": "user", "content": "Why is the sky blue?"}]


def test_without_a_prompt_a_pipe_says_it(
    hearth: Hearth, data_dir: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi from a pipe\n"))
    assert hearth("run", "smol", "--url", service.url).out == "The sky is blue.\u2028Really.\n"
    (body,) = service.bodies("/v1/chat/completions")
    assert isinstance(body, dict)
    assert body["messages"] == [{"role": "user", "content": "hi from a pipe"}]

    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    empty = hearth("run", "smol", "--url", service.url)
    assert (empty.code, empty.err.count("\n")) == (2, 1)
    assert "standard input is empty" in empty.err


@pytest.mark.parametrize(("prompt", "piped"), [("Summarise.", "a text\n\nSummarise."), ("-", "a text")])
def test_a_prompt_comes_after_what_a_pipe_says(
    hearth: Hearth,
    data_dir: Path,
    service: FakeService,
    monkeypatch: pytest.MonkeyPatch,
    prompt: str,
    piped: str,
) -> None:
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as stdin, open(writer, "w", encoding="utf-8") as pipe:
        pipe.write("a text\n")
        pipe.close()
        monkeypatch.setattr("sys.stdin", stdin)
        hearth("run", "smol", prompt, "--url", service.url)
    (body,) = service.bodies("/v1/chat/completions")
    assert isinstance(body, dict)
    assert body["messages"] == [{"role": "user", "content": piped}]


def test_without_a_prompt_a_terminal_holds_a_conversation(
    hearth: Hearth, data_dir: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Terminal()) as terminal:
        terminal.type("one\ntwo\n/bye\n")
        monkeypatch.setattr("sys.stdin", terminal.stdin)
        shown = hearth("run", "smol", "--temperature", "0.1", "--url", service.url)
    assert shown.code == 0
    assert "/help" in shown.err
    bodies = [body for body in service.bodies("/v1/chat/completions") if isinstance(body, dict)]
    assert [len(body["messages"]) for body in bodies] == [1, 3]
    assert {(body["temperature"], body["max_tokens"]) for body in bodies} == {(0.1, 1024)}


@pytest.mark.parametrize("flags", [(), ("--raw",)])
def test_a_conversation_needs_a_chat_template(
    hearth: Hearth,
    data_dir: Path,
    service: FakeService,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
) -> None:
    service.models = [replace(MODEL, has_chat_template=bool(flags))]
    with closing(Terminal()) as terminal:
        monkeypatch.setattr("sys.stdin", terminal.stdin)
        shown = hearth("run", "smol", "--url", service.url, *flags)
    assert (shown.code, shown.err.count("\n")) == (2, 1)
    assert "a conversation needs a chat template" in shown.err


def test_a_preset_is_asked_with_its_parameters_unless_flags_say_others(
    hearth: Hearth, data_dir: Path, service: FakeService
) -> None:
    preset = Preset(temperature=0.25, max_tokens=9)
    service.models = [replace(MODEL, name="pirate", base="smol", preset=preset)]
    hearth("run", "pirate", "hi", "--url", service.url)
    hearth("run", "pirate", "hi", "--max-tokens", "5", "--url", service.url)
    bodies = [body for body in service.bodies("/v1/chat/completions") if isinstance(body, dict)]
    assert [(body["temperature"], body["max_tokens"]) for body in bodies] == [(0.25, 9), (0.25, 5)]


@pytest.mark.parametrize(
    "source", ["hf:org/smol", "org/smol", "hf.co/org/smol", "https://huggingface.co/org/smol"]
)
def test_a_repository_of_the_hub_is_the_model_that_was_deployed_from_it(
    hearth: Hearth, data_dir: Path, service: FakeService, source: str
) -> None:
    service.models = [replace(MODEL, source="hf:org/smol@abc")]
    assert hearth("run", source, "hi", "--url", service.url).code == 0
    (body,) = service.bodies("/v1/chat/completions")
    assert isinstance(body, dict)
    assert body["model"] == "smol"


def test_a_repository_of_the_hub_is_deployed_after_a_question(
    hearth: Hearth, data_dir: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = hearth("run", "hf:org/new", "hi", "--url", service.url)
    assert (refused.code, refused.err.count("\n")) == (3, 1)
    assert "`hearth deploy hf:org/new`" in refused.err

    service.derived_name = "smol"
    with closing(Terminal()) as terminal:
        terminal.type("y\n")
        monkeypatch.setattr("sys.stdin", terminal.stdin)
        shown = hearth("run", "hf:org/new", "hi", "--url", service.url)
    assert (shown.code, shown.out) == (0, "The sky is blue.\u2028Really.\n")
    assert "hf:org/new is not deployed. Deploy it now?" in shown.err
    (body,) = [body for body in service.bodies("/hearth/models") if isinstance(body, dict)]
    assert body["source"] == "hf:org/new"


@pytest.mark.parametrize(
    ("text", "is_path_or_url"),
    [
        *[(text, True) for text in ("./smol", "~/smol", "smol.gguf", "org/smol.gguf", "s3://bucket/smol")],
        *[(text, False) for text in ("smol:latest", "org/smol", "hf:org/smol:a.gguf", "hf.co/org/smol")],
    ],
)
def test_a_place_is_no_name_and_nothing_on_the_hub(text: str, is_path_or_url: bool) -> None:
    assert is_place(text) == is_path_or_url


def test_raw_prompts_are_continued(hearth: Hearth, data_dir: Path, service: FakeService) -> None:
    hearth("run", "smol", "Once", "--raw", "--url", service.url)
    (body,) = service.bodies("/v1/completions")
    assert isinstance(body, dict)
    assert body["prompt"] == "Once"


def test_a_model_without_a_chat_template_continues(
    hearth: Hearth, data_dir: Path, service: FakeService
) -> None:
    service.models = [replace(MODEL, has_chat_template=False)]
    assert hearth("run", "smol", "Once", "--url", service.url).code == 0
    assert len(service.bodies("/v1/completions")) == 1


def test_json_holds_the_answer_and_its_request(hearth: Hearth, data_dir: Path, service: FakeService) -> None:
    answer = json.loads(hearth("run", "smol", "hi", "--json", "--url", service.url).out)
    assert (answer["num_tokens"], answer["finish_reason"], answer["request_id"]) == (3, "stop", "r1")
    assert (answer["load"], answer["token_ids"]) == (None, [])


@pytest.mark.parametrize("flag", [("--device", "cpu"), ("--set", "engine.max_seqs=4")])
def test_what_a_service_cannot_heed_is_refused(
    hearth: Hearth, data_dir: Path, service: FakeService, flag: tuple[str, str]
) -> None:
    shown = hearth("run", "smol", "hi", *flag, "--url", service.url)
    assert (shown.code, shown.out) == (2, "")
    assert f"`{flag[0]}` is for models in this process" in shown.err


def test_how_to_explain_an_answer_names_the_service_as_it_was_named(
    hearth: Hearth, tmp_path: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = tmp_path / "with space"
    with DataDir.hold(data_dir) as held:
        service.announce(held)
        assert f"`hearth explain r1 --data-dir '{data_dir}'` shows" in hearth(
            *("run", "smol", "hi", "--data-dir", str(data_dir))
        ).err.replace("\n", " ")
        monkeypatch.setenv("HEARTH_DATA_DIR", str(data_dir))
        assert "`hearth explain r1` shows" in hearth("run", "smol", "hi").err


def test_who_may_not_name_the_directory_by_settings_is_told_how_to(
    hearth: Hearth, tmp_path: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEARTH_DATA_DIR", raising=False)
    with DataDir.hold(tmp_path / "data") as held:
        service.announce(held)
        shown = hearth("run", "smol", "hi", "--set", f"service.data_dir={held.path}")
    assert shown.code == 2
    told = " ".join(shown.err.split())
    assert f"drop it and pass `--data-dir {held.path}`" in told


@pytest.mark.parametrize("command", [("run", "./m", "hi"), ("show", "./m")])
def test_a_service_is_not_named_for_a_model_that_is_read_here(
    hearth: Hearth, service: FakeService, command: tuple[str, ...]
) -> None:
    shown = hearth(*command, "--url", service.url)
    assert (shown.code, shown.out) == (2, "")
    assert "`./m` is read in this process" in shown.err
    assert service.asked == []


def test_the_data_directory_of_the_configuration_is_looked_into(
    hearth: Hearth, tmp_path: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEARTH_DATA_DIR", raising=False)
    config = tmp_path / "hearth.toml"
    config.write_text(f'[service]\ndata_dir = "{tmp_path / "data"}"\nport = 9000\n')
    with DataDir.hold(tmp_path / "data") as held:
        service.announce(held)
        shown = hearth("run", "smol", "hi", "--config", str(config))
        report = json.loads(hearth("doctor", "--json", "--config", str(config)).out)["service"]
        elsewhere = json.loads(
            hearth("doctor", "--json", "--config", str(config), "--data-dir", str(tmp_path)).out
        )["service"]
    assert (shown.code, f"the service at `{service.url}` would answer" in shown.err) == (2, True)
    assert (report["status"], report["url"]) == ("ok", service.url)
    assert (elsewhere["status"], elsewhere["data_dir"]) == ("not running", str(tmp_path))


def test_without_a_service_a_deployed_model_answers_in_this_process(hearth: Hearth, tiny: Path) -> None:
    answer = json.loads(hearth("run", "tiny", "hi", "--max-tokens", "4", "--device", "cpu", "--json").out)

    assert answer["num_tokens"] == len(answer["token_ids"]) == 4
    assert answer["load"]["rungs"]["disk"]["num_bytes"] > 0


def test_a_folder_does_not_stand_in_for_the_model_of_its_name(
    hearth: Hearth, data_dir: Path, service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("smol", "other"):
        (tmp_path / name).mkdir()

    assert hearth("run", "smol", "hi", "--url", service.url).code == 0
    shown = hearth("run", "other", "hi", "--url", service.url)
    assert shown.code == 3
    assert "`./other`" in shown.err


def test_a_name_may_look_like_a_path_where_there_is_none(
    hearth: Hearth, data_dir: Path, service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    service.models = [replace(MODEL, name="org/smol:7b")]

    assert hearth("run", "org/smol:7b", "hi", "--url", service.url).code == 0
    (tmp_path / "org" / "smol:7b").mkdir(parents=True)
    shown = hearth("run", "org/smol:7b", "hi", "--url", service.url)
    assert "`org/smol:7b` is read in this process" in shown.err


def test_a_system_prompt_comes_first(hearth: Hearth, data_dir: Path, service: FakeService) -> None:
    assert hearth("run", "smol", "hi", "--system", "Be brief.", "--url", service.url).code == 0
    raw = hearth("run", "smol", "hi", "--system", "Be brief.", "--raw", "--url", service.url)

    (body,) = service.bodies("/v1/chat/completions")
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert raw.code == 2
    assert "`--system` needs a chat template" in raw.err


class SlowAnswerer:
    """Begins its stream at once, sends text after 5 s and ends after 7 s by `now_s`."""

    now_s = 0.0

    def chat(self) -> Iterator[AnswerDelta]:
        yield AnswerDelta("")
        self.now_s = 5.0
        yield AnswerDelta("The sky")
        self.now_s = 7.0
        yield AnswerDelta("", "stop")


def test_the_first_token_is_not_the_begin_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    answerer = SlowAnswerer()
    monkeypatch.setattr("hearth.cli.run.time.perf_counter", lambda: answerer.now_s)

    answer = run._timed(answerer.chat(), quiet=True)

    assert (answer.first_token_s, answer.total_s) == (5.0, 7.0)
