"""Prompts from files, as the tokens that vLLM's server would make of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtier.errors import ConfigError, KVTierError

_TOKEN_MAX = 1 << 31
_FORM = '{"prompt": "text"}, {"messages": [{"role": "user", "content": "text"}]} or {"tokens": [1]}'


class _Line(msgspec.Struct):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None


def read_prompts(file: Path, model: str | None) -> list[list[int]]:
    """The tokens of each prompt of a file: a JSON object a line (.jsonl), or one text.

    Raises ConfigError for what cannot be read, KVTierError where no tokenizer can be had.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            str(file), f"cannot be read: {error.strerror}", "name a file of prompts"
        ) from error
    if file.suffix != ".jsonl":
        return [_tokens_of(_Line(prompt=_decode(file, data)), _Lazy(model))]
    decoder, tokenizer = msgspec.json.Decoder(_Line), _Lazy(model)
    prompts = []
    for number, text in enumerate(data.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{file}:{number}", f"no prompt: {error}", f"like {_FORM}") from error
        found = _tokens_of(line, tokenizer)
        if found and not 0 <= min(found) <= max(found) < _TOKEN_MAX:
            raise ConfigError(f"{file}:{number}", "a token is out of range", "use 0 to 2**31 - 1")
        prompts.append(found)
    return prompts


def _decode(file: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(str(file), "is no UTF-8 text", "name a file of prompts") from error


class _Lazy:
    """The model's tokenizer, loaded when a prompt is text."""

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._tokenizer: Any = None

    def get(self) -> Any:
        """The tokenizer; raises KVTierError where there is none."""
        if self._tokenizer is None:
            if self._model is None:
                raise KVTierError("a text needs a tokenizer: name the model's folder with --model")
            try:
                from transformers import AutoTokenizer
            except ImportError as error:
                raise KVTierError(
                    "a text needs a tokenizer: run this where vLLM is installed, or give tokens"
                ) from error
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._model, local_files_only=True)
            except (OSError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                raise KVTierError(f"{self._model} has no tokenizer here: {reason}") from error
        return self._tokenizer


def _tokens_of(line: _Line, tokenizer: _Lazy) -> list[int]:
    if line.tokens is not None:
        return line.tokens
    if line.messages is not None:
        text = tokenizer.get().apply_chat_template(
            line.messages, tokenize=False, add_generation_prompt=True
        )
        return _plain(tokenizer.get().encode(text, add_special_tokens=False))
    return _plain(tokenizer.get().encode(line.prompt or ""))


def _plain(tokens: Sequence[int]) -> list[int]:
    return [int(token) for token in tokens]
