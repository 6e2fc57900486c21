"""What `kvtier top` makes of /metrics, and how it shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import metrics_server
from support.processes.metrics_server import STARTED, metrics

from kvtier.cli import app
from kvtier.cli.top import command as top
from kvtier.cli.top.figures import ServerFigures, ServerWatch
from kvtier.cli.top.page import PageServer

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def server() -> Iterator[metrics_server.Server]:
    with metrics_server.serving() as found:
        yield found


def watched(*seconds: float) -> ServerFigures:
    """The figures after readings so long after the start."""
    now = STARTED
    watch = ServerWatch("http://here:8000", lambda: now)
    for each in seconds:
        now = STARTED + each
        found = watch.take(metrics(each))
    return found


class TestFigures:
    def test_one_reading_tells_what_was_since_the_start(self) -> None:
        found = watched(600)
        (always,) = found.periods
        assert (found.model, found.uptime, found.running, found.waiting) == ("./small", 600, 3, 5)
        assert always.shares == pytest.approx(
            {
                "computed": 0.5,
                "engine": 0.2,
                "cpu": 0.3 * 2 / 2.75,
                "nvme": 0.3 * 0.5 / 2.75,
                "object": 0.3 * 0.25 / 2.75,
            }
        )
        cpu, nvme, _ = found.tiers
        assert (cpu.hits, cpu.read, cpu.written) == pytest.approx((2, 4e6, 4e6))
        assert (nvme.waiting, nvme.retained, nvme.used) == (31, 9, 48 << 30)
        loaded = always.first_tokens["loaded"]
        assert (loaded.requests, loaded.seconds, loaded.tokens) == pytest.approx((600, 0.12, 4000))
        assert always.misses == {"never stored": 3000}

    def test_later_readings_tell_of_the_last_minute_too(self) -> None:
        found = watched(600, 630, 660, 680)
        lately, always = found.periods
        assert (lately.seconds, always.seconds) == (50, 680)
        assert lately.prompt_tokens == 50 * 1000
        assert lately.first_tokens["loaded"].requests == 50
        assert len(found.history) == 4
        assert [point.at - STARTED for point in found.history] == [600, 630, 660, 680]

    def test_a_server_that_was_started_anew_begins_anew(self) -> None:
        found = watched(600, 601, 3)
        assert len(found.periods) == len(found.history) == 1
        assert found.periods[0].prompt_tokens == 3000

    def test_trouble_of_now_comes_first(self) -> None:
        whats = [each.what for each in watched(600, 630).troubles]
        assert whats == [
            "object is left alone, because it fails",
            "blocks were not written to object (full)",
            "blocks in nvme did not verify, and are quarantined",
        ]

    def test_what_is_no_number_is_left_out(self) -> None:
        watch = ServerWatch("http://here:8000")
        found = watch.take(
            'kvtier:bytes_capacity{tier="cpu"} NaN\nkvtier:blocks{tier="cpu"} what\n'
        )
        assert found.tiers == []

    def test_a_counter_of_another_version_may_lack_a_label(self) -> None:
        found = ServerWatch("http://here:8000").take('kvtier:store_drops_total{tier="nvme"} 3\n')
        assert [each.what for each in found.troubles] == [
            "blocks were not written to nvme (unknown)"
        ]

    def test_a_server_without_kvtier(self, server: metrics_server.Server) -> None:
        server.text = "vllm:num_requests_running 3\n"
        assert "start it by kvtier serve" in ServerWatch(server.url).look().problem


class TestInATerminal:
    @pytest.mark.parametrize("width", [80, 120, 200])
    def test_a_picture_fits(
        self,
        width: int,
        server: metrics_server.Server,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        assert app.run(["top", server.url, server.url, "--once"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= width
        assert "…" not in out, "nothing is cut"
        for said in ("120 ms", "960 ms", "48 GiB", "2 TiB", "3k never stored", "did not verify"):
            assert out.count(said) == 2, said
        beside = [line for line in out.splitlines() if line.count(server.url) == 2]
        assert bool(beside) is (width == 200)

    def test_colours_are_the_terminals_own(self) -> None:
        from rich.console import Console

        terminal = Console(width=120, force_terminal=True, color_system="truecolor", _environ={})
        with terminal.capture() as shown:
            terminal.print(top.picture([watched(600, 630)], 120))
        codes = set(re.findall(r"\x1b\[([\d;]*)m", shown.get()))
        assert codes <= {"0", "1", "2", "32", "1;31"}, "no white, black, yellow or background"

    def test_names_move_no_terminal(
        self, server: metrics_server.Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        server.model = "evil\x1b[2J"
        assert app.run(["top", server.url]) == 0
        assert "evil\ufffd[2J" in capsys.readouterr().out

    def test_one_that_cannot_be_read(
        self, server: metrics_server.Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with metrics_server.serving() as gone:
            pass
        assert app.run(["top", gone.url, f"{server.url}/metrics"]) == 1
        out = capsys.readouterr().out
        assert "cannot be read: [Errno 111] Connection refused" in out
        assert "first tokens" in out

    def test_a_server_that_has_had_no_request(
        self, server: metrics_server.Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        server.text = "# HELP kvtier:blocks Blocks that a tier holds\n"
        assert app.run(["top", server.url]) == 0
        assert "no request yet" in capsys.readouterr().out

    def test_json(self, server: metrics_server.Server, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.run(["top", server.url, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert [tier["kind"] for tier in found["tiers"]] == ["cpu", "nvme", "object"]

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (["file:///etc/passwd"], "is no server; write http://host:8000"),
            (["http://[::1"], "is no server; write http://host:8000"),
            (["http://a:b@host:8000"], "a password would be shown"),
            (["--every", "1ms"], "is too often"),
            (["--port", "9000"], "says nothing without --page"),
        ],
    )
    def test_wrong_calls(
        self, args: list[str], says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert app.run(["top", *args]) == 2
        assert says in capsys.readouterr().err


class TestThePage:
    @pytest.fixture
    def page(self) -> Iterator[PageServer]:
        with PageServer(0) as found:
            found.show([watched(600, 630)], 2.0)
            thread = threading.Thread(target=found.serve_forever, daemon=True)
            thread.start()
            yield found
            found.shutdown()
            thread.join()

    def get(self, page: PageServer, path: str, host: str | None = None) -> Any:
        url = f"http://127.0.0.1:{page.server_port}{path}"
        request = urllib.request.Request(url, headers={"Host": host} if host else {})
        return urllib.request.urlopen(request, timeout=10)

    def test_it_runs_its_own_script_alone(self, page: PageServer) -> None:
        with self.get(page, "/") as answer:
            policy, text = answer.headers["Content-Security-Policy"], answer.read().decode()
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert re.findall(r"\b(?:src|href)=\"([^\"]*)\"", text) == ["data:,"], (
            "nothing from elsewhere"
        )
        assert "innerHTML" not in text

    def test_it_tells_the_same_figures(self, page: PageServer) -> None:
        with self.get(page, "/figures", f"localhost:{page.server_port}") as answer:
            shown = json.loads(answer.read())
        (server,) = shown["servers"]
        assert server["periods"][0]["first_tokens"]["loaded"]["seconds"] == pytest.approx(0.12)

    @pytest.mark.slow
    @pytest.mark.skipif(BROWSER is None, reason="no browser is installed: apt-get install chromium")
    def test_a_browser_shows_it(self, page: PageServer, tmp_path: Path) -> None:
        found = watched(600, 630)
        found.model = "<img src=x onerror=alert(1)>"
        page.show([found, ServerFigures("http://gone", "cannot be read")], 2.0)
        command = [str(BROWSER), "--headless=new", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        command += ["--no-sandbox", "--virtual-time-budget=3000", "--enable-logging=stderr"]
        url = f"http://127.0.0.1:{page.server_port}/"
        done = subprocess.run(
            [*command, "--dump-dom", url], capture_output=True, text=True, timeout=300, check=True
        )
        assert "CONSOLE" not in done.stderr, "its own policy lets all of it run"
        main = done.stdout.partition("<main>")[2].partition("</main>")[0]
        assert "<span>&lt;img src=x onerror=alert(1)&gt;</span>" in main
        assert main.count("<section>") == 2
        assert re.findall(r"<h2>(.*?)</h2>", main) == [
            "Prompt tokens from",
            "First tokens, with the cache and without",
            "Tiers",
            "Missed tokens",
            "Trouble",
        ]
        for said in ("120 ms", "960 ms", "48 GiB", "3.15k", "did not verify", "<path d="):
            assert said in main, said

    @pytest.mark.parametrize(
        ("path", "host", "code"), [("/figures", "evil.example:8090", 421), ("/x", None, 404)]
    )
    def test_nobody_else_is_answered(
        self, path: str, host: str | None, code: int, page: PageServer
    ) -> None:
        with pytest.raises(urllib.error.HTTPError) as refused, self.get(page, path, host):
            pass
        assert refused.value.code == code
        refused.value.close()

    def test_a_port_that_is_taken(
        self, page: PageServer, server: metrics_server.Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        args = ["top", server.url, "--page", "--port", str(page.server_port)]
        assert app.run(args) == 2
        assert "another process uses it - name another: --port" in capsys.readouterr().err
