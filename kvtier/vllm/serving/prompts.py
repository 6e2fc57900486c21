"""Prompts from files, as the tokens that vLLM's server would make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from kvtier.errors import ConfigError, KVTierError
from kvtier.system.disk import read_bounded
from kvtier.vllm.identity.prompt_keys import Prompt
from kvtier.vllm.identity.weight_fingerprints import adapter_files, fingerprint_adapter

_TOKEN_MAX = 1 << 31
_BYTES_MAX = 1 << 30
_FORM = '{"prompt": "text"}, {"messages": [{"role": "user", "content": "text"}]} or {"tokens": [1]}'


class _Lora(msgspec.Struct):
    name: str
    path: str


class _Line(msgspec.Struct):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None
    cache_salt: str | None = None
    lora: _Lora | None = None
    tools: Any = None
    multi_modal_data: Any = None


class Prompts(msgspec.Struct):
    """The prompts of a file whose keys can be computed, and why others cannot, a sentence each."""

    known: list[Prompt] = []
    skipped: list[str] = []

    def say_skipped(self, say: Callable[[str], None]) -> None:
        """Tell a person what was left out, and how much of all that is."""
        for each in self.skipped:
            say(each)
        if self.skipped:
            say(f"{len(self.skipped)} of {len(self.known) + len(self.skipped)} prompts are skipped")


class Unknowable(KVTierError):
    """Keys of this prompt only an engine can compute."""


def read_prompts(file: Path, model: str | None) -> Prompts:
    """The prompts of a file: a JSON object a line (.jsonl), or one text.

    Raises ConfigError for what cannot be read, KVTierError where no tokenizer can be had.
    """
    try:
        data = read_bounded(file, _BYTES_MAX)
    except OSError as error:
        raise ConfigError(
            str(file), f"cannot be read: {error.strerror}", "name a file of prompts"
        ) from error
    tokenizer = cache(partial(_load_tokenizer, model))  # when a prompt is text
    if file.suffix != ".jsonl":
        return Prompts([Prompt(_tokens_of(_Line(prompt=_decode(file, data)), tokenizer))])
    decoder, prompts = msgspec.json.Decoder(_Line), Prompts()
    for number, text in enumerate(data.splitlines(), 1):
        if not text.strip():
            continue
        place = f"{file}:{number}"
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(place, f"no prompt: {error}", f"like {_FORM}") from error
        if line.prompt is None and line.messages is None and line.tokens is None:
            raise ConfigError(place, "no prompt, no messages and no tokens", f"like {_FORM}")
        try:
            prompt = _prompt_of(line, tokenizer)
        except Unknowable as error:
            prompts.skipped.append(f"{place} is skipped: {error}")
            continue
        prompt.number = len(prompts.known) + len(prompts.skipped)
        if prompt.tokens and not 0 <= min(prompt.tokens) <= max(prompt.tokens) < _TOKEN_MAX:
            raise ConfigError(place, "a token is out of range", "use 0 to 2**31 - 1")
        prompts.known.append(prompt)
    if not (prompts.known or prompts.skipped):
        raise ConfigError(str(file), "holds no prompt", f"write one a line, like {_FORM}")
    return prompts


def _decode(file: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(str(file), "is no UTF-8 text", "name a file of prompts") from error


def _prompt_of(line: _Line, tokenizer: Callable[[], Any]) -> Prompt:
    if line.multi_modal_data is not None:
        raise Unknowable("it has images or other media, whose keys only the engine can compute")
    if line.tools is not None:
        raise Unknowable("it has tools, which only the server renders: give its tokens instead")
    prompt = Prompt(_tokens_of(line, tokenizer), line.cache_salt or "")
    if line.lora is not None:
        prompt.adapter = (line.lora.name, line.lora.path)
        prompt.fingerprint = _fingerprint(line.lora.path)
    return prompt


@cache
def _fingerprint(path: str) -> bytes:
    folder = Path(path)
    if not adapter_files(folder):
        raise Unknowable(
            f"the files of its adapter are not in {folder}: give the path that the server was "
            "given, where it can be read"
        )
    return fingerprint_adapter(folder)


def _load_tokenizer(model: str | None) -> Any:
    """The model's tokenizer; raises KVTierError where there is none."""
    if model is None:
        raise KVTierError("a text needs a tokenizer: name the model's folder with --model")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise KVTierError(
            "a text needs a tokenizer: run this where vLLM is installed, or give tokens"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise KVTierError(
            f"{model} has no tokenizer here: name a folder that has one with --model ({reason})"
        ) from error


def _tokens_of(line: _Line, tokenizer: Callable[[], Any]) -> list[int]:
    if line.tokens is not None:
        return line.tokens
    if line.messages is not None:
        messages = [message | {"content": _content(message)} for message in line.messages]
        text = _render(tokenizer(), messages)
        return _plain(tokenizer().encode(text, add_special_tokens=False))
    return _plain(tokenizer().encode(line.prompt or ""))


def _render(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Messages through the model's chat template, which is a program of the model's own."""
    template_error: type[Exception] = import_module("jinja2").TemplateError
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except (ValueError, TypeError, LookupError, AttributeError, template_error) as error:
        reason = str(error).partition("\n")[0]
        raise Unknowable(f"the model's chat template does not take it: {reason}") from error
    return text


def _content(message: dict[str, Any]) -> Any:
    """A message's text; raises Unknowable if it is more than that."""
    content = message.get("content")
    if not isinstance(content, list):
        return content
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    if any(kind != "text" for kind in kinds):
        raise Unknowable("it has images or other media, whose keys only the engine can compute")
    if len(content) != 1:
        raise Unknowable("a message is in several parts, which servers join in different ways")
    return content[0].get("text")


def _plain(tokens: Sequence[int]) -> list[int]:
    return [int(token) for token in tokens]
