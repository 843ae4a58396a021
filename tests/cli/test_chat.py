from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hearth.cli.client import AnswerDelta, Client
from tests.cli.fake_service import FakeService
from tests.cli.shell import Hearth, Outcome

CTRL_D = "\x04"
ANSWER = "The sky is blue.\u2028Really."


class Terminal:
    """A terminal at which lines are typed, the other end of what a command takes for its keyboard."""

    def __init__(self) -> None:
        self._keyboard, screen_side = os.openpty()
        self.stdin = open(screen_side, encoding="utf-8")  # noqa: SIM115 - closed by `close`

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    @property
    def shows_typing(self) -> bool:
        return bool(termios.tcgetattr(self.stdin.fileno())[3] & termios.ECHO)

    def close(self) -> None:
        self.stdin.close()
        os.close(self._keyboard)


class Talk:
    """`hearth run` with lines typed at a terminal."""

    def __init__(
        self, hearth: Hearth, service: FakeService, monkeypatch: pytest.MonkeyPatch, terminal: Terminal
    ) -> None:
        self._hearth, self._service, self._monkeypatch = hearth, service, monkeypatch
        self._terminal = terminal

    def __call__(self, *lines: str, flags: tuple[str, ...] = ()) -> Outcome:
        self._terminal.type("".join(f"{line}\n" for line in lines) + CTRL_D)
        self._monkeypatch.setattr("sys.stdin", self._terminal.stdin)
        return self._hearth("run", "smol", "--url", self._service.url, *flags)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with closing(Terminal()) as terminal:
        yield terminal


@pytest.fixture
def talk(
    hearth: Hearth,
    data_dir: Path,
    service: FakeService,
    monkeypatch: pytest.MonkeyPatch,
    terminal: Terminal,
) -> Talk:
    return Talk(hearth, service, monkeypatch, terminal)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt, also where the tests were started with it ignored, as by `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def messages(service: FakeService) -> list[list[tuple[str, str]]]:
    """Role and text, by request."""
    bodies = service.bodies("/v1/chat/completions")
    return [[(m["role"], m["content"]) for m in body["messages"]] for body in bodies]  # type: ignore[index]


def test_every_line_is_a_message_with_all_before(talk: Talk, service: FakeService) -> None:
    shown = talk("hello", "", "why?")

    assert (shown.code, shown.out.count(f"{ANSWER}\n")) == (0, 2)
    assert messages(service) == [
        [("user", "hello")],
        [("user", "hello"), ("assistant", ANSWER), ("user", "why?")],
    ]


def test_clear_forgets_all_but_the_system_message(talk: Talk, service: FakeService) -> None:
    talk("one", "/clear", "two", flags=("--system", "Be brief."))
    system = ("system", "Be brief.")
    assert messages(service) == [[system, ("user", "one")], [system, ("user", "two")]]


def test_exit_ends_before_the_lines_do(talk: Talk, service: FakeService) -> None:
    assert talk("one", "/exit", "two").code == 0
    assert len(messages(service)) == 1


def test_help_shows_the_commands_of_a_talk(talk: Talk, service: FakeService) -> None:
    shown = talk("/help", "/?", "/bye")
    assert " ".join(shown.err.split()).count("/clear start over") == 2
    assert "unknown command" not in shown.err
    assert messages(service) == []


def test_a_message_of_several_lines_stands_between_triple_quotes(talk: Talk, service: FakeService) -> None:
    talk('"""one', "", "  two", 'three"""', '"""four"""', '"""', "five", '"""', "/bye")
    assert [sent[-1][1] for sent in messages(service)] == ["one\n\n  two\nthree", "four", "five"]


def test_a_path_is_a_message_and_no_command(talk: Talk, service: FakeService) -> None:
    shown = talk("/etc/hosts is what?", "/set parameter seed 1", "/bye")
    assert messages(service) == [[("user", "/etc/hosts is what?")]]
    assert "unknown command `/set`" in shown.err


def test_an_error_is_told_and_the_talk_goes_on(talk: Talk, service: FakeService) -> None:
    service.breaks_after = 1
    shown = talk("one", "/what", "two")

    assert shown.code == 0
    assert shown.err.replace("\n", " ").count("stopped in the middle of its answer") == 2
    assert "unknown command `/what`" in shown.err
    assert messages(service) == [[("user", "one")], [("user", "two")]]


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_stops_an_answer_and_what_was_said_counts(
    talk: Talk, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Client.chat

    def interrupted(client: Client, *args: object) -> Iterator[AnswerDelta]:
        pieces = whole(client, *args)  # type: ignore[arg-type]  # as it was called
        yield next(pieces)
        monkeypatch.setattr(Client, "chat", whole)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Client, "chat", interrupted)

    shown = talk("one", "two")

    assert shown.code == 0
    assert "(stopped)" in shown.err
    assert messages(service)[1] == [("user", "one"), ("assistant", "The sky"), ("user", "two")]


def test_what_is_typed_during_an_answer_is_shown_and_sent_after_it(
    hearth: Hearth,
    data_dir: Path,
    service: FakeService,
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, was_shown = Client.chat, []

    def typed_into(client: Client, *args: object) -> Iterator[AnswerDelta]:
        for number, piece in enumerate(whole(client, *args)):  # type: ignore[arg-type]  # as it was called
            was_shown.append(terminal.shows_typing)
            if not number and len(messages(service)) == 1:
                terminal.type(f"two\n{CTRL_D}")
            yield piece

    monkeypatch.setattr(Client, "chat", typed_into)
    monkeypatch.setattr("sys.stdin", terminal.stdin)
    terminal.type("one\n")

    assert hearth("run", "smol", "--url", service.url).code == 0

    assert set(was_shown) == {False}
    assert terminal.shows_typing
    assert messages(service)[1] == [("user", "one"), ("assistant", ANSWER), ("user", "two")]
