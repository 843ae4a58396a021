from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import report
from bench.report import percentiles


@pytest.mark.parametrize(
    ("values", "p50", "p90", "p99"),
    [
        ([3.0], 3.0, 3.0, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 2.0, 4.0, 4.0),
        ([float(i) for i in range(1, 201)], 100, 180, 198),
    ],
)
def test_a_percentile_is_the_smallest_value_that_so_many_percent_do_not_exceed(
    values: list[float], p50: float, p90: float, p99: float
) -> None:
    found = percentiles(values)

    assert (found["p50"], found["p90"], found["p99"]) == (p50, p90, p99)
    assert (found["min"], found["max"], found["n"]) == (min(values), max(values), len(values))


def test_a_result_that_was_kept_does_not_make_the_sources_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    (tmp_path / "bench" / "a.py").write_text("")
    (results / "a.json").write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    monkeypatch.setattr(report, "HERE", tmp_path / "bench")
    clean = report.environment()["commit"]

    (results / "a.json").write_text("2")
    (results / "b.json").write_text("3")
    assert report.environment()["commit"] == clean

    (tmp_path / "bench" / "b.py").write_text("")
    assert report.environment()["commit"] == f"{clean}-dirty"
