"""`kvtier serve`: an OpenAI-compatible vLLM server whose KV cache is kept in a stack."""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli import console, options
from kvtier.cli.inspect import unusable_here
from kvtier.cli.supervisor import run_server
from kvtier.config import StackConfig, load
from kvtier.errors import ConfigError, ConfigErrors
from kvtier.vllm.hooks.versions import SERVER, installed, known_flags

app = options.new_app()

_MODEL = "--model"
_TRANSFER = "--kv-transfer-config"
_OFFLOADING = "--kv-offloading-size"
_HASH = "--prefix-caching-hash-algo"
_DETAILS = "--enable-prompt-tokens-details"
_SPACE = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
_GRACE = "--shutdown-timeout"
_GRACE_S = 20
_NO_PORT = {"--uds", "--headless"}
_SOCKETS_PATH_MAX = 107 - 1 - 36
"""A socket's path has 107 bytes at most, and vLLM's have a UUID for a name."""
_SLIP = 0.85
"""How alike a flag and what was meant are, from 0 to 1."""
_PROCESSORS = Path("/proc/cpuinfo")
_USAGE = "write kvtier serve MODEL --config stack.yaml -- --port 8001"
_PROMPT = "Tell me about caches. " * 100


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, **options.HELP},
    epilog="Example: kvtier serve ./model --config stack.yaml -- --port 8001 --max-model-len 8192",
)
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, or a name on the Hugging Face hub.")
    ],
    config: options.ConfigOption,
    native: Annotated[
        int | None,
        typer.Option(
            parser=options.parse_size,
            metavar="SIZE",
            help="Keep blocks in vLLM's own CPU tier, of this size, and below it in the stack.",
        ),
    ] = None,
) -> None:
    """Check the stack and vLLM's version, then run vLLM's server, and end all of it at the end.

    Everything after `--` is passed on to vLLM unchanged.
    """
    stack = _check(config)
    vllm = installed()
    if native is not None and vllm.cpu:
        raise ConfigError("--native", "vLLM's own tiering serves no CPU platform", "leave it out")
    flags = list(context.args)
    tiering = None if native is None else secondary_tier(config, native, stack.chunk_tokens)
    command = server_command(model, config, flags, tiering)
    check_flags(flags, known_flags())
    check_port(flags)
    prepare_environment(os.environ, model, flags, cpu=vllm.cpu)
    say_what_to_try(model, flags, config)
    if vllm.cpu and _value(flags, "--dtype") is None and is_slow_at_halves(_PROCESSORS):
        console.warn(
            "this processor has no AVX-512, and computes in bfloat16 or float16, as most models "
            "are, many times slower than with vLLM's --dtype float32"
        )
    sys.stdout.flush()
    raise typer.Exit(run_server(command, partial(listens, flags)))


def _check(config: Path) -> StackConfig:
    """Refuse, before vLLM takes half a minute to start, what its engine would refuse."""
    stack = load(config)
    if errors := unusable_here(stack):
        raise ConfigErrors(errors)
    return stack


def check_flags(flags: Sequence[str], known: Collection[str]) -> None:
    """Refuse a flag that is one of vLLM's but for a slip: it says so when all is imported."""
    for flag in flags:
        name = flag.partition("=")[0].partition(".")[0].replace("_", "-").removeprefix("--")
        name = name.removeprefix("no-")
        if flag[:2] != "--" or any(each.startswith(name) for each in known):  # it may be shortened
            continue
        # Two letters that have changed places make a short flag quite unlike.
        swapped = [each for each in known if sorted(each) == sorted(name)]
        if meant := swapped or difflib.get_close_matches(name, known, 1, _SLIP):
            raise ConfigError(flag, "is no flag of vLLM's", f"did you mean --{meant[0]}?")


def check_port(flags: Sequence[str]) -> None:
    """Refuse a port that another process listens on: vLLM binds to it when the model is loaded."""
    host, port = _value(flags, "--host"), _value(flags, "--port") or "8000"
    if not port.isdecimal() or _NO_PORT.intersection(flags):
        return
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    with socket.socket(family) as taken, contextlib.suppress(OverflowError, socket.gaierror):
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((host or "", int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                remedy = "end that one, or name another behind the --: --port 8001"
                raise ConfigError(f"--port {port}", "another process uses it", remedy) from None


def listens(flags: Sequence[str]) -> bool:
    """Whether a server with these flags listens by now."""
    host, port = _value(flags, "--host") or "localhost", _value(flags, "--port") or "8000"
    if _NO_PORT.intersection(flags):
        return False
    try:
        with socket.create_connection((host, int(port)), timeout=1.0):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def server_command(
    model: str, config: Path, flags: Sequence[str], transfer: Mapping[str, Any] | None = None
) -> list[str]:
    """What runs vLLM's server with kvtier's connector, or another that `transfer` states, and these
    flags of the user's."""
    if model.startswith("-"):
        raise ConfigError(
            model, "stands where the model does", f"{_USAGE}: flags of vLLM's come behind the --"
        )
    if model.startswith(("/", ".", "~")) and not Path(model).exists():  # no name on a hub does
        raise ConfigError(model, "there is no such model", "name a folder that exists")
    if _value(flags, _MODEL) is not None:
        raise ConfigError(_MODEL, "names another model", "name one, before the --")
    if _value(flags, _TRANSFER) is not None:
        raise ConfigError(
            _TRANSFER,
            "is what kvtier serve itself gives to vLLM",
            "to combine connectors, run vLLM's own server: docs/guides/serve.md says how",
        )
    if _value(flags, _OFFLOADING) is not None:
        raise ConfigError(
            _OFFLOADING,
            "has vLLM use another connector instead of this stack, without a word",
            "leave it out: the stack's cpu tier says how much memory is used",
        )
    transfer = transfer or _connector(config)
    command = [sys.executable, "-m", SERVER, _MODEL, model, _TRANSFER, json.dumps(transfer)]
    if _value(flags, _HASH) is None:
        command += [_HASH, "sha256_cbor"]
    if all(_value(flags, flag) is None for flag in (_DETAILS, _DETAILS.replace("--", "--no-", 1))):
        command.append(_DETAILS)  # so that an answer's usage says how many tokens were cached
    if _value(flags, _GRACE) is None:
        command += [_GRACE, str(_GRACE_S)]  # else vLLM kills its engine before that closes anything
    return [*command, *flags]


def _connector(config: Path) -> dict[str, Any]:
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"stack": str(config.absolute())},
    }


def secondary_tier(config: Path, memory: int, chunk_tokens: int) -> dict[str, Any]:
    """vLLM's own tiering, with the stack below its CPU tier."""
    tier = {"type": "KVTierSecondary", "module_path": "kvtier.vllm.secondary"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": memory,
            "block_size": chunk_tokens,
            "secondary_tiers": [{**tier, "stack": str(config.absolute())}],
        },
    }


def prepare_environment(
    environment: MutableMapping[str, str], model: str, flags: Sequence[str], *, cpu: bool
) -> None:
    """Settings that suit the machine, where the user has none of his own."""
    if Path(model).is_dir():
        environment.setdefault("HF_HUB_OFFLINE", "1")
    if len(os.fsencode(tempfile.gettempdir())) > _SOCKETS_PATH_MAX:
        environment.setdefault("VLLM_RPC_BASE_PATH", "/tmp")  # else vLLM does not start
    if not cpu:
        return
    # vLLM binds its threads to cores and lets them spin there; whatever else runs on these cores,
    # like the copies of this cache, makes each step many times slower.
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))
    if all(_value(flags, flag) is None for flag in _SPACE):  # which the variable would override
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def is_slow_at_halves(processors: Path) -> bool:
    """Whether torch has no instructions here for products of matrices of 16 bit numbers."""
    try:
        lines = processors.read_text().splitlines()
    except OSError:
        return False
    features = next((line.split() for line in lines if line.startswith("flags")), None)
    return features is not None and "avx512bw" not in features  # None: no x86


def _value(flags: Sequence[str], name: str) -> str | None:
    """The value of one of vLLM's flags; the last one counts, and _ is as good as -, as there."""
    found = None
    for index, flag in enumerate(flags):
        written, equals, value = flag.partition("=")
        if written.replace("_", "-").partition(".")[0] != name:  # --name.part sets a part of it
            continue
        if not equals:
            value = flags[index + 1] if index + 1 < len(flags) else ""
        found = value
    return found


def say_what_to_try(model: str, flags: Sequence[str], config: Path) -> None:
    """Two commands, as they can be typed."""
    scheme = "http" if _value(flags, "--ssl-certfile") is None else "https"
    host = _value(flags, "--host") or "localhost"
    host = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{host}:{_value(flags, '--port') or '8000'}"
    name = _value(flags, "--served-model-name") or model
    body = json.dumps({"model": name, "prompt": _PROMPT, "max_tokens": 16, "temperature": 0})
    short = shlex.quote(body).replace(_PROMPT, "'\"$PROMPT\"'")
    console.say(f"kvtier: serving {model} on {url} with {config}. When it is up, try, twice:")
    console.say()
    console.say('  PROMPT=$(printf "Tell me about caches. %.0s" $(seq 100))')
    headers = "-H 'Content-Type: application/json'"
    if _value(flags, "--api-key") is not None or "VLLM_API_KEY" in os.environ:
        console.say("  KEY=...  # one that the server takes")
        headers += ' -H "Authorization: Bearer $KEY"'
    console.say(f"  curl {url}/v1/completions {headers} -d {short}")
    console.say(f"  curl -s {url}/metrics | grep ^kvtier")
    console.say()
    console.say("Then stop the server, start it again, and send the same: it is still known.")
    console.say()
