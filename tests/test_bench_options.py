"""What cannot be meant is refused before a byte is sent, with the option's name and what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from mtpdeploy.actions.bench import bench
from mtpdeploy.actions.benchservice import Service
from mtpdeploy.actions.reach import Target
from mtpdeploy.bench import prompting
from mtpdeploy.errors import UsageError
from mtpdeploy.inventory.values import Host, SshOptions
from mtpdeploy.progress import Silent

SILENT: Any = Silent()


def refused(home: Path, **options: Any) -> str:
    given = {"url": "http://127.0.0.1:9", "model": "m"} | options
    with pytest.raises(UsageError) as said:
        bench(home=home, talk=SILENT, **given)
    assert not (home / "runs").exists()
    return said.value.message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": float("nan")}, "--temperature nan: should be 0 or more"),
        ({"temperature": float("inf")}, "--temperature inf"),
        ({"timeout": float("nan")}, "--timeout nan: should be above 0 seconds"),
        ({"requests": 10**9}, "--requests 1000000000: should be 1 or more, at most 1,000,000"),
        ({"repeat": 10**6}, "--repeat 1000000"),
        ({"concurrency": "99999999"}, "--concurrency 99999999: a client opens at most"),
        ({"sweep": ("concurrency=",)}, "--sweep concurrency: ''"),
        ({"sweep": ("rate=x",)}, "--sweep rate: 'x' should be numbers"),
        ({"prompts": "poem"}, "--prompts poem: should be one of code, maths"),
        ({"prompts": "/etc/passwd"}, "goes with --dataset"),
        ({"arrivals": "ramp"}, "--arrivals ramp shapes an open loop: give --rate"),
        ({"arrivals": "gamma", "concurrency": "2"}, "--arrivals gamma"),
        ({"order": "AB"}, "--order AB is the order of --arms"),
        ({"from_": "cpu2"}, "--from and --url exclude each other"),
        ({"attach": "last"}, "--attach and --url exclude each other"),
        ({"slo": " , "}, "--slo: there is no objective in it"),
        ({"find": "max-goodput", "slo": "ttft_p50_ms<9", "concurrency": "1,2"}, "--find starts from one load"),
        ({"find": "max-goodput", "slo": "ttft_p50_ms<9", "repeat": 2}, "--find starts from one load"),
        ({"model": "\udcff"}, "--model '\\udcff': is not UTF-8"),
        ({"url": "http://[::"}, "--url 'http://[::': should be such as http://127.0.0.1:30000"),
        ({"url": "http://host:port"}, "--url 'http://host:port': should be such as"),
        ({"url": None, "attach": "last", "concurrency": "2"}, "--concurrency says nothing to --attach"),
        ({"url": None, "arms": "a,b", "find": "max-goodput", "slo": "ttft_p50_ms<9"}, "--find searches with one profile"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_meant_is_named(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    assert says in refused(tmp_path / "home", **options)


@pytest.mark.parametrize(
    ("lines", "requests", "says"),
    [
        ("1\nx\n", None, "line 2: 'x' is neither a time"),
        ("2\n1\n", None, "line 2: 1 s lies before"),
        ("1\nnan\n", None, "line 2: 'nan' is no time"),
        ("1e999\n", None, "line 1: '1e999' is no time"),
        ('{"timestamp": NaN}\n', None, "is no time"),
        ("# nothing\n", None, "no arrival in it"),
        ("1\n2\n", 5, "--requests 5: the trace has 2 arrivals"),
    ],
)
def test_a_trace_is_refused_by_its_line(tmp_path: Path, lines: str, requests: int | None, says: str) -> None:
    path = tmp_path / "trace.txt"
    path.write_text(lines)
    message = refused(tmp_path / "home", trace=str(path), requests=requests)
    assert says in message
    assert "--trace" in message or requests


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no prompt in it"),
        (b"hello\n", "line 1: not JSON"),
        (b'{"prompt": "x"}\n{oops\n', "line 2: not JSON"),
        (b"\xff\xfe\x00", "not UTF-8 text (byte 0)"),
        (b"[1, 2]", "item 1: an object is needed, not int"),
        (b"[" * 100_000, "not JSON"),
        (b'{"messages": 5}', "line 1: no prompt; a line needs"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}', "role 'wizard': should be one of system"),
        (b'{"messages": [{"role": "assistant", "content": "only"}]}', "no turn of a user"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "only text is measured"),
        (b'{"conversations": [{"from": "elf", "value": "x"}]}', "from 'elf': should be one of human"),
        (b'{"conversations": [{"from": "gpt", "value": "x"}]}', "no turn of a user"),
        (b'{"prompt": "  "}', "no turn of a user"),
        (b'{"prompt": "\\ud800 lone"}', "half a character"),
    ],
)
def test_a_dataset_is_refused_by_its_line_and_reason(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    message = refused(tmp_path / "home", dataset=str(path))
    assert message.startswith(f"--dataset {path}")
    assert says in message


def test_a_dataset_keeps_unicode_parts_systems_and_names_apart(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + '{"messages":[{"role":"system","content":"s\u2028t"},{"role":"user","content":[{"type":"text","text":"世界"}]}],"id":"a"}\n'
        '{"conversations":[{"from":"system","value":"S"},{"from":"human","value":"hi"},{"from":"gpt","value":"yo"}],"id":"a"}\n'
        '{"prompt":"x","class":"odd"}\n'.encode()
    )
    first, second, third = prompting.from_file(path)
    assert [(one.role, one.content) for one in first.messages] == [("system", "s\u2028t"), ("user", "世界")]
    assert [(one.role, one.content) for one in second.messages] == [("system", "S"), ("user", "hi")]
    assert (first.id, second.id, third.id, third.kind) == ("a", "a#2", "file-3", "odd")


@pytest.mark.parametrize(
    ("bound", "url", "seen"),
    [
        ("0.0.0.0", "http://127.0.0.1:30000", "http://10.1.2.3:30000"),
        ("::", "http://[::1]:30000", "http://10.1.2.3:30000"),
        ("192.0.2.7", "http://192.0.2.7:30000", "http://192.0.2.7:30000"),
        ("2001:db8::7", "http://[2001:db8::7]:30000", "http://[2001:db8::7]:30000"),
        ("127.0.0.1", "http://127.0.0.1:30000", None),
    ],
)
def test_another_host_reaches_a_server_where_it_listens_or_is_told_that_it_cannot(
    bound: str, url: str, seen: str | None
) -> None:
    host = Host("gpu1", address="10.1.2.3", ssh=SshOptions(config_file="/dev/null"))
    target = Target(host, cast(Any, None), "mtp")
    service = Service(target, cast(Any, None), {"url": url, "release": {"host": bound}}, {}, None)
    if seen is not None:
        assert service.seen_from("cpu2") == seen
        return
    with pytest.raises(UsageError, match=r"listens on 127\.0\.0\.1 only") as said:
        service.seen_from("cpu2")
    assert any("args.host=0.0.0.0" in command for command in said.value.next_commands)
