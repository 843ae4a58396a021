"""Fields of other servers that Hearth does not implement.

A field that would change the answer is refused by name, unless its value changes nothing. All other unknown
fields are accepted, listed in a response header and counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: pydantic's error type of a refused field, whose name is in the error's context.
REFUSED_FIELD = "refused_field"
IGNORED_FIELDS = "x-hearth-ignored-fields"
#: Ignored fields of a request that are reported and counted.
MAX_IGNORED = 16
#: Longer names are cut.
MAX_NAME_CHARS = 64

#: Frequent ignored fields. Metrics count them by name, all others as one.
FREQUENT = frozenset(
    [
        "cache_prompt",
        "context_management",
        "guided_decoding_backend",
        "metadata",
        "options.num_ctx",
        "options.num_gpu",
        "options.num_thread",
        "options.repeat_last_n",
        "prediction",
        "priority",
        "prompt_cache_key",
        "reasoning.summary",
        "request_id",
        "return_progress",
        "safety_identifier",
        "store",
        "stream_options.continuous_usage_stats",
        "stream_options.include_obfuscation",
        "tools.function.strict",
        "tools.strict",
        "truncation",
    ]
)
OTHER = "other"


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    neutral: tuple[object, ...]  #: values that change nothing, besides null
    instead: str  #: what to do
    like: str | None  #: our name of the same field; an equal value is accepted


def _fields(
    names: str, *neutral: object, instead: str = "leave it out", like: str | None = None
) -> dict[str, UnsupportedField]:
    if like is not None:
        instead = f"use `{like}`"
    return {name: UnsupportedField(neutral, instead, like) for name in names.split()}


_SCHEMA = "use `response_format` or `structured_outputs`, or leave it out"
_TO_TEMPLATE = "put variables of the model's chat template into `chat_template_kwargs`"

#: Fields of vLLM, SGLang, llama.cpp, Ollama, TGI, text-generation-webui and of OpenAI's other endpoints.
_EVERYWHERE = {
    **_fields("json_schema structural_tag guided_whitespace_pattern", instead=_SCHEMA),
    **_fields("grammar grammar_string regex ebnf format", "", instead=_SCHEMA),
    **_fields("max_new_tokens max_output_tokens", like="max_tokens"),
    **_fields("n_predict num_predict", -1, like="max_tokens"),
    **_fields("max_length", instead="use `max_tokens`"),  # of prompt and output together
    **_fields("min_new_tokens", 0, like="min_tokens"),
    **_fields("min_length", 0, instead="use `min_tokens`"),
    **_fields("repeat_penalty", 1, like="repetition_penalty"),
    **_fields("do_sample", True, instead="use `temperature`"),
    **_fields("stop_sequences", "", [], like="stop"),
    **_fields("stop_regex", "", [], instead="use `stop`"),
    **_fields("num_return_sequences", 1, like="n"),
    **_fields("ban_eos_token", False, instead="use `ignore_eos`"),
    **_fields("n_probs top_n_tokens", 0, instead="use `logprobs`"),
    **_fields("system instructions template", "", instead="make it a part of the prompt"),
    **_fields(
        "options parameters sampling_params extra_body", {}, instead="put its fields into the body itself"
    ),
    # Other ways to sample.
    **_fields("use_beam_search early_stopping dynamic_temperature watermark", False),
    **_fields("num_beams length_penalty typical_p typ_p tfs tfs_z guidance_scale", 1),
    **_fields(
        "mirostat mirostat_mode xtc_probability dry_multiplier dynatemp_range top_a no_repeat_ngram_size", 0
    ),
    **_fields("smoothing_factor epsilon_cutoff eta_cutoff penalty_alpha", 0),
    **_fields("top_n_sigma", 0, -1),
    **_fields("bad_words banned_tokens banned_strings custom_token_bans", "", []),
    **_fields("samplers negative_prompt", "", []),
    **_fields("logits_processors custom_logit_processor", "", []),
    # Other prompts, weights and answers.
    **_fields("truncate_prompt_tokens adapter_id lora_path"),
    **_fields("truncate", False),
    **_fields("lora images image_data", []),
    **_fields("return_token_ids return_tokens_as_token_ids return_full_text", False),
    **_fields("detokenize spaces_between_special_tokens", True),
}
CHAT = _EVERYWHERE | {
    **_fields("prompt", "", [], instead="send `messages` alone"),
    **_fields("functions", [], instead="use `tools`"),
    **_fields("function_call", "none", "auto", instead="use `tool_choice`"),
    **_fields("thinking think", instead="use `enable_thinking`"),
    **_fields("thinking_budget", like="thinking_token_budget"),
    **_fields("reasoning", {}, {"effort": None}, instead=f"use `reasoning_effort`, or {_TO_TEMPLATE}"),
    **_fields("documents", [], instead=_TO_TEMPLATE),
    **_fields("verbosity", "medium", instead=_TO_TEMPLATE),
    **_fields("add_special_tokens echo", False),
    **_fields("chat_template suffix", ""),
    **_fields("best_of", 1),
    **_fields("audio web_search_options"),
    **_fields("modalities", ["text"], []),
    **_fields("mm_processor_kwargs", {}),
}
COMPLETION = _EVERYWHERE | {
    **_fields("top_logprobs", 0, instead="set `logprobs` to their number"),
    **_fields("messages tools functions", [], instead="use `/v1/chat/completions`"),
    **_fields("continue_final_message", False, instead="use `/v1/chat/completions`"),
    **_fields("add_special_tokens", True),
}
_BY_MODEL = "leave it out: embeddings have the hidden size of the model"
EMBEDDING = {
    **_fields("dimensions", instead=_BY_MODEL),
    **_fields("prompt messages", "", [], instead="use `input`"),
    **_fields("truncate_prompt_tokens", instead="shorten the input"),
    **_fields("truncate", False, instead="shorten the input"),
    **_fields("normalize add_special_tokens", True),
    **_fields("stream", False, instead="leave it out: embeddings are not streamed"),
    **_fields("input_type instruction task prompt_name", "", instead="write it into the input"),
    **_fields("embedding_types", [], ["float"], instead="use `encoding_format`"),
    **_fields("embed_dtype", "float32", "float"),
    **_fields("adapter_id lora_path"),
}
_TEXT_FORMAT = "use `text.format` with a JSON schema, or leave it out"
_READ_THERE = frozenset(["instructions", "max_output_tokens", "reasoning"])
#: Fields of chat, with other remedies, and chat's own fields that are named differently here.
RESPONSE = {
    **{name: field for name, field in CHAT.items() if name not in _READ_THERE},
    **_fields("max_tokens max_completion_tokens max_new_tokens", like="max_output_tokens"),
    **_fields("n_predict num_predict", -1, like="max_output_tokens"),
    **_fields("max_length", instead="use `max_output_tokens`"),
    **_fields("n num_return_sequences best_of", 1, instead="send several requests"),
    **_fields("response_format json_schema structural_tag", instead=_TEXT_FORMAT),
    **_fields("guided_json guided_choice guided_regex guided_grammar", instead=_TEXT_FORMAT),
    **_fields("grammar grammar_string regex ebnf format", "", instead=_TEXT_FORMAT),
    **_fields("structured_outputs", {}, instead=_TEXT_FORMAT),
    **_fields("logprobs", False, 0, instead="use `include` with `message.output_text.logprobs`"),
    **_fields("n_probs top_n_tokens", 0, instead="use `top_logprobs`"),
    **_fields("prompt_logprobs"),
    **_fields("messages", [], instead="send them as `input`"),
    **_fields("system template", "", instead="use `instructions`"),
    **_fields("continue_final_message", False, instead="end with a user message: no message is continued"),
    **_fields("add_generation_prompt", True),
    **_fields("reasoning_effort", instead="use `reasoning.effort`"),
    # Services of OpenAI.
    **_fields("prompt", instead="make it a part of `input`: prompts are not stored here"),
    **_fields("conversation", instead="use `previous_response_id`, or send all of it as `input`"),
    **_fields("background", False, instead="wait for the answer, or use `stream`"),
    **_fields("context_management", [], instead="send fewer items as `input`"),
    **_fields("moderation", instead="moderate elsewhere"),
}
RESPONSE_TEXT = _fields("verbosity", "medium", instead=_TO_TEMPLATE)
#: Of a message; its other fields reach the chat template.
MESSAGE = {
    **_fields("prefix partial", False, instead="set `continue_final_message` of the body"),
    **_fields("images", [], instead="send text"),
    **_fields("audio", instead="send text"),
    **_fields("function_call", instead="use `tool_calls`"),
}
#: Of Anthropic's messages, and fields of other APIs there.
_BY_CHAT = "use `/v1/chat/completions`, which supports it"
MESSAGES = {
    **_fields("mcp_servers", []),
    **_fields("container"),
    **_fields("speed", "standard"),
    **_fields("max_completion_tokens max_output_tokens", like="max_tokens"),
    **_fields("stop", "", [], like="stop_sequences"),
    **_fields("response_format", {"type": "text"}, instead="use `output_config`"),
    **_fields("n best_of", 1, instead=_BY_CHAT),
    **_fields("seed logit_bias logprobs top_logprobs prompt", instead=_BY_CHAT),
    **_fields("presence_penalty frequency_penalty min_p", 0, instead=_BY_CHAT),
    **_fields("repetition_penalty", 1, instead=_BY_CHAT),
    **_fields("functions", [], instead="use `tools`"),
}
#: Of Ollama's bodies, messages and options.
OLLAMA = {
    **_fields("images", [], instead="send text"),
    **_fields("template", "", instead="send `raw` with the complete prompt"),
    **_fields("logprobs top_logprobs", False, 0, instead=_BY_CHAT),
    **_fields("tool_choice", "auto", instead=_BY_CHAT),
}
OLLAMA_MESSAGE = _fields("images", [], instead="send text")
OLLAMA_OPTIONS = {
    **_fields("mirostat", 0),
    **_fields("tfs_z typical_p", 1),
    **_fields("max_tokens", like="num_predict"),
    **_fields("repetition_penalty", like="repeat_penalty"),
}
_BY_DEPLOY = "deploy the model or adapter first (`hearth deploy`) and name it in `from`"
OLLAMA_CREATE = {
    **_fields("files adapters quantize", {}, "", instead=_BY_DEPLOY),
    **_fields("messages", [], instead="put examples into `system`"),
}
OLLAMA_EMBED = _fields("images", [], instead="send text") | _fields("dimensions", 0, instead=_BY_MODEL)
STRUCTURED_OUTPUTS = {
    **_fields("structural_tag whitespace_pattern"),
    **_fields("disable_any_whitespace disable_additional_properties", False),
}
RESPONSE_FORMAT = _fields("schema value", instead="use the type `json_schema` with `json_schema.schema`")


def refused(
    fields: Mapping[str, object],
    unsupported: Mapping[str, UnsupportedField],
    value_of: Callable[[str], object],
) -> str | None:
    """`value_of` returns the effective value of a supported field."""
    for name in sorted(unsupported.keys() & fields.keys()):
        value, field = fields[name], unsupported[name]
        if value is None or value in field.neutral:
            continue
        if field.like is None or value != value_of(field.like):
            return name
    return None


def ignored_fields_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that lists ignored fields, if any. Names are not trusted."""
    if not names:
        return {}
    spelt = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:MAX_NAME_CHARS]) for name in names[:MAX_IGNORED]]
    return {IGNORED_FIELDS: ", ".join([*spelt, "..."] if len(names) > MAX_IGNORED else spelt)}


def metric_labels(names: Sequence[str]) -> list[str]:
    return [name if name in FREQUENT else OTHER for name in names[:MAX_IGNORED]]
