from __future__ import annotations

import errno
import inspect
import io
import itertools
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from hearth.cli import doctor_checks as doctor
from hearth.cli.commands import MODULES, whole_app
from hearth.cli.help import command_of
from hearth.core.config import CPU_HOST_BYTES, EngineConfig, StoreConfig
from hearth.core.errors import DeviceError
from hearth.core.types import FinishReason, Rung, SamplingParams
from hearth.kernels import prefill_hopper
from hearth.store.format.manifest import read_manifest
from hearth.store.transfer.record import LoadRecord, RungTotals
from hearth.system.cpus import WaitPolicy
from tests.cli.shell import Hearth
from tests.models.zoo import build
from tests.store.format.gguf_files import write_model


@pytest.fixture
def hearth(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hearth:
    monkeypatch.setenv("HEARTH_DATA_DIR", str(tmp_path / "data"))  # where nothing is deployed
    return Hearth(capsys)


COMMANDS = get_group(whole_app()).commands
#: The text of a terminal of 80, which has a margin on both sides.
HELP_COLUMNS = 78


@dataclass(frozen=True, slots=True)
class FakeDelta:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Calls:
    """What the fake model was asked for; written by `FakeLLM` alone."""

    made: dict[str, object] = field(default_factory=dict)
    prompt: object = None
    params: SamplingParams | None = None
    is_closed: bool = False
    logs: list[tuple[int, str]] = field(default_factory=list)  #: what it is to log as it is made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stands a model that always answers "hello" in for the engine."""
    calls = Calls()

    class FakeLLM:
        has_chat_template = True

        def __init__(
            self,
            path: str,
            *,
            device: str,
            dtype: str,
            engine: EngineConfig,
            store: StoreConfig,
            adapters: Mapping[str, str],
        ) -> None:
            assert not adapters
            for level, message in calls.logs:
                logging.getLogger("hearth.llm").log(level, message)
            calls.made = {"path": path, "device": device, "dtype": dtype, "engine": engine, "store": store}

        def wait_loaded(self) -> LoadRecord:
            use = RungTotals(num_chunks=2, num_bytes=30 << 20, seconds=0.5)
            return LoadRecord("m", 30 << 20, {Rung.DISK: use}, 0.1, 0.1, 0.1, 0.1, 0.5, 0)

        def __enter__(self) -> FakeLLM:
            return self

        def __exit__(self, *exception: object) -> None:
            calls.is_closed = True

        def chat_prompt(
            self, messages: Sequence[Mapping[str, object]], template: str | None = None
        ) -> list[int]:
            assert template is None
            return [len(messages), len(str(messages[0]["content"]))]

        def stream(
            self, prompt: object, params: SamplingParams, *, lora_request: str | None
        ) -> Iterator[FakeDelta]:
            assert lora_request is None
            calls.prompt, calls.params = prompt, params
            yield FakeDelta("hel", (7,), None)
            yield FakeDelta("lo", (8, 9), FinishReason.STOP)

    module = ModuleType("hearth.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]  # a stand-in for the module
    monkeypatch.setitem(sys.modules, "hearth.llm", module)
    return calls


def test_a_command_imports_no_module_of_others(tmp_path: Path) -> None:
    code = (
        "import sys; from hearth.cli import main\n"
        f"sys.argv[1:] = ['ps', '--data-dir', {str(tmp_path)!r}]\n"
        "try: main()\n"
        "finally: print(*(name for name in sys.modules if name.startswith('hearth.')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)

    assert ran.returncode == 3, ran.stderr
    assert "no service runs on the data directory" in ran.stderr
    imported = set(ran.stdout.split())
    assert "hearth.cli.ps" in imported
    assert not imported & {f"hearth.cli.{module}" for module in ("run", "keys", "simulate", "serve", "demo")}


def test_every_command_is_found_in_its_module() -> None:
    def module_of(command: TyperCommand | TyperGroup) -> str:
        while isinstance(command, TyperGroup):
            command = next(iter(command.commands.values()))  # type: ignore[assignment] # Typer makes no others
        return inspect.unwrap(command.callback).__module__  # type: ignore[arg-type] # a command has one

    listed = {name: f"hearth.cli.{module}" for module, names in MODULES.items() for name in names}
    assert {name: module_of(command) for name, command in COMMANDS.items()} == listed  # type: ignore[arg-type] # as above


def test_help_teaches_and_imports_nothing_slow() -> None:
    code = (
        "import sys; from hearth.cli import main\n"
        "try: main(['run', '--help'])\n"
        "finally: print([name for name in ('torch', 'numpy', 'fastapi', 'httpx') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert "Why is the sky blue?" in shown.stdout
    assert shown.stdout.endswith("[]\n")


def test_a_command_without_arguments_shows_its_commands(hearth: Hearth) -> None:
    shown = hearth("--help")
    assert shown.code == 0
    listed = re.findall(r"^[│|] (\w+) ", shown.out, re.MULTILINE)
    assert sorted(listed) == sorted(name for name, command in COMMANDS.items() if not command.hidden)
    assert "Exit codes: 0 success" in shown.out


def test_every_command_has_one_line_in_the_help(hearth: Hearth) -> None:
    lines = hearth("--help").out.partition(" Options ")[2].partition("╰")[2].splitlines()
    assert [line for line in lines if line.startswith("│  ")] == []


def _words_of_commands(group: TyperGroup, *before: str) -> Iterator[tuple[str, ...]]:
    """Yield the words that call each command, those of groups included."""
    for name, command in group.commands.items():
        yield (*before, name)
        if isinstance(command, TyperGroup):
            yield from _words_of_commands(command, *before, name)


ALL_COMMANDS = [(), *_words_of_commands(get_group(whole_app()))]


def test_commands_are_put_together_once() -> None:
    assert command_of(whole_app()) is command_of(whole_app())


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_help_answers_h_fills_its_lines_and_gives_flags_no_type(
    hearth: Hearth, words: tuple[str, ...]
) -> None:
    shown = hearth(*words, "-h")

    assert shown.code == 0
    assert "<bool>" not in shown.out.lower()
    assert re.findall(r"<[^<>\n]*\n", shown.out) == [], "a type in two lines"
    lines = [line.strip() for line in shown.out.splitlines()]
    prose = lines[: next(number for number, line in enumerate(lines) if line.startswith("╭"))]
    for line, following in itertools.pairwise(prose):
        if line and following:
            assert len(f"{line} {following.split()[0]}") > HELP_COLUMNS, f"broken early: {line}"
            assert "hearth " not in line or "`hearth" in line, f"an example too long for a line: {line}"


def test_no_help_loses_words_to_markup() -> None:
    """Rich hides what it takes for the name of a style."""
    found = [
        re.findall(r"\[/?(?!bold\])[a-z][^\]]*\]", text) for text in _help_texts(command_of(whole_app()))
    ]
    assert len(found) > 50
    assert not any(found), found


def _help_texts(command: TyperCommand | TyperGroup) -> Iterator[str]:
    yield command.help or ""
    yield from (getattr(parameter, "help", None) or "" for parameter in command.params)
    for child in command.commands.values() if isinstance(command, TyperGroup) else ():
        assert isinstance(child, TyperCommand | TyperGroup)
        yield from _help_texts(child)


def test_the_help_lists_the_usual_commands_of_a_panel_first(hearth: Hearth) -> None:
    listed = re.findall(r"^[│|] ([a-z]+) ", hearth("--help").out, re.MULTILINE)
    assert listed[:3] == ["run", "demo", "deploy"]
    assert listed.index("serve") < listed.index("ps") < listed.index("explain") < listed.index("join")


def test_the_demo_is_listed(hearth: Hearth) -> None:
    assert re.search(r"^[│|] demo +Deploy a small model", hearth("--help").out, re.MULTILINE)


def test_version_is_one_line(hearth: Hearth) -> None:
    shown = hearth("--version")
    assert shown.out.startswith("hearth ")
    assert shown.out.count("\n") == 1


@contextmanager
def _no_log_yet() -> Iterator[None]:
    """Take away what pytest logs to, as it is in a process that has just started."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)


@pytest.mark.parametrize(
    ("settings", "told"), [((), ["odd"]), (("--set", "log.level=debug"), ["usual", "odd"])]
)
def test_run_logs_beside_the_answer_only_what_is_wrong(
    hearth: Hearth, calls: Calls, source: str, settings: tuple[str, ...], told: list[str]
) -> None:
    calls.logs = [(logging.INFO, "usual"), (logging.WARNING, "odd")]

    with _no_log_yet():
        shown = hearth("run", source, "hi", *settings)

    assert [line.rsplit(" ", 1)[1] for line in shown.err.splitlines() if " hearth.llm " in line] == told


def test_run_streams_the_answer_through_the_chat_template(
    hearth: Hearth, calls: Calls, tmp_path: Path
) -> None:
    shown = hearth("run", str(tmp_path), "hi you")
    assert (shown.code, shown.out) == (0, "hello\n")
    assert "3 tokens" in shown.err
    assert calls.prompt == [1, len("hi you")]
    assert calls.is_closed


def test_run_raw_leaves_the_prompt_as_it_is(hearth: Hearth, calls: Calls, tmp_path: Path) -> None:
    hearth("run", str(tmp_path), "Once upon", "--raw")
    assert calls.prompt == "Once upon"


def test_run_reads_standard_input_for_a_dash(
    hearth: Hearth, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    hearth("run", str(tmp_path), "-", "--raw")
    assert calls.prompt == "from a pipe"


def test_run_hands_its_flags_on(hearth: Hearth, calls: Calls, tmp_path: Path) -> None:
    config = tmp_path / "hearth.toml"
    config.write_text("[engine]\nmax_seqs = 2\nblock_tokens = 32\n", encoding="utf-8")
    flags = "--device cpu --dtype float32 --max-tokens 5 --temperature 0 --seed 3 --set engine.max_seqs=4"
    store = "--set store.disk_bytes=1GiB"
    hearth("run", str(tmp_path), "hi", *flags.split(), *store.split(), "--config", str(config))
    assert calls.made == {
        "path": str(tmp_path),
        "device": "cpu",
        "dtype": "float32",
        "engine": EngineConfig(max_seqs=4, block_tokens=32),
        "store": StoreConfig(disk_bytes=1 << 30),
    }
    assert calls.params == SamplingParams(max_tokens=5, temperature=0.0, seed=3)


def test_run_json_is_one_object_with_times(hearth: Hearth, calls: Calls, tmp_path: Path) -> None:
    answer = json.loads(hearth("run", str(tmp_path), "hi", "--json").out)
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("hello", [7, 8, 9], "stop")
    assert 0 < answer["first_token_s"] <= answer["total_s"]
    assert answer["load"]["rungs"]["disk"]["num_bytes"] == 30 << 20


def test_run_tells_where_the_model_came_from(hearth: Hearth, calls: Calls, tmp_path: Path) -> None:
    assert "loaded in 0.50 s (0.03 GB from disk)" in hearth("run", str(tmp_path), "hi").err


def test_run_takes_a_url(hearth: Hearth, calls: Calls) -> None:
    assert hearth("run", "s3://bucket/model", "hi").code == 0
    assert calls.made["path"] == "s3://bucket/model"


@pytest.mark.parametrize(
    "command",
    [("run", "./nowhere", "hi"), ("show", "./nowhere"), ("convert", "nowhere", "m"), ("verify", "nowhere")],
)
def test_a_missing_model_is_one_line_and_exit_code_2(hearth: Hearth, command: tuple[str, ...]) -> None:
    shown = hearth(*command)
    assert (shown.code, shown.out) == (2, "")
    assert shown.err == ("hearth: no model at `nowhere`; give the directory of its files, or a GGUF file\n")


def test_an_empty_model_directory_is_refused(hearth: Hearth, tmp_path: Path) -> None:
    shown = hearth("run", str(tmp_path), "hi", "--device", "cpu")
    assert (shown.code, shown.out) == (2, "")
    assert "config.json" in shown.err
    assert "Traceback" not in shown.err


def test_a_bad_sampling_value_is_refused_before_anything_loads(hearth: Hearth, tmp_path: Path) -> None:
    shown = hearth("run", str(tmp_path), "hi", "--temperature", "-1")
    assert (shown.code, shown.err) == (2, "hearth: `temperature` must be at least 0, given: -1.0\n")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("engine.max_seq=3", "did you mean `engine.max_seqs`?"),
        ("engine.max_seqs=many", "`engine.max_seqs` must be of type int, given: 'many'"),
        ("max_seqs", "`--set` takes KEY=VALUE"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(hearth: Hearth, setting: str, message: str) -> None:
    shown = hearth("config", "--set", setting)
    assert (shown.code, shown.err.count("\n")) == (2, 1)
    assert message in shown.err


def test_config_prints_what_applies(hearth: Hearth) -> None:
    shown = hearth("config", "--set", "engine.kv_bytes=1GiB", "--set", "log.level=debug")
    assert "kv_bytes = 1073741824  # --set\n" in shown.out
    assert '\n[log]\nlevel = "debug"  # --set\n' in shown.out
    assert "\n[service]\n" in shown.out


def test_config_json_holds_every_section(hearth: Hearth) -> None:
    sections = json.loads(hearth("config", "--json").out)
    assert sections["engine"]["max_seqs"] == EngineConfig().max_seqs
    assert sections["log"] == {"level": "info", "format": "text"}


def test_doctor_json_names_versions_devices_and_kernels(hearth: Hearth) -> None:
    report = json.loads(hearth("doctor", "--json").out)
    assert report["torch"] == torch.__version__
    assert report["devices"][0]["total_bytes"] > 0
    assert report["kernels"] in ("triton", "torch reference")
    assert all(Path(cache["path"]).name == "kernels" for cache in report["kernel_caches"])
    assert len(report["devices"]) == 1 + torch.cuda.device_count()


def test_doctor_counts_the_page_cache_as_free_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 700 kB\nHugePages_Total: 0\n")

    found = doctor.cpu_report(meminfo, tmp_path / "none")

    assert (found.total_bytes, found.free_bytes) == (1000 << 10, 700 << 10)


@pytest.mark.parametrize(("limit", "total_bytes", "free_bytes"), [("max", 1000, 700), ("600", 600, 250)])
def test_doctor_counts_the_memory_that_a_container_may_have(
    tmp_path: Path, limit: str, total_bytes: int, free_bytes: int
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemAvailable: 700 kB\n")
    number = limit if limit == "max" else int(limit) << 10
    (tmp_path / "memory.max").write_text(f"{number}\n")
    (tmp_path / "memory.current").write_text(f"{450 << 10}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {100 << 10}\n")

    found = doctor.cpu_report(meminfo, tmp_path)

    assert (found.total_bytes, found.free_bytes) == (total_bytes << 10, free_bytes << 10)


def test_doctor_says_what_falls_back(hearth: Hearth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = hearth("doctor")
    assert "torch reference" in shown.out
    assert "note: no CUDA device" in shown.out


def test_doctor_says_that_triton_cannot_compile_the_kernel_for_hopper(
    hearth: Hearth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "is_hopper", lambda: True)
    monkeypatch.setattr(prefill_hopper, "HAS_GLUON", False)
    (note,) = [note for note in json.loads(hearth("doctor", "--json").out)["notes"] if "Gluon" in note]
    assert note.startswith("the kernel for Hopper needs Gluon as of Triton 3.6 to 3.9, given: ")
    assert note.endswith("long prompts are slower; install `hearth-inference[gpu]`")


@pytest.mark.parametrize(("compiler", "num_notes"), [("/nowhere/cc", 1), ("cc", 0)])
def test_doctor_says_that_graphs_are_not_restored(
    hearth: Hearth, monkeypatch: pytest.MonkeyPatch, compiler: str, num_notes: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "is_hopper", lambda: False)
    monkeypatch.setenv("CC", compiler)
    notes = json.loads(hearth("doctor", "--json").out)["notes"]
    assert (
        sum("captured again instead of restored" in note and compiler in note for note in notes) == num_notes
    )


def test_doctor_says_which_host_memory_a_cpu_does_not_use(
    hearth: Hearth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = json.loads(hearth("doctor", "--json", "--set", "store.host_bytes=64GiB").out)
    (note,) = [note for note in shown["notes"] if "store.host_bytes" in note]
    assert f"is {64 << 30}, of which a CPU uses {CPU_HOST_BYTES}" in note


def test_doctor_says_that_threads_spin_and_why(hearth: Hearth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "wait_policy", lambda: WaitPolicy("`OMP_WAIT_POLICY=ACTIVE` is set"))
    (note,) = [note for note in json.loads(hearth("doctor", "--json").out)["notes"] if "threads" in note]
    assert "OMP_WAIT_POLICY=ACTIVE" in note


@pytest.mark.parametrize(("queued_s", "num_notes"), [(None, 1), (0.5, 0)])
def test_doctor_says_that_waits_for_cores_cannot_be_told_from_hanging(
    hearth: Hearth, monkeypatch: pytest.MonkeyPatch, queued_s: float | None, num_notes: int
) -> None:
    monkeypatch.setattr(doctor, "queued_s", lambda pid: queued_s)
    notes = json.loads(hearth("doctor", "--json").out)["notes"]
    assert sum("replaced as if it hung" in note for note in notes) == num_notes


def test_doctor_says_how_many_cores_may_be_used(hearth: Hearth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "num_usable_cores", lambda: 3)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert json.loads(hearth("doctor", "--json").out)["devices"][0]["name"] == "cpu, 3 of 8 cores"


def test_show_counts_parameters_without_weights(hearth: Hearth, tmp_path: Path) -> None:
    vocab, hidden, heads, kv_heads, intermediate, layers = 32, 16, 4, 2, 24, 3
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    facts = json.loads(hearth("show", str(tmp_path), "--json").out)
    attention = hidden * hidden * (2 + 2 * kv_heads // heads)
    per_layer = attention + 3 * hidden * intermediate + 2 * hidden
    assert facts["num_parameters"] == layers * per_layer + hidden + 2 * vocab * hidden
    assert (facts["family"], facts["num_kv_heads"], facts["head_dim"]) == ("llama", kv_heads, hidden // heads)


def test_a_missing_device_is_a_failure_and_not_wrong_input(
    hearth: Hearth, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise DeviceError("no CUDA device; use `--device cpu`")

    monkeypatch.setattr(sys.modules["hearth.llm"], "LLM", refuse)
    shown = hearth("run", str(tmp_path), "hi")
    assert (shown.code, shown.err) == (1, "hearth: no CUDA device; use `--device cpu`\n")


def test_an_interrupt_exits_130_without_a_traceback(hearth: Hearth, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hearth.cli.console.load", interrupt)
    shown = hearth("config")
    assert (shown.code, shown.out) == (130, "")
    assert "Traceback" not in shown.err


@pytest.fixture
def source() -> str:
    return str(build("llama-gqa").directory)


@pytest.fixture
def model(hearth: Hearth, source: str, tmp_path: Path) -> Path:
    hearth("convert", source, str(tmp_path / "m"))
    return tmp_path / "m"


def test_convert_says_what_it_wrote(hearth: Hearth, source: str, tmp_path: Path) -> None:
    shown = hearth("convert", source, str(tmp_path / "m"))

    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith(f"wrote {tmp_path / 'm'}: 516,096 bytes in 1 chunks, ")
    assert shown.out.endswith(" GB/s\n")
    assert read_manifest(tmp_path / "m").num_bytes == 516096


def test_convert_follows_its_flags(hearth: Hearth, source: str, tmp_path: Path) -> None:
    flags = "--dtype bfloat16 --quant int8 --json"

    facts = json.loads(hearth("convert", source, str(tmp_path / "m"), *flags.split()).out)

    manifest = read_manifest(tmp_path / "m")
    assert (manifest.dtype, manifest.quant) == (facts["dtype"], facts["quant"]) == ("bfloat16", "int8")
    assert (facts["digest"], facts["num_bytes"]) == (manifest.digest, manifest.num_bytes)


def test_convert_replaces_a_model_only_by_force(hearth: Hearth, source: str, model: Path) -> None:
    refused = hearth("convert", source, str(model), "--dtype", "float16")
    forced = hearth("convert", source, str(model), "--dtype", "float16", "--force")

    assert (refused.code, refused.out, refused.err.count("\n")) == (1, "", 1)
    assert "`--force`" in refused.err
    assert (forced.code, read_manifest(model).dtype) == (0, "float16")


def test_convert_of_something_else_is_wrong_input(hearth: Hearth, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a text")

    shown = hearth("convert", str(tmp_path / "notes.txt"), str(tmp_path / "m"))

    assert (shown.code, shown.out) == (2, "")
    assert "Hugging Face directory" in shown.err


def test_an_interrupted_convert_leaves_nothing(
    hearth: Hearth, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)

    shown = hearth("convert", source, str(tmp_path / "m"))

    assert (shown.code, shown.out) == (130, "")
    assert shown.err.replace("\n", "") == f"hearth: interrupted, nothing was written to `{tmp_path / 'm'}`"
    assert list(tmp_path.iterdir()) == []


def test_a_convert_interrupted_after_the_model_was_put_in_place_says_so(
    hearth: Hearth, source: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(directory: Path) -> None:
        if directory == model:
            raise KeyboardInterrupt

    monkeypatch.setattr("hearth.store.format.writer._sync", interrupt)

    shown = hearth("convert", source, str(model), "--dtype", "float16", "--force")

    assert shown.code == 130
    assert shown.err.replace("\n", "") == f"hearth: interrupted, but the model was written to `{model}`"
    assert read_manifest(model).dtype == "float16"


@pytest.mark.parametrize("command", ["show", "verify", "convert"])
def test_a_url_is_refused_where_local_models_are_read(hearth: Hearth, command: str) -> None:
    dest = ("m",) if command == "convert" else ()

    shown = hearth(command, "s3://bucket/model", *dest)

    assert (shown.code, shown.out) == (2, "")
    assert shown.err == (
        "hearth: `s3://bucket/model` is a URL, but this command reads local models; `hearth run` takes URLs\n"
    )


def test_a_url_is_no_destination(hearth: Hearth, source: str) -> None:
    shown = hearth("convert", source, "s3://bucket/model")

    assert (shown.code, shown.out) == (2, "")
    assert shown.err.startswith("hearth: `s3://bucket/model` is a URL, but this command writes local models;")


@pytest.mark.parametrize(
    "command", [name for name in COMMANDS if name not in ("cluster", "keys", "snapshot")]
)
def test_examples_are_indented_alike(hearth: Hearth, command: str) -> None:
    help_lines = hearth(command, "--help").out.splitlines()

    (heading,) = (line for line in help_lines if line.strip() in ("Example", "Examples"))
    indent = " " * (len(heading) - len(heading.lstrip()))
    following = help_lines[help_lines.index(heading) + 2]
    assert following.startswith(f"{indent}  hearth {command} ")


def test_verify_says_that_it_takes_a_converted_model(hearth: Hearth) -> None:
    shown = " ".join(hearth("verify", "--help").out.replace("│", " ").split())
    assert "Directory of a converted model, or name of a deployed one." in shown


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EIO, "Input/output error", "some/file"), "`some/file`: Input/output error"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (OSError("a library's own words"), "a library's own words"),
    ],
)
def test_a_failing_disk_is_one_line(
    hearth: Hearth, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("hearth.cli.console.load", fail)

    shown = hearth("config")

    assert (shown.code, shown.out, shown.err) == (1, "", f"hearth: {message}\n")


def test_convert_shows_a_bar_on_a_terminal_only(
    hearth: Hearth, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr("hearth.cli.progress.err", Console(file=terminal, force_terminal=True, width=120))

    hearth("convert", source, str(tmp_path / "m"))

    assert f"converting {Path(source).name}" in terminal.getvalue()
    assert "516.1/516.1 kB" in terminal.getvalue()


def test_verify_finds_a_whole_model_whole(hearth: Hearth, model: Path) -> None:
    shown = hearth("verify", str(model))

    assert shown.code == 0
    assert shown.out.startswith(f"{model} is intact: 516,096 bytes in 1 chunks, ")


def _damage(model: Path) -> None:
    weights = bytearray((model / "weights.bin").read_bytes())
    weights[7] ^= 1
    (model / "weights.bin").write_bytes(weights)
    (model / "generation_config.json").unlink()


def test_verify_names_what_is_damaged(hearth: Hearth, model: Path) -> None:
    _damage(model)

    shown = hearth("verify", str(model))

    chunk, file, advice = shown.out.splitlines()
    assert shown.code == 1
    assert chunk.startswith("chunk 0: its hash is ")
    assert "tensors in it: embed.weight, layers.0.attn_norm.weight, " in chunk
    assert file == "generation_config.json: cannot be read: No such file or directory"
    assert advice == f"{model} is damaged: convert the model again"


def test_verify_json_lists_what_is_damaged(hearth: Hearth, model: Path) -> None:
    _damage(model)

    shown = hearth("verify", str(model), "--json")

    report = json.loads(shown.out)
    assert (shown.code, report["is_whole"]) == (1, False)
    assert (report["bad"][0]["index"], report["bad"][1]["name"]) == (0, "generation_config.json")


def test_verify_json_tells_of_missing_weights(hearth: Hearth, model: Path) -> None:
    (model / "weights.bin").unlink()

    shown = hearth("verify", str(model), "--json")

    reason = "cannot be read: No such file or directory"
    assert (shown.code, json.loads(shown.out)["bad"]) == (1, [{"name": "weights.bin", "reason": reason}])


def test_verify_of_what_is_no_model_is_wrong_input(hearth: Hearth, source: str) -> None:
    shown = hearth("verify", source)

    assert (shown.code, shown.out) == (2, "")
    assert "no manifest.json" in shown.err


def test_show_json_describes_a_converted_model(hearth: Hearth, source: str, model: Path) -> None:
    facts = json.loads(hearth("show", str(model), "--json").out)

    of_source = json.loads(hearth("show", source, "--json").out)
    assert facts["num_parameters"] == of_source["num_parameters"]
    assert (facts["family"], facts["dtype"], facts["quant"]) == ("llama", "float32", "none")
    assert (facts["num_bytes"], facts["num_chunks"], len(facts["layer_bytes"])) == (516096, 1, 3)
    assert facts["digest"] == read_manifest(model).digest


def test_show_prints_layers_and_chunks_of_a_converted_model(hearth: Hearth, model: Path) -> None:
    shown = hearth("show", str(model))

    assert "516,096" in shown.out
    assert "3 x 143,360" in shown.out
    assert read_manifest(model).digest[:40] in shown.out  # the rest is in the next line


def test_show_reads_a_gguf_file(hearth: Hearth, source: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", build("llama-gqa").model)

    facts = json.loads(hearth("show", str(path), "--json").out)

    assert facts == json.loads(hearth("show", source, "--json").out)


def test_show_does_not_count_scales_as_parameters(hearth: Hearth, source: str, tmp_path: Path) -> None:
    hearth("convert", source, str(tmp_path / "m"), "--quant", "int8")

    facts = json.loads(hearth("show", str(tmp_path / "m"), "--json").out)

    assert facts["num_parameters"] == json.loads(hearth("show", source, "--json").out)["num_parameters"]
