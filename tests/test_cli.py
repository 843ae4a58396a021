from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hearth import cli
from hearth.config import EngineConfig
from hearth.errors import DeviceError
from hearth.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str


class Hearth:
    """Calls the command's entry point as a shell would."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        captured = self._capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, captured.out, captured.err)


@pytest.fixture
def hearth(capsys: pytest.CaptureFixture[str]) -> Hearth:
    return Hearth(capsys)


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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stands a model that always answers "hello" in for the engine."""
    calls = Calls()

    class FakeLLM:
        has_chat_template = True

        def __init__(self, path: Path, *, device: str, dtype: str, engine: EngineConfig) -> None:
            calls.made = {"path": path, "device": device, "dtype": dtype, "engine": engine}

        def __enter__(self) -> FakeLLM:
            return self

        def __exit__(self, *exception: object) -> None:
            calls.is_closed = True

        def chat_prompt(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
            return [len(messages), len(str(messages[0]["content"]))]

        def stream(self, prompt: object, params: SamplingParams) -> Iterator[FakeDelta]:
            calls.prompt, calls.params = prompt, params
            yield FakeDelta("hel", (7,), None)
            yield FakeDelta("lo", (8, 9), FinishReason.STOP)

    module = ModuleType("hearth.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]  # a stand-in for the module
    monkeypatch.setitem(sys.modules, "hearth.llm", module)
    return calls


def test_help_teaches_and_does_not_import_torch() -> None:
    code = (
        "import sys; from hearth.cli import main\n"
        "try: main(['run', '--help'])\n"
        "finally: print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert "Why is the sky blue?" in shown.stdout
    assert shown.stdout.endswith("False False\n")


def test_a_command_without_arguments_shows_its_commands(hearth: Hearth) -> None:
    shown = hearth("--help")
    assert shown.code == 0
    assert all(name in shown.out for name in ("run", "show", "doctor", "config"))


def test_version_is_one_line(hearth: Hearth) -> None:
    shown = hearth("--version")
    assert shown.out.startswith("hearth ")
    assert shown.out.count("\n") == 1


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
    hearth("run", str(tmp_path), "hi", *flags.split(), "--config", str(config))
    assert calls.made == {
        "path": tmp_path,
        "device": "cpu",
        "dtype": "float32",
        "engine": EngineConfig(max_seqs=4, block_tokens=32),
    }
    assert calls.params == SamplingParams(max_tokens=5, temperature=0.0, seed=3)


def test_run_json_is_one_object_with_times(hearth: Hearth, calls: Calls, tmp_path: Path) -> None:
    answer = json.loads(hearth("run", str(tmp_path), "hi", "--json").out)
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("hello", [7, 8, 9], "stop")
    assert 0 < answer["first_token_s"] <= answer["total_s"]


@pytest.mark.parametrize("command", [("run", "nowhere", "hi"), ("show", "nowhere")])
def test_a_missing_model_is_one_line_and_exit_code_2(hearth: Hearth, command: tuple[str, ...]) -> None:
    shown = hearth(*command)
    assert (shown.code, shown.out) == (2, "")
    assert shown.err == (
        "hearth: no model directory at `nowhere`; name the folder that holds its `config.json`\n"
    )


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
    assert "kv_bytes = 1073741824\n" in shown.out
    assert shown.out.endswith('[log]\nlevel = "debug"\n')


def test_config_json_holds_every_section(hearth: Hearth) -> None:
    sections = json.loads(hearth("config", "--json").out)
    assert sections["engine"]["max_seqs"] == EngineConfig().max_seqs
    assert sections["log"] == {"level": "info"}


def test_doctor_json_names_versions_devices_and_kernels(hearth: Hearth) -> None:
    report = json.loads(hearth("doctor", "--json").out)
    assert report["torch"] == torch.__version__
    assert report["devices"][0]["total_bytes"] > 0
    assert report["kernels"] in ("triton", "torch reference")
    assert len(report["devices"]) == 1 + torch.cuda.device_count()


def test_doctor_says_what_falls_back(hearth: Hearth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = hearth("doctor")
    assert "torch reference" in shown.out
    assert "note: no CUDA device" in shown.out


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

    monkeypatch.setattr(cli, "load", interrupt)
    shown = hearth("config")
    assert (shown.code, shown.out) == (130, "")
    assert "Traceback" not in shown.err
