"""A simulated SGLang: the flags, log lines, HTTP interface and memory arithmetic of the version it plays, and no engine.

For rehearsals, demos and tests. Whatever it produces is labelled as simulated and proves nothing about SGLang.
"""

from mtpdeploy.sim.shim import install

__all__ = ["install"]
