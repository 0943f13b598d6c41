"""Several hosts' logs as one stream: in order, in bounded memory, ended at once; and what a line's level is guessed to be."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mtpdeploy.actions import logs
from mtpdeploy.actions.logs import _Filters, _Line, _Printer
from mtpdeploy.actions.merging import Merge
from mtpdeploy.sglang.logs.level import LevelGuess

PLAIN = _Filters(json=False, events=False, pattern=None, since=None, level=None)


def in_threads(merge: Merge, said: dict[str, list[tuple[str, str, bool]]]) -> list[tuple[str, str]]:
    """What comes out when each source puts its lines in as fast as it can."""

    def source(name: str) -> None:
        for when, text, goes_on in said[name]:
            merge.put(name, when, text, goes_on=goes_on)
        merge.ended(name)

    for name in said:
        threading.Thread(target=source, args=(name,), daemon=True).start()
    out: list[tuple[str, str]] = []
    merge.run(lambda name, text: out.append((name, text)))
    return out


def test_lines_of_hosts_come_out_by_time_and_each_hosts_in_its_own_order() -> None:
    said = {
        "a": [(f"10:00:{n:02d}", f"a{n}", False) for n in range(0, 60, 2)],
        "b": [(f"10:00:{n:02d}", f"b{n}", False) for n in range(1, 60, 2)],
        "c": [],
    }
    out = in_threads(Merge(said, follow=False, most=3), said)
    assert [text for _, text in out] == [f"{'ab'[n % 2]}{n}" for n in range(60)]


def test_a_traceback_is_not_torn_by_another_hosts_lines() -> None:
    said = {
        "a": [("10:00:00", "Traceback", False), *(("10:00:00", f"  frame {n}", True) for n in range(20))],
        "b": [("10:00:00", f"b{n}", False) for n in range(20)],
    }
    names = [name for name, _ in in_threads(Merge(said, follow=False), said)]
    first = names.index("a")
    assert names[first : first + 21] == ["a"] * 21


def test_a_silent_host_holds_the_others_up_for_a_moment_only() -> None:
    merge = Merge(["a", "silent"], follow=True, hold_s=0.05, begin_s=0.1)
    out: list[str] = []
    thread = threading.Thread(target=merge.run, args=(lambda name, text: out.append(text),), daemon=True)
    thread.start()
    merge.put("a", "10:00:00", "heard")
    until = time.monotonic() + 5
    while not out and time.monotonic() < until:
        time.sleep(0.005)
    assert out == ["heard"]
    merge.ended("a")
    merge.ended("silent")
    thread.join(5)
    assert not thread.is_alive()


def test_a_host_far_ahead_waits_instead_of_piling_up() -> None:
    merge = Merge(["quick", "slow"], follow=False, most=10)
    put: list[int] = []

    def quick() -> None:
        for n in range(1000):
            merge.put("quick", "10", str(n))
            put.append(n)
        merge.ended("quick")

    threading.Thread(target=quick, daemon=True).start()
    out: list[str] = []
    runner = threading.Thread(target=merge.run, args=(lambda name, text: out.append(text),), daemon=True)
    runner.start()
    time.sleep(0.2)
    assert len(put) <= 10
    assert out == []
    merge.ended("slow")
    runner.join(10)
    assert out == [str(n) for n in range(1000)]


def test_a_reader_that_has_gone_ends_every_host() -> None:
    merge = Merge(["a", "b"], follow=True, hold_s=0.0, begin_s=0.0, most=2)
    ended = threading.Event()

    def source() -> None:
        try:
            while True:
                merge.put("a", "10", "line")
        except BrokenPipeError:
            ended.set()

    threading.Thread(target=source, daemon=True).start()

    def out(name: str, text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        merge.run(out)
    assert ended.wait(5)


def test_marks_are_padded_and_coloured_only_where_colour_is_wanted() -> None:
    assert logs._marks(["gpu1", "gpu10"], json=False, colour=False) == {"gpu1": "gpu1  | ", "gpu10": "gpu10 | "}
    coloured = logs._marks(["gpu1", "gpu10"], json=False, colour=True)
    assert coloured["gpu1"].startswith("\x1b[")
    assert coloured["gpu1"] != coloured["gpu10"].replace("gpu10", "gpu1 ")
    assert set(logs._marks(["gpu1"], json=True, colour=True).values()) == {""}


def printed(text: str, **said: Any) -> list[_Line]:
    lines: list[_Line] = []
    printer = _Printer("gpu1", lines.append, _Filters(**{**{n: getattr(PLAIN, n) for n in PLAIN.__slots__}, **said}))
    data = text.encode()
    for at in range(0, len(data), 7):  # as a stream cuts it: anywhere
        printer.data("launch", 1, data[at : at + 7])
    printer.flush()
    return lines


LOG = """\
# mtpdeploy launch 20260131T120000Z-abcdef boot 1 utc 2026-01-31T12:00:00.000Z
[2026-01-31 12:00:05] server_args=ServerArgs(x=1)
Loading: 10%\rLoading: 100%
[2026-01-31 12:00:07] W0131 Some UserWarning: be careful
[2026-01-31 12:00:09] Scheduler hit an exception: Traceback (most recent call last):
  File "x.py", line 1, in <module>
torch.OutOfMemoryError: CUDA out of memory.
[2026-01-31 12:00:11] INFO:     127.0.0.1 - "GET /health HTTP/1.1" 200 OK
"""


def test_a_line_without_a_time_has_that_of_the_line_before_it() -> None:
    lines = printed(LOG)
    assert [line.when[11:19] for line in lines] == [
        "12:00:00", "12:00:05", "12:00:05", "12:00:07", "12:00:09", "12:00:09", "12:00:09", "12:00:11",
    ]  # fmt: skip
    assert [line.goes_on for line in lines] == [False, False, True, False, False, True, True, False]
    assert lines[2].text == "Loading: 100%"


def test_a_guessed_level_lets_tracebacks_through_whole() -> None:
    errors = [line.text for line in printed(LOG, level="error")]
    assert errors == LOG.splitlines()[-4:-1]
    warnings = [line.text for line in printed(LOG, level="warning")]
    assert warnings == LOG.splitlines()[-5:-1]
    assert len(printed(LOG, level="info")) == 8


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("[2026-01-31 12:00:05 TP0] Decode batch, #running-req: 1", "info"),
        ("[2026-01-31 12:00:05] WARNING: flashinfer is not there", "warning"),
        ("INFO:     Uvicorn running on http://127.0.0.1:30000", "info"),
        ("ERROR:    [Errno 98] error while attempting to bind on address", "error"),
        ("[2026-01-31 12:00:05] Received sigquit from a child process. It usually means the child failed.", "error"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "error"),
        ("DEBUG:asyncio:Using selector", "debug"),
    ],
)
def test_the_level_of_a_single_line(line: str, level: str) -> None:
    assert LevelGuess().of(line) == level


def test_lines_since_a_moment_take_their_untimed_followers_with_them() -> None:
    since = logs._moment("2026-01-31T12:00:09")
    assert [line.text for line in printed(LOG, since=since)] == LOG.splitlines()[-4:]
