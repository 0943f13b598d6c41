"""Paramiko without Invoke.

paramiko.config imports Invoke for `Match exec` lines, and Invoke imports asyncio and unittest.mock: a third of the time that the
import takes, for a parser that is not used here (see sshconfig). Where Invoke is loaded already, as behind Fabric's door, nothing is
done.
"""

import sys

_absent = "invoke" not in sys.modules
if _absent:
    sys.modules["invoke"] = None  # type: ignore[assignment]
try:
    import paramiko
finally:
    if _absent:
        del sys.modules["invoke"]

__all__ = ["paramiko"]
