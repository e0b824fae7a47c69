"""No agents: what a worker loads beside them so that it waits for a cache that is there.

By itself it gives the cache up soon and makes the call, which on a busy machine is a call too many
for tests that count them.
"""

from stepfleet.worker.agents import response_cache

response_cache.READ_SECONDS = response_cache.KEEP_SECONDS = 60.0
