"""What a worker runs beside its steps: rescue, renewals, its heartbeat, housekeeping."""

import asyncio
import random
from collections.abc import Sequence

from celery import Celery

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.store.opening.opening import OpenStore
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.leases.renewal import RENEWALS_PER_LEASE
from stepfleet.worker.runtime.connect import worker_name
from stepfleet.worker.runtime.crash_points import Visit
from stepfleet.worker.runtime.heartbeat import Heartbeat
from stepfleet.worker.runtime.housekeeping import keep_batches, keep_records
from stepfleet.worker.runtime.rescuer import Rescuer
from stepfleet.worker.telemetry.instrumentation import Instrumentation


def background_tasks(
    opened: OpenStore,
    agents: Sequence[Agent],
    leases: Leases,
    app: Celery,
    crash: Visit,
    instrumentation: Instrumentation,
) -> list[asyncio.Task[None]]:
    """Start them; they run until they are cancelled."""
    settings = opened.settings
    pause = settings.lease / RENEWALS_PER_LEASE
    rescuer = Rescuer(
        opened.connection,
        opened.keys,
        opened.dispatch,
        grace=settings.grace,
        interval=settings.rescue_interval,
        long_queue=settings.slots,
        jitter=random.random,
    )
    rescuer.calm = rescuer.clock.tolerance = pause
    steps, calls = leases.steps, leases.calls
    heartbeat = Heartbeat(worker_name(), agents, held=lambda: len(steps), app=app, pause=pause)
    named = {
        "stepfleet-rescuer": rescuer.watch(crash, instrumentation.rescued),
        "stepfleet-heartbeat": heartbeat.watch(opened),
        "stepfleet-records": keep_records(opened),
        "stepfleet-batches": keep_batches(opened, random.random),
    }
    tasks = [asyncio.create_task(work, name=name) for name, work in named.items()]
    watches = instrumentation.background(lambda: len(steps), lambda: len(calls))
    return [*tasks, *(asyncio.create_task(one) for one in watches)]
