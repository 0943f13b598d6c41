"""Several hosts at once: every one gets its answer, and one that fails hides no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from mtpdeploy.errors import MtpError

if TYPE_CHECKING:  # the inventory brings Pydantic with it, and a connection may begin before
    from mtpdeploy.inventory.values import Host

LIMIT = 128  # hosts at a time; one costs two threads and about a megabyte


class Answer(Protocol):
    """What an action returns."""

    def as_json(self) -> dict[str, Any]: ...


T = TypeVar("T", bound=Answer)


@dataclass(frozen=True, slots=True)
class Outcomes(Generic[T]):
    """Answers by host, in the inventory's order."""

    by_host: Mapping[str, T | MtpError]

    @property
    def failed(self) -> dict[str, MtpError]:
        return {host: said for host, said in self.by_host.items() if isinstance(said, MtpError)}

    @property
    def exit_code(self) -> int:
        """The highest of all: a failure anywhere shows."""
        return max((getattr(said, "exit_code", 0) for said in self.by_host.values()), default=0)

    def as_json(self) -> dict[str, Any]:
        return {"hosts": {host: said.as_json() for host, said in self.by_host.items()}}


def on_hosts(hosts: Sequence[Host], work: Callable[[Host], T]) -> T | Outcomes[T]:
    """Runs `work` for each host. One host: its plain answer, or its error raised."""
    if len(hosts) == 1:
        return work(hosts[0])

    def attempt(host: Host) -> T | MtpError:
        try:
            return work(host)
        except MtpError as error:
            return error

    # Daemon threads and no executor: an executor waits for its threads, so that Ctrl-C would be heard when the last host ends.
    places = threading.Semaphore(LIMIT)
    said: dict[str, Future[T | MtpError]] = {host.name: Future() for host in hosts}

    def run(host: Host) -> None:
        with places:
            try:
                said[host.name].set_result(attempt(host))
            except BaseException as error:  # raised again where it is waited for
                said[host.name].set_exception(error)

    for host in hosts:
        threading.Thread(target=run, args=(host,), name=host.name, daemon=True).start()
    return Outcomes({name: answer.result() for name, answer in said.items()})
