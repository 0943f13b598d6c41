"""Records of a load in progress: kept small in memory and then on disk, so that a long run's memory stays flat."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator

from mtpdeploy.bench.values import Record

IN_MEMORY = 16 * 1024 * 1024  # bytes, before the rest of them goes to a temporary file


class Spool:
    """Takes records one by one and gives them back in the order in which they came. What a run in progress shows is counted.

    The file has no name and is gone with the process; it holds nothing but this process's own records.
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115
        self.count = 0
        self.failed = 0
        self.output_tokens = 0

    def append(self, record: Record) -> None:
        self.count += 1
        self.failed += not record.ok
        self.output_tokens += record.output_tokens or 0
        pickle.dump(record, self._file, pickle.HIGHEST_PROTOCOL)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Record]:
        """Call it once the load has ended."""
        self._file.seek(0)
        for _ in range(self.count):
            record: Record = pickle.load(self._file)
            yield record

    def close(self) -> None:
        self._file.close()
