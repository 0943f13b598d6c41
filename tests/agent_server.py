"""A small real HTTP server with SGLang's manners, for tests of what surrounds it: loads with its port closed, has a child
with a scheduler's title, says the ready line, drains on SIGTERM and then kills itself, as SGLang does.

Environment: AGENT_SERVER_LOAD_S, AGENT_SERVER_DRAIN_S, AGENT_SERVER_EXIT (exit status after the load), AGENT_SERVER_IGNORE_TERM,
AGENT_SERVER_ORPHAN (leave a child that survives its parent), AGENT_SERVER_EXIT_AFTER_S (crash that long after ready),
AGENT_SERVER_UNREADY (a path: while it is there, /ready answers 503).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHILD = """
import ctypes, os, signal, sys, time
if len(sys.argv) < 2: ctypes.CDLL(None).prctl(1, 9)
else: signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(1000)
"""


def say(text: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", flush=True)


def main() -> None:
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    env = os.environ
    draining = threading.Event()

    def terminate(number: int, frame: object) -> None:
        if env.get("AGENT_SERVER_IGNORE_TERM"):
            return
        if draining.is_set() or not ready.is_set():
            os._exit(143)
        draining.set()

    ready = threading.Event()
    signal.signal(signal.SIGTERM, terminate)
    say(f"server_args=ServerArgs(model_path={options.get('--model-path')!r})")
    child = subprocess.Popen(["sglang::scheduler", "-c", CHILD], executable=sys.executable)
    if env.get("AGENT_SERVER_ORPHAN"):
        subprocess.Popen(
            ["sglang::scheduler_TP1", "-c", CHILD, "stay"], executable=sys.executable, start_new_session=True
        )
    steps = 10
    for step in range(steps):
        time.sleep(float(env.get("AGENT_SERVER_LOAD_S", "0.3")) / steps)
        say(f"Loading safetensors checkpoint shards: {step * 10}% Completed")
    if status := env.get("AGENT_SERVER_EXIT"):
        child.kill()
        say("Scheduler hit an exception: Traceback (most recent call last):")
        sys.exit(int(status))

    class Handler(BaseHTTPRequestHandler):
        def answer(self, value: object, status: int = 200) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/ready":
                unready = os.path.exists(env.get("AGENT_SERVER_UNREADY") or "/nowhere")
                self.answer({}, 503 if draining.is_set() or unready else 200)
            elif self.path == "/v1/loads":
                self.answer({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})
            else:
                self.answer({}, 404)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            key = env.get("MTPDEPLOY_API_KEY")
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                self.answer({"error": "Unauthorized"}, 401)
            elif self.path == "/generate":
                self.answer({"text": " quick", "meta_info": {"completion_tokens": 4}})
            else:
                self.answer({}, 404)

        def log_message(self, *words: object) -> None:
            return

    server = ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ready.set()
    say("The server is fired up and ready to roll!")
    began = time.monotonic()
    limit = float(env.get("AGENT_SERVER_EXIT_AFTER_S", "inf"))
    while not draining.wait(0.05):
        if time.monotonic() - began > limit:
            os._exit(1)
    say("Gracefully exiting... Remaining number of requests 1. Remaining requests remaining_rids=[].")
    time.sleep(float(env.get("AGENT_SERVER_DRAIN_S", "0.1")))
    child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
