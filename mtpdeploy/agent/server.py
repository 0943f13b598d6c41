"""Asks the server itself, over HTTP on this host.

/health submits a one-token request and takes at least one second (http_server.py, all versions); /ready (0.5.20 and
later) answers at once. So /ready is asked first, /health only when nothing cheaper decides, and never two at a time.
"""

from __future__ import annotations

import json
import re
import socket
import time
from dataclasses import dataclass
from typing import Any

from mtpdeploy.agent.protocol import ReleaseFile
from mtpdeploy.agent.release import Release

API_KEY_VARIABLE = "MTPDEPLOY_API_KEY"  # how the benchmark's client is told the key
_SMALL = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer; `status` None means that none came (`error` says why)."""

    status: int | None
    body: bytes
    latency_ms: float
    error: str | None = None

    def json(self) -> Any:
        """The body as JSON, or None."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Load:
    """Running and queued requests; None where the version does not tell. silent: no answer came at all."""

    running: int | None
    queued: int | None
    silent: bool = False


def base_url(release: ReleaseFile) -> str:
    """Where this host reaches the server: a wildcard address means the loopback."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(release["host"], release["host"])
    return f"http://[{host}]:{release['port']}" if ":" in host else f"http://{host}:{release['port']}"


def secrets(release: Release) -> dict[str, str]:
    """What must not be seen in a process list, by option name: the release's 0600 server.yml (NAME: "JSON string", one a line)."""
    try:
        lines = (release.path / "server.yml").read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, _, value = line.partition(": ")
        try:
            found[name] = str(json.loads(value))
        except ValueError:
            continue
    return found


def api_key(release: Release) -> str | None:
    """The key that the server asks for."""
    return secrets(release).get("api-key")


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body, at most _SMALL bytes of it. ValueError if it is no HTTP, or breaks off.

    To a request of HTTP/1.0 the body is all until the end, never chunked. http.client would do the same and load the e-mail package
    first: a fifth of the time of a deploy that finds nothing to do.
    """
    data, end, length = b"", -1, None
    while len(data) < _SMALL and (part := connection.recv(256 * 1024)):
        data += part
        if end < 0 and (end := data.find(b"\r\n\r\n")) >= 0:
            said = re.search(rb"\r\ncontent-length:[ \t]*(\d+)", data[:end], re.IGNORECASE)
            length = int(said.group(1)) if said else None
        if length is not None and len(data) >= end + 4 + length:
            break  # it may leave the connection open
    words = data.split(b"\r\n", 1)[0].split(None, 2)
    if end < 0 or len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ValueError("what answers speaks no HTTP" if data else "it closed the connection without an answer")
    body = data[end + 4 :]
    if length is not None and len(body) < length and len(data) < _SMALL:
        raise ValueError(f"the answer broke off after {len(body)} of {length} bytes")
    return int(words[1]), body[:length]


@dataclass(frozen=True, slots=True)
class Server:
    """A server's address and, if it needs one, its key (which leaves this object only as a header)."""

    base: str
    key: str | None = None

    @staticmethod
    def of(release: Release) -> Server:
        """The server of a release, with its key."""
        return Server(base_url(release.read()), api_key(release))

    def ask(self, path: str, *, body: Any = None, timeout_s: float = 5.0) -> Reply:
        """One request without proxy and redirects. Never raises for what a server or network may do."""
        place = self.base.partition("://")[2]
        host, _, port = place.rpartition(":")
        headers = {"Host": place, "Accept": "application/json", "Connection": "close"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = b""
        if body is not None:
            data = json.dumps(body).encode()
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        lines = [
            f"{'GET' if body is None else 'POST'} {path} HTTP/1.0",
            *(f"{k}: {v}" for k, v in headers.items()),
            "",
            "",
        ]
        began = time.monotonic()
        try:
            if any(ord(character) < 0x20 for line in lines for character in line):
                raise ValueError("the API key holds a control character")
            with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection:
                connection.sendall("\r\n".join(lines).encode("latin-1") + data)
                status, content = _answer(connection)
            return Reply(status, content, _ms(began))
        except (OSError, ValueError) as error:
            return Reply(None, b"", _ms(began), str(error) or type(error).__name__)

    def ready(self) -> Reply:
        """Whether the server takes requests. /ready where it exists, else /health (≥1 s and one token)."""
        reply = self.ask("/ready", timeout_s=5)
        return self.ask("/health", timeout_s=25) if reply.status in (404, 405) else reply

    def info(self) -> dict[str, Any] | None:
        """/server_info, or None. It passes through every scheduler, so it blocks where one is stuck."""
        value = self.ask("/server_info", timeout_s=5).json()
        return value if isinstance(value, dict) else None

    def load(self) -> Load:
        """Requests over all replicas. The question passes through every scheduler, so a stuck one leaves it unanswered."""
        for path in ("/v1/loads", "/get_load"):
            reply = self.ask(path, timeout_s=5)
            if (found := _loads(reply.json())) is not None:
                return Load(*found)
            if reply.status is None:
                return Load(None, None, silent=True)
        return Load(None, None)

    def generate(self, tokens: int = 4, timeout_s: float = 60.0) -> dict[str, Any]:
        """A real generation: {ok, tokens, text_bytes, latency_ms, endpoint, status, error}; ok if tokens came back."""
        reply = self.ask(
            "/generate",
            body={"text": "The", "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}},
            timeout_s=timeout_s,
        )
        endpoint, value = "/generate", reply.json()
        if reply.status in (404, 405):
            endpoint = "/v1/completions"
            reply = self.ask(
                endpoint,
                body={"model": "default", "prompt": "The", "max_tokens": tokens, "temperature": 0},
                timeout_s=timeout_s,
            )
            value = reply.json()
        count = _tokens(value)
        ok = reply.status == 200 and bool(count)
        return {
            "ok": ok,
            "tokens": count,
            "text_bytes": len(_text(value).encode()),
            "latency_ms": round(reply.latency_ms, 1),
            "endpoint": endpoint,
            "status": reply.status,
            "error": None if ok else reply.error or reply.body[:300].decode(errors="replace"),
        }

    def abort_all(self) -> Reply:
        """Aborts what is running or queued, so that a stop need not wait for it."""
        return self.ask("/abort_request", body={"rid": "", "abort_all": True}, timeout_s=5)


def _ms(began: float) -> float:
    return (time.monotonic() - began) * 1000


def _loads(value: Any) -> tuple[int, int] | None:
    """Running and queued requests from /v1/loads ({loads: [{…}]}) or /get_load ([{…}])."""
    rows = value.get("loads") if isinstance(value, dict) else value
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        return None
    running = queued = 0
    for row in rows:
        waiting = row.get("num_waiting_reqs", row.get("num_queue_reqs"))
        now = row.get("num_running_reqs")
        if now is None and isinstance(row.get("num_reqs"), int) and isinstance(waiting, int):
            now = row["num_reqs"] - waiting
        if not isinstance(now, int):
            return None
        running += now
        queued += waiting if isinstance(waiting, int) else 0
    return running, queued


def _tokens(value: Any) -> int | None:
    if not isinstance(value, dict):
        return None
    for holder in (value.get("meta_info"), value.get("usage")):
        if isinstance(holder, dict) and isinstance(holder.get("completion_tokens"), int):
            return int(holder["completion_tokens"])
    return None


def _text(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    choices = value.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return str(choices[0].get("text") or "")
    return str(value.get("text") or "")
