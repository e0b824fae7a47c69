"""The Celery worker pool that runs tasks on one asyncio event loop per process.

Select it with ``worker_pool = "stepfleet.worker.engine.pool:Pool"`` and no ``-P``, or with
``CELERY_CUSTOM_WORKER_POOL=stepfleet.worker.engine.pool:Pool`` and ``-P custom``.
"""

from stepfleet.worker.engine.pool.asyncio_pool import Pool as Pool
from stepfleet.worker.engine.pool.asyncio_pool import check_pool as check_pool
from stepfleet.worker.engine.pool.asyncio_pool import (
    refuse_greenlet_pools as refuse_greenlet_pools,
)
