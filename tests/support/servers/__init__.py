"""Real servers and proxies for tests: Redis, Cluster, Sentinel, brokers, models, receivers."""
