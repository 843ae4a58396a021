"""Lines for the tables of the documents, from the answers of the benchmarks of adapters. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.report import Row, peers

Answer = Mapping[str, object]


def of_steps(answers: Sequence[Answer]) -> list[Row]:
    """Return two lines for each kind of step: adapters beside their bytes, and none while they are there."""
    rows = []
    for answer in answers:
        if "step" not in answer:
            continue
        value = {key: float(str(answer[key])) for key in answer if key.endswith("_ms")}
        still_ms = value["base_with_adapters_loaded_ms"]
        bound_ms = still_ms + value["bound_of_bytes_ms"]
        aim = f"at most {value['aim_ms']:.3g}"
        rows.append(Row(f"{answer['step']}: an adapter each", "ms", value["adapters_ms"], bound_ms, aim))
        rows.append(Row(f"{answer['step']}: none of them used", "ms", still_ms, value["base_ms"]))
    return rows


def of_swaps(answers: Sequence[Answer]) -> list[Row]:
    """Return the time of a swap beside that of one copy, and the memory of adapters beside their bytes."""
    figures: Mapping[str, Mapping[str, float]] = peers()["lora_swap"]["peers"]  # type: ignore[index] # JSON
    reached = {name: of["swap"] for name, of in figures.items()}
    texts = {
        "swap": "swap of an adapter of rank 16 from host memory",
        "scattered": "the same, no two of its pieces side by side",
    }
    rows = []
    for answer in answers:
        part = str(answer["part"])
        value = {key: float(str(answer[key])) for key in answer if key.endswith("_s") and key != "until_s"}
        if "median_s" in value:
            aim = f"at most {1e3 * value['aim_s']:.3g}"
            rows.append(Row(texts[part], "ms", 1e3 * value["median_s"], 1e3 * value["copy_s"], aim, reached))
        elif "bytes" in answer:
            taken, num_bytes = (float(str(answer[key])) / 1e9 for key in ("taken_bytes", "bytes"))
            rows.append(
                Row(f"{part} of 128 adapters, mixed ranks", "GB", taken, num_bytes, "at most 2% more")
            )
    return rows


def of_serving(answers: Sequence[Answer]) -> list[Row]:
    """Return what requests feel, each beside the same with all adapters on the device."""
    by_part = {str(answer["part"]): answer for answer in answers if "error" not in answer}
    rows = []
    if cold := by_part.get("cold"):
        cold_ms, warm_ms = (1e3 * _at(cold, kind, "p50") for kind in ("cold_s", "warm_s"))
        aim = f"at most {1e3 * float(str(cold['aim_s'])):g} ms more"
        rows.append(Row("first token of an adapter in host memory, p50", "ms", cold_ms, warm_ms, aim))
    if steps := by_part.get("steps"):
        come, there = (f"beside_adapters_{which}_s" for which in ("that_come", "there"))
        rows += [
            Row(
                f"step of 64 while adapters come, {p}",
                "ms",
                1e3 * _at(steps, come, p),
                1e3 * _at(steps, there, p),
            )
            for p in ("p50", "p99")
        ]
    for text in ("zipf", "zipf in waves"):
        few, everything = (by_part.get(f"{text}, room for {room}") for room in ("100", "all"))
        if few and everything:
            speeds = [float(str(answer["tokens_per_s"])) for answer in (few, everything)]
            aim = "at least 0.9 of the bound" if text == "zipf" else None
            rows.append(Row(f"1,000 adapters, {text}, 64 at a time, room for 100", "tokens/s", *speeds, aim))
    return rows


def _at(answer: Answer, key: str, percentile: str) -> float:
    found = answer[key]
    assert isinstance(found, Mapping), f"{key}: {found!r}"
    return float(str(found[percentile]))
