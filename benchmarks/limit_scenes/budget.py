"""A tenant's budget over several workers, one of which is killed: what is spent, and who knows it.

Runs end with stop reason `guard` where the budget is spent. The service's log, priced with the same
prices, is what was really paid: the ledger's sum lies below it by what it lists as ambiguous.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from agents import runner
from loads import LONGEST, Setup, fleet, lines
from processes import until

INPUT, OUTPUT = 15.0, 75.0
"""USD per million tokens: the budget is spent after so many calls that it takes half a minute."""
TENANT, STEPS = "acme", 5
MILLION = 1e6
SETTLED_SECONDS = 60.0


def measure(workers: int, usd: float, latency: str, folder: Path) -> dict[str, Any]:
    """Spend `usd`; kill a worker at half of it; return what each party has counted."""
    log, prices = folder / "calls.jsonl", folder / "prices.json"
    prices.write_text(json.dumps({"default": {"input": INPUT, "output": OUTPUT}}))
    variables = {
        "STEPFLEET_PRICING_CONFIG": str(prices),
        "STEPFLEET_LIMITS": json.dumps({f"tenant:{TENANT}": {"usd": usd}}),
    }
    runs = round(400 * usd)
    with fleet(Setup(workers, 1000, latency, log, variables=variables)) as on:
        on.warm()
        began, before = time.monotonic(), paid(log)
        batch = on.client.submit_batch(lines(runs, STEPS), agent=runner, tenant=TENANT)
        until(lambda: paid(log) - before >= usd / 2, within=LONGEST)
        os.kill(on.pids[0], signal.SIGKILL)
        end = until(lambda: batch.progress().done == runs, within=LONGEST)
        until(lambda: budget(on.client).reserved == 0, within=SETTLED_SECONDS)
        total = on.client.costs("tenant", tenant=TENANT).total
        stopped, use = batch.progress(), budget(on.client)
    return {
        "scene": "budget",
        "workers": workers,
        "runs": runs,
        "completed": stopped.completed,
        "stopped": stopped.stopped,
        "budget": usd,
        "spent": float(use.spent),
        "over": float(use.over),
        "server": paid(log) - before,
        "ledger": float(total.usd),
        "ambiguous": float(total.ambiguous_usd),
        "ambiguous_calls": total.ambiguous_calls,
        "calls": total.calls,
        "seconds": end - began,
    }


def budget(client: Any) -> Any:
    """Return the use of the tenant's budget."""
    [found] = [one for one in client.limits.use() if one.name == f"tenant:{TENANT}"]
    return found.budgets[0]


def paid(log: Path) -> float:
    """Return what all answered calls in the service's log cost, in USD."""
    whole = log.read_text(encoding="utf-8").rpartition("\n")[0]
    entries = map(json.loads, whole.splitlines())
    answered = [entry for entry in entries if entry["prompt_tokens"]]
    tokens = [(one["prompt_tokens"], one["completion_tokens"] or 0) for one in answered]
    return sum(given * INPUT + made * OUTPUT for given, made in tokens) / MILLION
