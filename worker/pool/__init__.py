"""The Celery worker pool that runs tasks on one asyncio event loop per process.

Select it with ``worker_pool = "stepfleet.worker.pool:Pool"`` and no ``-P``, or with
``CELERY_CUSTOM_WORKER_POOL=stepfleet.worker.pool:Pool`` and ``-P custom``.
"""

from stepfleet.worker.pool.asyncio_pool import Pool as Pool
from stepfleet.worker.pool.refusals import check_pool as check_pool
from stepfleet.worker.pool.refusals import refuse_greenlet_pools as refuse_greenlet_pools
