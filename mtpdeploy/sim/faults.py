"""The ways in which the simulator can be told to fail, each as SGLang documents or shows it."""

from __future__ import annotations

from collections.abc import Mapping

FAULTS: Mapping[str, str] = {
    "oom-load": "CUDA out of memory while the weights load",
    "kv-pool-too-small": "no memory is left for the KV cache",
    "state-slots": "the state cache is too small for one request",
    "graph-capture": "CUDA out of memory while graphs are captured",
    "port-taken": "the HTTP port is found taken after the load",
    "hang": "the load stops without a word",
    "slow-load": "the load takes ten times as long",
    "hang-serving": "requests are accepted and nothing is generated any more, from the fifth request on",
    "scheduler-killed": "the scheduler is killed from outside two simulated seconds after the start",
    "crash-loop": "an exception in the scheduler at every start",
    "draft-dead": "the draft proposes and nothing is ever accepted",
}
