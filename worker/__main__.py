"""`python -m stepfleet.worker`: Celery's worker command for the fleet's app, all options included.

The same worker as `celery -A stepfleet.worker.app worker` starts, without what Celery's command
line loads for its other commands and plugins, Flower among them: it is up sooner, and smaller.
Where settings or agents are wrong, it ends with exit code 2, as commands do: restarts do not help.
"""

import sys

from celery.bin.base import CLIContext
from celery.bin.worker import worker

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.worker.app import worker_app

if __name__ == "__main__":
    try:
        context = CLIContext(app=worker_app(), no_color=False, workdir=None)
    except ConfigurationError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2)
    worker.main(obj=context, prog_name="python -m stepfleet.worker", auto_envvar_prefix="CELERY")
