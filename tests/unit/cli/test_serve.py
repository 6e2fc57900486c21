"""What `kvtier serve` makes of its arguments, without vLLM."""

from __future__ import annotations

import json
import shlex
import socket
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import serve
from kvtier.errors import ConfigError
from kvtier.vllm.hooks.versions import SERVER


def transfer(command: list[str]) -> dict[str, object]:
    value: dict[str, object] = json.loads(command[command.index("--kv-transfer-config") + 1])
    return value


def test_the_connector_is_given_to_vllm() -> None:
    command = serve.server_command("a/model", Path("stack.yaml"), ["--port", "8001"])
    assert command[command.index("--model") + 1] == "a/model"
    assert command[-2:] == ["--port", "8001"]
    assert command[command.index("--prefix-caching-hash-algo") + 1] == "sha256_cbor"
    found = transfer(command)
    assert found["kv_connector_module_path"] == "kvtier.vllm"
    assert found["kv_load_failure_policy"] == "recompute"
    assert found["kv_connector_extra_config"] == {"stack": str(Path("stack.yaml").absolute())}


@pytest.mark.parametrize("model", ["./no/model", "/no/model", "../no", "~/no"])
def test_a_folder_that_is_not_there(model: str) -> None:
    with pytest.raises(ConfigError, match="there is no such model - name a folder that exists"):
        serve.server_command(model, Path("stack.yaml"), [])


def test_a_flag_in_the_place_of_the_model() -> None:
    """As of who forgets the model, or puts flags of vLLM's before it."""
    with pytest.raises(ConfigError, match="stands where the model does - write kvtier serve MODEL"):
        serve.server_command("--port", Path("stack.yaml"), ["8001"])


@pytest.mark.parametrize(
    "flags", [["--prefix-caching-hash-algo", "sha256"], ["--prefix-caching-hash-algo=sha256"]]
)
def test_what_the_user_says_of_hashes_counts(flags: list[str]) -> None:
    assert "sha256_cbor" not in serve.server_command("m", Path("s.yaml"), flags)


@pytest.mark.parametrize(
    ("flags", "seconds"), [([], "20"), (["--shutdown-timeout", "0"], "0"), (["--port", "1"], "20")]
)
def test_an_engine_may_close_its_tiers_before_it_ends(flags: list[str], seconds: str) -> None:
    command = serve.server_command("m", Path("s.yaml"), flags)
    assert command.count("--shutdown-timeout") == 1
    assert command[command.index("--shutdown-timeout") + 1] == seconds


@pytest.mark.parametrize("flags", [[], ["--no-enable-prompt-tokens-details"]])
def test_answers_say_how_many_tokens_were_cached(flags: list[str]) -> None:
    command = serve.server_command("m", Path("s.yaml"), flags)
    assert ("--enable-prompt-tokens-details" in command) is not bool(flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-transfer-config={}"],
        ["--kv-transfer-config", "{}"],
        ["--kv_transfer_config", "{}"],
        ["--kv-transfer-config.kv_connector", "Other"],
    ],
)
def test_a_connector_of_the_users_is_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-config"):
        serve.server_command("m", Path("s.yaml"), flags)


@pytest.mark.parametrize("flags", [["--model=other"], ["--model", "other"]])
def test_a_second_model_is_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="--model: names another model"):
        serve.server_command("m", Path("s.yaml"), flags)


@pytest.mark.parametrize("flags", [["--kv-offloading-size=4"], ["--kv_offloading_size", "4"]])
def test_what_puts_another_connector_in_our_place_is_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        serve.server_command("m", Path("s.yaml"), flags)


STACK = Path("/path/of/stack.yaml")


@pytest.mark.parametrize(
    ("page", "instead"),
    [("serve", None), ("native_tiering", serve.secondary_tier(STACK, 8 << 30, 256))],
)
def test_the_page_says_what_it_is_the_same_as(page: str, instead: dict[str, Any] | None) -> None:
    text = (Path(__file__).parents[3] / f"docs/guides/{page}.md").read_text()
    block = text.partition("It is the same as\n")[2].split("```")[1]
    name, serving, model, *written = shlex.split(block.removeprefix("sh").replace("\\\n", " "))
    assert (name, serving) == ("vllm", "serve")
    command = serve.server_command(model, STACK, [], instead)
    assert transfer(written) == transfer(command)
    made = command[command.index(model) + 1 :]
    for flags in (made, written):
        del flags[flags.index("--kv-transfer-config") + 1]
    assert sorted(made) == sorted(written)


@pytest.mark.parametrize(
    ("model", "flags", "url"),
    [
        ("/of/someone's", [], "http://localhost:8000"),
        ("m", ["--host", "::1", "--port=81"], "http://[::1]:81"),
        ("m", ["--ssl-certfile", "c.pem", "--host", "h"], "https://h:8000"),
    ],
)
def test_what_it_says_to_try_can_be_typed(
    model: str, flags: list[str], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    serve.say_what_to_try(model, flags, Path("stack.yaml"))
    typed = [line for line in capsys.readouterr().out.splitlines() if "curl" in line]
    ask, count = map(shlex.split, typed)
    assert (ask[1], count[2]) == (f"{url}/v1/completions", f"{url}/metrics")
    assert json.loads(ask[-1])["model"] == model


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_what_it_says_to_try_has_room_for_a_key_and_does_not_tell_it(
    by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if by == "environment":
        monkeypatch.setenv("VLLM_API_KEY", "hush")
    serve.say_what_to_try("m", ["--api-key", "hush"] * (by == "flag"), Path("stack.yaml"))
    said = capsys.readouterr().out
    assert '-H "Authorization: Bearer $KEY"' in said
    assert "hush" not in said


def test_what_the_user_has_set_stays() -> None:
    environment = {"OMP_NUM_THREADS": "7"}
    serve.prepare_environment(environment, "m", [], cpu=True)
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "HF_HUB_OFFLINE" not in environment


@pytest.mark.parametrize("room", [0, -1])
def test_sockets_lie_where_their_paths_are_short(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = f"/{uuid.uuid4()}"
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * (106 - len(socket) - room))
    environment: dict[str, str] = {}
    serve.prepare_environment(environment, "m", [], cpu=False)
    assert environment == ({} if room == 0 else {"VLLM_RPC_BASE_PATH": "/tmp"})


def test_a_gpu_needs_no_settings(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    serve.prepare_environment(environment, str(tmp_path), [], cpu=False)
    assert environment == {"HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize(
    ("flags", "space"),
    [
        ([], "1"),
        (["--max-model-len", "64"], "1"),
        (["--kv-cache-memory-bytes", "8G"], None),
        (["--kv_cache_memory_bytes=8G"], None),
        (["--gpu-memory-utilization", "0.5"], None),
    ],
)
def test_room_that_the_user_asked_for_is_not_overridden(
    flags: list[str], space: str | None
) -> None:
    """vLLM heeds the variable, if there is one, and not the flags."""
    environment: dict[str, str] = {}
    serve.prepare_environment(environment, "m", flags, cpu=True)
    assert environment.get("VLLM_CPU_KVCACHE_SPACE") == space


@pytest.mark.parametrize(
    ("features", "slow"),
    [
        ("flags\t\t: fpu sse2 avx2", True),
        ("flags\t\t: fpu avx2 avx512f avx512bw", False),
        ("Features\t: fp asimd", False),
        ("", False),
    ],
)
def test_processors_that_are_slow_at_16_bits(tmp_path: Path, features: str, slow: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: any\n{features}\nbugs\t\t: some\n")
    assert serve.is_slow_at_halves(cpuinfo) is slow
    assert not serve.is_slow_at_halves(tmp_path / "none")


def test_the_guide_names_the_server_where_vllms_own_command_fails() -> None:
    """In its build for CPUs."""
    page = (Path(__file__).parents[3] / "docs/guides/serve.md").read_text()
    assert f"`python -m {SERVER} --model MODEL`" in page


def test_a_port_in_use_is_found_before_anything_is_loaded() -> None:
    """It took vLLM half a minute, and a traceback."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = str(other.getsockname()[1])
        flags = ["--host", "127.0.0.1", "--port", port]
        other.listen()
        with pytest.raises(ConfigError, match=f"--port {port}: another process uses it"):
            serve.check_port(flags)
        serve.check_port([*flags, "--headless"])
    serve.check_port(flags)
    serve.check_port(["--port", "99999"])
    serve.check_port(["--host", "no.such.host", "--port", port])


def test_a_flag_with_a_slip_is_found_before_anything_is_loaded() -> None:
    known = {"max-model-len", "port", "enable-prefix-caching", "compilation-config"}
    fine = [
        "--max_model_len=9",
        "--no-enable-prefix-caching",
        "--max-model",
        "--compilation-config.x=1",
    ]
    serve.check_flags([*fine, "--of-a-plugin", "-O3", "--port", "80"], known)
    for flag in ("--max-modle-len=9", "--enable-prefix-cachng", "--prot"):
        with pytest.raises(ConfigError, match="is no flag of vLLM's - did you mean"):
            serve.check_flags([*fine, flag], known)
