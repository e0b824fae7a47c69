"""Makes it happen: the Celery app, the step, models and tools.

Rooms, from top to bottom:

- `app`, `tasks`: the Celery app and its two tasks
- `runtime`: a worker process around its steps: connect, compose, background tasks, shutdown
- `agents`, `telemetry`: agents as a worker has them; logs, metrics, traces
- `step`, `ports`: the main path of a step, and what it needs from outside
- `models`: providers over HTTP
- `attempt`, `events`: what a step does between claim and commit; events, chunks, deliveries
- `leases`, `testing`: leases and their renewal; the model server for tests
- `engine`, `toolbox`: Celery's pool and transport; execution of tool calls
"""
