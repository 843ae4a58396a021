"""Formats deployed and loaded models as Ollama's API does."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from hearth.control.deploy.names import LATEST
from hearth.control.deploy.preset import Preset
from hearth.control.observe.views import ModelView, ResidentView
from hearth.text.infill import infill_marks
from hearth.text.reasoning import marks_in
from hearth.text.tokenizer import Tokenizer
from hearth.text.tool_calls import tool_format

#: The expiry of models that are never evicted.
_NEVER = "9999-12-31T23:59:59Z"
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
#: The family of a model deployed before families were recorded.
_UNKNOWN = "unknown"
_LEVEL_BY_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def tag_object(name: str, view: ModelView) -> dict[str, object]:
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": time_text(datetime.fromtimestamp(view.created_at_s, UTC)),
        "size": view.num_bytes,
        "digest": view.digest,
        "details": details(view),
    }


def resident_object(resident: ResidentView, view: ModelView, on_device: bool) -> dict[str, object]:
    expires_at = _NEVER
    if resident.expires_in_s is not None:
        expires_at = time_text(datetime.now(UTC) + timedelta(seconds=resident.expires_in_s))
    return {
        "name": tagged(view.name),
        "model": tagged(view.name),
        "size": resident.num_bytes,
        "digest": view.digest,
        "details": details(view),
        "expires_at": expires_at,
        "size_vram": resident.num_bytes if on_device else 0,
        "context_length": view.max_context,
    }


def show_object(view: ModelView, tokenizer: Tokenizer) -> dict[str, object]:
    template = tokenizer.chat_template_text
    family, preset = view.family or _UNKNOWN, view.preset or Preset()
    tools = ["tools"] if tool_format(template) is not None else []
    thinking = ["thinking"] if marks_in(template) is not None else []
    insert = ["insert"] if infill_marks(tokenizer) is not None else []
    capabilities = ["completion", *tools, *insert, *thinking, "embedding"]
    return {
        "modelfile": _modelfile(view),
        "parameters": "\n".join([f"num_ctx {view.max_context}", *_parameters(preset)]),
        **({} if preset.system is None else {"system": preset.system}),
        "template": template or "{{ prompt }}",
        "details": details(view),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": view.num_parameters,
            f"{family}.context_length": view.max_context,
        },
        "capabilities": capabilities,
        "modified_at": time_text(datetime.fromtimestamp(view.created_at_s, UTC)),
    }


def _modelfile(view: ModelView) -> str:
    lines = [f"FROM {view.base or view.source}"]
    if view.is_adapter:
        lines.append(f"ADAPTER {view.source}")
    if (preset := view.preset) is not None:
        lines += [f"PARAMETER {parameter}" for parameter in _parameters(preset)]
        texts = {"SYSTEM": preset.system, "TEMPLATE": preset.template}
        lines += [f'{word} """{text}"""' for word, text in texts.items() if text is not None]
    return "\n".join(["# deployed with Hearth", *lines, ""])


#: Ollama's names of sampling parameters that differ from those of vLLM.
_PARAMETERS = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}


def _parameters(preset: Preset) -> list[str]:
    pairs = [(name, value) for name, value in preset.sampling.items() if name != "stop"]
    pairs += [("stop", json.dumps(stop, ensure_ascii=False)) for stop in preset.stop or ()]
    return [f"{_PARAMETERS.get(name, name)} {value}" for name, value in pairs]


def details(view: ModelView) -> dict[str, object]:
    level = _LEVEL_BY_DTYPE.get(view.dtype, view.dtype) if view.quant == "none" else view.quant.upper()
    family = view.family or _UNKNOWN
    return {
        "parent_model": "" if view.base is None else tagged(view.base),
        "format": "hearth",
        "family": family,
        "families": [family],
        "parameter_size": _count(view.num_parameters),
        "quantization_level": level,
    }


def time_text(time: datetime) -> str:
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


def now_text() -> str:
    return time_text(datetime.now(UTC))


def _count(number: int) -> str:
    """Format a number of parameters as Ollama does: `134.5M`, `7.6B`."""
    size, unit = next(((size, unit) for size, unit in _UNITS if number >= size), (1.0, ""))
    return f"{number / size:.1f}{unit}" if unit else str(number)
