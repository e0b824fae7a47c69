"""`python -m stepfleet.worker`: Celery's worker command for the fleet's app, all options included.

The same worker as `celery -A stepfleet.worker.app worker` starts, without what Celery's command
line loads for its other commands and plugins, Flower among them: it is up sooner, and smaller.
Where settings or agents are wrong, it ends with exit code 2, as commands do: restarts do not help.
"""

import gc
import sys


def main() -> None:
    """Load the app, and run Celery's command on it; ends the process."""
    gc.disable()  # a seventh of all imports, whose objects stay
    from celery.bin.base import CLIContext  # noqa: PLC0415 - only now is it quick
    from celery.bin.worker import worker  # noqa: PLC0415 - as above

    from stepfleet.orchestrator.errors import ConfigurationError  # noqa: PLC0415 - as above
    from stepfleet.worker.app import worker_app  # noqa: PLC0415 - as above

    try:
        context = CLIContext(app=worker_app(), no_color=False, workdir=None)
    except ConfigurationError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2)
    gc.collect()
    gc.freeze()  # later collections have less to look at
    gc.enable()
    worker.main(obj=context, prog_name="python -m stepfleet.worker", auto_envvar_prefix="CELERY")


if __name__ == "__main__":
    main()
