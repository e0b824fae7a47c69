"""What the ledger has of names whose budgets are new, or whose numbers in Redis are lost."""

from collections.abc import Coroutine, Iterable
from typing import Any

from stepfleet.orchestrator.limits.budgets import Spending
from stepfleet.orchestrator.records.ledger import CallState, LedgerRow
from stepfleet.orchestrator.store.admission import Operation, basing
from stepfleet.orchestrator.store.ledger import EPOCH, Ledger


class Baselines:
    """Reads the ledger once for all names that are wanted together."""

    def __init__(self, ledger: Ledger, days: int) -> None:
        self._ledger = ledger
        self._days = days
        self._wanted: set[str] = set()

    def wanted(self, names: Iterable[str]) -> Coroutine[Any, Any, list[Operation]] | None:
        """Return what reads the ledger for these; None where it is being read: they ask again."""
        is_reading = bool(self._wanted)
        self._wanted.update(names)
        return None if is_reading else self._read()

    async def _read(self) -> list[Operation]:
        """Return the operations that bring the sums. Raises `StoreError`."""
        try:
            today = await self._ledger.today()
            found: dict[str, tuple[Spending, Spending]] = {}
            names = frozenset(self._wanted)
            async for of, row in self._ledger.rows_of(names, self._days):
                spent = _spent(row)
                for name in of:
                    whole, of_day = found.get(name, (Spending(), Spending()))
                    found[name] = (whole + spent, of_day + spent if row.day == today else of_day)
        finally:
            self._wanted.clear()
        nothing = (Spending(), Spending())
        number = (today - EPOCH).days
        return [basing(name, *found.get(name, nothing), number) for name in sorted(names)]


def _spent(row: LedgerRow) -> Spending:
    """Return what a row has spent; answers from the response cache are free."""
    sums = row.sums
    if row.state == CallState.CACHED:
        return Spending()
    return Spending(sums.cost, sums.input_tokens + sums.output_tokens, sums.calls)
