"""The benchmark of the store runs on a CPU with a tiny model, so that it works when a GPU is at hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.load import __main__ as load
from bench.load import models
from bench.load.models import recut, write_checkpoint
from bench.load.parts import PARTS
from bench.load.setting import QUICK
from hearth.store.format.convert import convert
from hearth.store.format.manifest import WEIGHTS, read_manifest
from hearth.store.format.verify import verify

Quick = Callable[[Callable[[], None]], dict[str, Any]]
ROW = {"measure", "unit", "value", "bound", "aim", "peers", "is_comparable"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Quick:
    """Run a benchmark as its command does, but in this process, which has torch already."""

    def run(main: Callable[[], None]) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["bench", "--quick"])
        main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert all(set(row) == ROW and row["value"] > 0 for row in result["rows"])
        assert len({row["measure"] for row in result["rows"]}) == len(result["rows"])
        return result

    return run


@pytest.mark.slow
def test_every_part_of_the_benchmark_runs_and_gives_rows_for_the_table(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model is converted by a process, as all are elsewhere, and the quantised ones here."""
    convert_apart = models.convert_apart

    def convert_once_apart(source: Path, dest: Path, quant: str, chunk_bytes: int) -> models.Conversion:
        if quant == "none":
            return convert_apart(source, dest, quant, chunk_bytes)
        convert(source, dest, quant=quant, chunk_bytes=chunk_bytes)
        return models.Conversion(0.0, 0, 0, 0)

    monkeypatch.setattr(models, "convert_apart", convert_once_apart)
    result = quick(load.main)

    assert list(result["results"]) == list(PARTS)
    assert any("safetensors" in name for row in result["rows"] for name in row["peers"])


def test_a_model_that_was_cut_again_is_whole_and_has_the_same_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", QUICK.config, torch.device("cpu"))
    convert(tmp_path / "checkpoint", tmp_path / "model", chunk_bytes=QUICK.chunk_bytes)

    again = recut(tmp_path / "model", tmp_path / "again", QUICK.chunk_bytes // 2)

    assert read_manifest(again).chunk_bytes == QUICK.chunk_bytes // 2
    assert (again / WEIGHTS).samefile(tmp_path / "model" / WEIGHTS)
    assert verify(again) == []
