"""A secret that the server printed is in no byte that leaves the host, and in its log no longer."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from mtpdeploy.agent.logtail import LogTail
from mtpdeploy.agent.release import Release, Service


def release(folder: Path, **secrets: str) -> Release:
    made = Release(Service(folder, "sglang"), "20261130T074100Z-0a1b2c")
    made.path.mkdir(parents=True)
    said = "".join(f"{name.replace('_', '-')}: {json.dumps(value)}\n" for name, value in secrets.items())
    (made.path / "server.yml").write_text(said)
    (made.path / "state.json").write_text("{}")
    return made


def told(tail: LogTail) -> bytes:
    return b"".join(base64.b64decode(fields["data"]) for name, fields in tail.events() if name == "log")


def quoted_stars(key: str) -> bytes:
    printed = repr(key).encode()
    return printed[:1] + b"*" * (len(printed) - 2) + printed[-1:]


@pytest.mark.parametrize("key", ["s3cretXYZ", "pass", 'it\'s "both" ways', "ключ-от-сервера", "a" * 200])
def test_a_printed_key_is_overwritten_in_place_and_nothing_else_moves(tmp_path: Path, key: str) -> None:
    made = release(tmp_path, api_key=key)
    line = f"[2026-11-30] server_args=ServerArgs(port=30000, api_key={key!r}, dtype='auto') passed aaaa\n".encode()
    after = b"Decode batch, #running-req: 1\n"
    made.log.write_bytes(line + after)
    seen = told(LogTail(made))
    assert repr(key).encode() not in seen
    assert seen == made.log.read_bytes()
    assert len(seen) == len(line + after)
    assert seen == line.replace(repr(key).encode(), quoted_stars(key), 1) + after


def test_a_key_that_arrives_in_two_pieces_is_held_back_until_it_is_whole(tmp_path: Path) -> None:
    made = release(tmp_path, api_key="s3cretXYZ")
    for cut in range(1, len("api_key='s3cretXYZ'")):
        text = b"api_key='s3cretXYZ'\n"
        made.log.write_bytes(text[:cut])
        tail = LogTail(made)
        first = told(tail)
        with made.log.open("ab") as log:
            log.write(text[cut:])
        assert first + told(tail) == b"api_key='*********'\n"
        tail.close()


def test_a_log_that_cannot_be_written_is_still_masked_on_its_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = release(tmp_path, api_key="s3cretXYZ", admin_api_key="0therKey99")
    made.log.write_bytes(b"api_key='s3cretXYZ', admin_api_key='0therKey99'\n")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    assert told(LogTail(made)) == b"api_key='*********', admin_api_key='**********'\n"


def test_a_log_without_secrets_is_left_as_it_is(tmp_path: Path) -> None:
    made = release(tmp_path)
    made.log.write_bytes(b"api_key=None\npartial")
    assert told(LogTail(made)) == b"api_key=None\npartial"
