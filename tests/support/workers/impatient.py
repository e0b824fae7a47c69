"""Runs Celery for a fleet whose broker takes a message for lost after a second.

`python impatient.py celery ARGUMENT...`: what is not acknowledged by then is delivered again.
"""

import runpy
import sys

from stepfleet.worker.app import worker_app

QUICK = {"visibility_timeout": 1, "unacked_restore_interval": 1, "polling_interval": 0.1}

if __name__ == "__main__":
    app = worker_app()
    app.conf.broker_transport_options = {**app.conf.broker_transport_options, **QUICK}
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
