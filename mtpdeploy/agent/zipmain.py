"""`__main__` of the agent's zip. Python compiles a zip's modules at every start (a fifth of a second for ours); so the first
start unpacks it beside itself, where compiled files are kept, and later ones begin there.

The folder has the zip's own name, which is its content's hash, and appears as a whole by a rename. Where it cannot be made
(a full or read-only disk), the zip itself is run. On a disk that is nearly full nothing is compiled there: Python does not notice
that a compiled file was cut short, and would fail at it ever after.
"""

import os
import sys


def unpacked(archive: str) -> str:
    """The folder with the zip's files, or the zip itself."""
    folder = archive + ".d"
    if not os.path.isdir(folder):
        import shutil
        import zipfile

        aside = f"{folder}.{os.getpid()}"
        try:
            os.mkdir(aside, 0o700)
            with zipfile.ZipFile(archive) as file:
                file.extractall(aside)
            os.rename(aside, folder)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
    return folder if os.path.isdir(folder) else archive


if __name__ == "__main__":
    disk = os.statvfs(sys.argv[0])
    sys.dont_write_bytecode = disk.f_bavail * disk.f_frsize < 16 * 1024 * 1024
    sys.path.insert(0, unpacked(os.path.abspath(sys.argv[0])))
    from mtpdeploy.agent.__main__ import main

    sys.exit(main(sys.argv[1:]))
