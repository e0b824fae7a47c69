"""redis-py's own clients of a Redis Cluster, for occasional reads and for pub/sub.

Runs use the store's connection.
"""

from typing import Any

from redis import cluster as plain
from redis.asyncio import Redis, cluster

from stepfleet.orchestrator.redis_client.sentinel import master_pool
from stepfleet.orchestrator.redis_client.urls import (
    ClusterUrl,
    is_cluster,
    is_sentinel,
    parse_cluster,
)


def client_of(url: str, **options: Any) -> Redis | cluster.RedisCluster:
    """Return an asynchronous client of what a usable URL names: a server, Sentinels or a cluster.

    Raises `ValueError` for an unusable URL.
    """
    if is_cluster(url):
        return cluster_client(url, **options)
    if is_sentinel(url):
        return Redis.from_pool(master_pool(url, **options))
    return Redis.from_url(url, **options)


def plain_cluster_client(url: str, **options: Any) -> plain.RedisCluster:
    """Return a synchronous client, connected. Raises `ValueError` for an unusable URL."""
    parsed = parse_cluster(url)
    node: Any = plain.ClusterNode  # redis-py gives it no types
    nodes = [node(host, port) for host, port in parsed.nodes]
    return plain.RedisCluster(startup_nodes=nodes, **_options(parsed), **options)


def cluster_client(url: str, **options: Any) -> cluster.RedisCluster:
    """Return an asynchronous client. Raises `ValueError` for an unusable URL."""
    parsed = parse_cluster(url)
    nodes = [cluster.ClusterNode(host, port) for host, port in parsed.nodes]
    return cluster.RedisCluster(startup_nodes=nodes, **_options(parsed), **options)


def _options(url: ClusterUrl) -> dict[str, Any]:
    tls = {"ssl": True, **url.tls} if url.tls is not None else {}
    return {
        "username": url.username,
        "password": url.password,
        "require_full_coverage": False,
        "protocol": 2,
        **tls,
    }
