"""Makes it happen: the Celery app, the step, models and tools.

Rooms, from top to bottom:

- `app`, `tasks`: the Celery app, or a user's own, and the two tasks
- `runtime`: a worker process around its steps: connect, compose, background tasks, shutdown
- `agents`, `telemetry`: agents as a worker has them; logs, metrics, traces
- `step`, `ports`: the main path of a step, and what it needs from outside
- `models`: providers over HTTP
- `attempt`, `events`: what a step does between claim and commit; events, chunks, deliveries
- `leases`, `testing`: leases and their renewal; the model server for tests
- `engine`, `toolbox`: Celery's pool and transport; execution of tool calls
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["install"]


def install(
    app: "Celery", agents: "str | list[str] | tuple[str, ...] | None" = None, **settings: Any
) -> None:
    """Let the workers of a user's own Celery app do steps, besides the app's tasks.

    A worker does if it reads their queue: `celery -A proj worker -Q celery,stepfleet`. `agents`
    names modules or files, as `--agents` does; they are imported when such a worker starts.
    `settings` are those of the fleet, such as `prefix` or `queue`, and replace the app's
    `stepfleet_...`; the broker is the app's. Imports nothing and reads no configuration: call it
    where the app is made. Clients of the fleet are `Fleet(app=app)`.
    """
    from celery import signals  # noqa: PLC0415 - this package imports nothing by itself

    app = getattr(app, "_get_current_object", lambda: app)()
    given = {"agents": agents, **settings}
    app.conf.update({f"stepfleet_{name}": one for name, one in given.items() if one is not None})

    def begin(sender: Any, **_: Any) -> None:
        if sender.app is app:
            from stepfleet.worker.app import serve_on  # noqa: PLC0415 - clients have no worker

            serve_on(app, sender)

    def look(instance: Any, **_: Any) -> None:
        if instance.app is app:
            from stepfleet.worker.app import check_broker  # noqa: PLC0415 - as above

            check_broker(app)

    uid = f"stepfleet-install-{id(app)}"
    # Celery itself reads the broker's address between these two, and quotes what it cannot read.
    signals.celeryd_init.connect(look, weak=False, dispatch_uid=uid)
    signals.worker_init.connect(begin, weak=False, dispatch_uid=uid)
