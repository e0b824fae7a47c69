"""Facts of the machine and versions of what is measured. Measures nothing."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    *("stepfleet", "celery", "kombu", "redis", "hiredis"),
    *("httpx", "aiohttp", "uvloop", "pydantic", "orjson"),
)


def facts() -> dict[str, object]:
    """Return CPU count and model, load, Python, operating system, and package versions."""
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cpus(),
        "cpu": _cpu_model(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def summary(known: dict[str, object]) -> str:
    """Return the facts as two lines."""
    packages = known["packages"]
    assert isinstance(packages, dict)  # noqa: S101 - made above
    versions = " ".join(f"{name} {number}" for name, number in packages.items())
    machine = f"{known['cpus']} CPUs ({known['cpu']}), load {known['load_before']}"
    return f"{machine}, {known['python']}, {known['system']}\n{versions}"


def cpus() -> int:
    """Return how many CPUs there are."""
    return os.cpu_count() or 1


def _cpu_model() -> str:
    known = Path("/proc/cpuinfo")
    if known.exists():
        for line in known.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
