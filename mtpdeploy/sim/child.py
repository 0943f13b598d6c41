"""A child of the simulated server: it holds a title, dies with its parent, and does nothing else.

SGLang's scheduler and detokenizer are such processes; whoever stops or proves a launch has to reckon with them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import setproctitle

_PR_SET_PDEATHSIG = 1


def main(title: str, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    setproctitle.setproctitle(title)
    print("up", flush=True)
    sys.stdin.buffer.read()  # ends with the parent


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
