"""`python -m stepfleet.worker`: Celery's worker command for the fleet's app, all options included.

The same worker as `celery -A stepfleet.worker.app worker` starts, without what Celery's command
line loads for its other commands and plugins, Flower among them: it is up sooner, and smaller.
"""

from celery.bin.base import CLIContext
from celery.bin.worker import worker

from stepfleet.worker.app import worker_app

if __name__ == "__main__":
    context = CLIContext(app=worker_app(), no_color=False, workdir=None)
    worker.main(obj=context, prog_name="python -m stepfleet.worker", auto_envvar_prefix="CELERY")
