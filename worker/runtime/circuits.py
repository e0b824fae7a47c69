"""The circuits of services as one worker process sees them: it opens, probes and closes them.

A call that succeeds while all is well costs a look at two empty tables. Failures are counted here;
the fleet learns of an open circuit by the store, which every worker reads every few seconds.
"""

import asyncio
import logging
import random
from contextlib import suppress
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException, ModelError
from stepfleet.orchestrator.protocol.verdict import circuit_id
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.store.circuits import KNOWN_SECONDS, Circuit, Circuits

log = logging.getLogger(__name__)

PROBES = 3
"""So many steps probe at once."""
_ERRORS = (AgentException, RedisError, OSError)


@dataclass
class _Failures:
    """Failures of a service in a row. `runs` are two of those that met them."""

    count: int = 0
    runs: set[str] = field(default_factory=set)


class CircuitBreaker:
    """Opens the circuit of a service after `most` failures in a row.

    Answers with an error open it only if two runs met them: one request may be at fault itself.
    """

    def __init__(self, store: Circuits, most: int) -> None:
        self._store = store
        self._most = most
        self._failures: dict[str, _Failures] = {}
        self._open: dict[str, Circuit] = {}
        self._unwritten: set[str] = set()
        self._allowed: dict[str, int] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def watched(self) -> bool:
        """Whether any service has failed lately."""
        return bool(self._failures or self._open)

    def refusal(self, service: str) -> str:
        """Return why no call of `service` is made; empty where it is."""
        of = circuit_id(service)
        if of not in self._open:
            return ""
        if self._allowed.get(of, 0) > 0:  # nobody waits, so this call is the probe
            self._allowed[of] -= 1
            return ""
        return self._open[of].reason

    async def failed(self, service: str, run_id: str, error: ModelError) -> str:
        """Note a failed call; return the circuit of the service where that is open."""
        of, failures = circuit_id(service), self._failures.setdefault(service, _Failures())
        failures.count += 1
        if len(failures.runs) < 2:  # noqa: PLR2004 - two are enough
            failures.runs.add(run_id)
        is_away = error.code == ModelErrorCode.CONNECTION_ERROR and error.received is None
        proven = failures.count >= self._most and (is_away or len(failures.runs) > 1)
        if of not in self._open and not proven:
            return ""
        if of not in self._open:
            log.warning("%s is out: calls wait for it (%s)", service, error.message)
        self._open[of] = Circuit(name=service, reason=error.message)
        self._unwritten.add(of)
        await self._write(of)  # not those of others that fail at this moment: each writes its own
        return of

    async def answered(self, service: str) -> None:
        """Note an answered call: it closes the circuit."""
        self._failures.pop(service, None)
        of = circuit_id(service)
        if self._open.pop(of, None) is not None:
            self._unwritten.discard(of)
            log.warning("%s answers again", service)
            # Beside the step: its answer is not in the journal yet, and many runs may wait.
            closing = asyncio.create_task(self._close(of, service))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close(self, of: str, service: str) -> None:
        with suppress(*_ERRORS):
            await self._store.change("close", of, service)
            await self._store.wake(of)

    async def watch(self, interval: float) -> None:
        """Look every `interval` seconds until cancelled; errors are logged."""
        while True:
            await asyncio.sleep(interval * (0.8 + 0.4 * random.random()))  # noqa: S311 - spreads looks
            try:
                await self.look()
            except _ERRORS as error:
                log.debug("the circuits of models are not read: %s", error)
            except Exception:
                log.exception("the circuits of models are not read")

    async def look(self) -> None:
        """Read the circuits, probe those whose time it is, and wake who waits for a closed one."""
        await self._write(*self._unwritten)
        found = await self._store.read()
        for of, circuit in list(self._open.items()):
            # The store has lost it, or forgot it while this worker was away: nobody may wait on.
            if of not in found and of not in self._unwritten:
                await self._store.change("close", of, circuit.name)
                del self._open[of]
        for of, circuit in found.items():
            if circuit.is_open:
                self._open[of] = circuit
                if await self._store.probe(of, random.random()):  # noqa: S311 - spreads probes
                    await self._probe(of)
                continue
            if of not in self._unwritten and of in self._open:
                del self._open[of]
                self._failures.pop(circuit.name, None)
            await self._store.wake(of)
            await self._store.change("over", of, round(KNOWN_SECONDS * 1000))

    async def _probe(self, of: str) -> None:
        if await self._store.wake(of, PROBES, probes=True):
            self._allowed.pop(of, None)
            return
        self._allowed[of] = 1
        await self._store.change("idle", of)

    async def _write(self, *opened: str) -> None:
        """Let the fleet know what this worker has opened; a later look repeats what fails."""
        for of in opened:
            with suppress(*_ERRORS):
                if circuit := self._open.get(of):
                    await self._store.open(circuit.name, circuit.reason)
                self._unwritten.discard(of)
