"""How `kvtier explain --request` asks a running engine: a socket in a folder of the user's.

The engine's process answers in a thread, and does nothing for it until somebody asks. One line
comes, the name of a request; JSON goes back, and the connection ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec

from kvtier.errors import UNREADABLE, MediumError
from kvtier.vllm.misses import Miss, RequestMisses

logger = logging.getLogger(__name__)

LAST = "last"
"""Stands for the request that was looked up last."""
_SUFFIX = ".explain"
_QUESTION_MAX, _ANSWER_MAX = 4096, 1 << 20
_TOLD_MAX = 64
_WAIT_S = 2.0


class MissAnswer(msgspec.Struct):
    """What one engine knows of a request."""

    stack: str
    misses: list[Miss]
    """Oldest first. One whose load has failed later has a second one."""


class MissSocket:
    """Answers from what an engine has explained last."""

    def __init__(self, stack: str, misses: RequestMisses) -> None:
        """Raises MediumError or OSError where there can be no socket."""
        self._stack = stack
        self._misses = misses
        folder = next(_folders())
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(folder)
        _sweep(folder)
        self._path = folder / f"{os.getpid()}-{uuid4().hex[:8]}{_SUFFIX}"
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(self._path))
            self._path.chmod(0o600)
            self._socket.listen(4)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="kvtier-explain", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # it was closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_WAIT_S)
                asked = connection.recv(_QUESTION_MAX).decode(errors="replace").strip()
                answer = MissAnswer(self._stack, self._about(asked))
                connection.sendall(msgspec.json.encode(answer))

    def _about(self, asked: str) -> list[Miss]:
        known = list(self._misses.latest)  # in one go: the engine's thread adds to it
        if asked == LAST:
            return [each for each in known if each.request == known[-1].request]
        # vLLM adds to the name that its clients know.
        found = [each for each in known if f"{each.request}-".startswith(f"{asked}-")]
        return found[-_TOLD_MAX:]

    def close(self) -> None:
        """Answer nobody any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        self._path.unlink(missing_ok=True)


def ask_engines(request: str) -> list[MissAnswer]:
    """What the engines of this user that run here know of a request."""
    answers = []
    for folder in dict.fromkeys(_folders()):
        try:
            _check_private(folder)
        except (MediumError, OSError):
            continue
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            with contextlib.suppress(OSError, *UNREADABLE):
                answers.append(_ask(path, request))
    return answers


def _ask(path: Path, request: str) -> MissAnswer:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_WAIT_S)
        connection.connect(str(path))
        connection.sendall(f"{request}\n".encode())
        answer = bytearray()
        while part := connection.recv(1 << 16):
            answer += part
            if len(answer) > _ANSWER_MAX:
                break
    return msgspec.json.decode(bytes(answer), type=MissAnswer)


def _folders() -> Iterator[Path]:
    """Where sockets may be, the best place first. A service may have another environment than the
    shell of its user."""
    user = os.getuid()
    for runtime in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}"):
        if Path(runtime).is_absolute() and os.access(runtime, os.W_OK):
            yield Path(runtime) / "kvtier"
    yield from (Path(each) / f"kvtier-{user}" for each in (tempfile.gettempdir(), "/tmp"))


def _check_private(folder: Path) -> None:
    about = folder.lstat()
    private = stat.S_ISDIR(about.st_mode) and not about.st_mode & 0o077
    if not private or about.st_uid != os.getuid():
        raise MediumError(f"{folder} is not a folder of this user alone: remove it")


def _sweep(folder: Path) -> None:
    """Remove the sockets of engines that were killed."""
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_WAIT_S)
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
