"""Settings of a fleet: arguments, then environment, then `stepfleet.toml`, then defaults."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    HttpUrl,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.limits.limit import Limit, limits_from
from stepfleet.orchestrator.records.text.validation import explain_invalid, meant
from stepfleet.orchestrator.redis_client.urls import (
    is_cluster,
    is_sentinel,
    parse_sentinel,
    usable_broker,
    usable_url,
)
from stepfleet.orchestrator.settings.signing import SigningKeys, signing_keys

CONFIG_FILE = "stepfleet.toml"
AGENTS = "agents"
"""The table of the file that describes agents."""
QUEUE = "stepfleet"
TASK = "stepfleet.step"
TOOL_TASK = "stepfleet.tool"
DAY = 24 * 3600
LONGEST_SECONDS = 10 * 366 * DAY
_PREFIX = re.compile(r"(?:[A-Za-z0-9._:/-]*[._:/-])?")
_USERS = re.compile(r"\*|\*@[^*@\s]+|[^*\s](?:[^*]*[^*\s])?")
"""A user's name, those of a domain, or all."""
_DATABASE = re.compile(r"(?<=[^/])/\d+(?=\?|$)")
_NO_BROKER = (
    "a Redis Cluster cannot carry Celery's messages: set STEPFLEET_BROKER_URL to one Redis "
    "without a cluster, or to RabbitMQ"
)


class Settings(BaseSettings):
    """Every setting; in the environment with the prefix `STEPFLEET_`, times in seconds.

    `redis_url` is the store; `broker_url` defaults to it. `prefix` begins all keys and channels,
    so that several fleets share one Redis database; in the broker, `broker_prefix` replaces it
    where others use the same queues with a `global_keyprefix`. `enqueue` is `script` (the next
    task is pushed by the commit itself; store and broker must be one Redis), `publish`
    (sent after the commit) or `auto`. `transport` is how workers read a Redis broker: in
    batches, or with kombu's own transport. `lease` bounds how long a dead worker keeps a run,
    `blocked_limit` bounds the same for one whose event loop is blocked;
    `grace` is the wait of a ready run before it is checked again; `drain` is the time that a
    stopping worker gives its steps. `hold_after` runs of a batch that end in a row with the same
    permanent error hold it (0: never). `circuit_after` failures of a model's service in a row open
    its circuit (0: never): steps then wait for it, `outage_patience` at most. Submitters wait while
    `max_active_runs` have not ended. `retention` is how
    long ended runs are kept; `ledger_days` how long the sums of their costs are. With an
    `archive_url` (`s3://bucket/folder`, `file:///folder`) they are kept until they have been moved
    there, `archive_after` seconds after their end.
    `message_bytes` is the largest task message that workers take from a Redis broker; hints are
    small, tasks of your own may not be. `cache_bytes` bounds the
    answers that agents with a cache policy keep. `limits` are shared by the whole fleet, by name;
    they hold where nobody has set others in Redis.
    Workers post all events to `webhooks`, signed with `webhook_secret`, and publish them on
    the channels of the Redis at `events_url`; no such setting, no cost. With `signing_key`
    (several keys are separated by commas; the first signs) task messages are signed, and workers
    set unsigned ones aside. `log_format` of workers is text, or lines of JSON with the ids of run,
    step, agent and task. `telemetry` makes workers send spans to an OpenTelemetry
    collector: `auto` does where `OTEL_EXPORTER_OTLP_ENDPOINT` is set. Workers serve metrics at
    `metrics_host` and `metrics_port` (0: not at all; None: 9464, where prometheus_client is
    installed), each process at the next port that is free. Without `flower_content` Flower shows
    no texts of models and tools to anybody. `release` is a name that workers report beside their
    version, such as the tag of an image: a line of free text.
    `flower_operators`, `flower_approvers` and `flower_viewers` are those who may do all, decide, or
    only look in Flower: names, `*@domain`, or `*`; without all three everybody who logs in may do
    all. `user` names who acts in the audit, in place of the system's user.
    """

    model_config = SettingsConfigDict(
        env_prefix="STEPFLEET_",
        toml_file=CONFIG_FILE,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,  # it may hold a password
    )

    redis_url: SecretStr | None = None
    broker_url: SecretStr | None = None
    queue: str = Field(default=QUEUE, min_length=1)
    prefix: str = Field(default="", max_length=100)
    broker_prefix: str | None = Field(default=None, max_length=100)
    enqueue: Literal["auto", "script", "publish"] = "auto"
    transport: Literal["batch", "stock"] = "batch"
    log_format: Literal["text", "json"] = "text"
    telemetry: Literal["auto", "on", "off"] = "auto"
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    shards: int = Field(default=16, ge=1, le=4096)
    slots: int = Field(default=1000, ge=1, le=100_000)
    lease: float = Field(default=30.0, ge=0.5, le=DAY)
    grace: float = Field(default=5.0, gt=0, le=DAY)
    blocked_limit: float = Field(default=300.0, ge=0, le=DAY)
    poison_limit: int = Field(default=3, ge=1)
    hold_after: int = Field(default=10, ge=0)
    circuit_after: int = Field(default=5, ge=0)
    max_active_runs: int | None = Field(default=None, ge=1)
    outage_patience: float = Field(default=DAY, ge=0, le=LONGEST_SECONDS)
    rescue_interval: float = Field(default=2.0, gt=0, le=DAY)
    drain: float = Field(default=20.0, ge=0, le=7 * DAY)
    patience: float = Field(default=20.0, ge=0, le=LONGEST_SECONDS)
    retention: int = Field(default=7 * DAY, ge=60, le=LONGEST_SECONDS)
    archive_url: SecretStr | None = None
    archive_after: float = Field(default=DAY, ge=0, le=LONGEST_SECONDS)
    ledger_days: int = Field(default=90, ge=1, le=3650)
    tool_threads: int = Field(default=32, ge=1)
    connections: int = Field(default=4, ge=1)
    message_bytes: int = Field(default=4 * 1024 * 1024, ge=64 * 1024, le=512 * 1024 * 1024)
    cache_bytes: int = Field(default=256 * 1024 * 1024, ge=0, le=2**53)
    webhooks: tuple[HttpUrl, ...] = ()
    webhook_secret: SecretStr | None = None
    events_url: SecretStr | None = None
    signing_key: SecretStr | None = None
    limits: dict[str, Limit] = Field(default_factory=dict)
    flower_content: bool = True
    release: str = Field(default="", max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")
    flower_operators: tuple[str, ...] = ()
    flower_approvers: tuple[str, ...] = ()
    flower_viewers: tuple[str, ...] = ()
    user: str | None = Field(default=None, min_length=1, max_length=100)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read arguments first, then the environment, then the file."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @field_validator("redis_url", "broker_url", "events_url")
    @classmethod
    def _is_usable(cls, url: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        address = url.get_secret_value() if url is not None else ""
        if url is None or not (address or info.field_name == "redis_url"):
            return url
        if info.field_name != "broker_url":
            return SecretStr(usable_url(address))
        if is_cluster(address):
            raise ValueError(_NO_BROKER)
        return SecretStr(usable_broker(address))

    @field_validator("prefix")
    @classmethod
    def _is_apart(cls, given: str) -> str:
        if _PREFIX.fullmatch(given):
            return given
        raise ValueError(
            f"{given!r} is not a valid prefix: write letters, digits and . _ : / - with a sign at "
            "the end, such as 'dev:'"
        )

    @field_validator("flower_operators", "flower_approvers", "flower_viewers")
    @classmethod
    def _are_users(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for one in given:
            if not _USERS.fullmatch(one):
                raise ValueError(f"{one!r}: write a user's name, *@domain, or * for everybody")
        return given

    @field_validator("limits", mode="before")
    @classmethod
    def _are_limits(cls, given: Any) -> dict[str, Limit]:
        try:
            return limits_from(given)
        except ConfigurationError as error:
            raise ValueError(error.message) from None

    @field_validator("signing_key")
    @classmethod
    def _is_long(cls, given: SecretStr | None) -> SecretStr | None:
        signing_keys(given.get_secret_value() if given else None)
        return given

    @property
    def signing(self) -> SigningKeys | None:
        """The keys that sign task messages; None where they are not signed."""
        return signing_keys(self.signing_key.get_secret_value()) if self.signing_key else None

    def secrets(self) -> Iterator[tuple[str, str]]:
        """Yield the secret settings that are set: the name of their variable, and the value."""
        for name, value in self:
            if isinstance(value, SecretStr):
                yield f"STEPFLEET_{name.upper()}", value.get_secret_value()
            elif name == "webhooks":
                yield f"STEPFLEET_{name.upper()}", " ".join(map(str, value))

    def environment(self) -> dict[str, str]:
        """Return the variables by which another process gets what is set here."""
        plain = {
            name: getattr(self, name)
            for name in self.model_fields_set
            if getattr(self, name) is not None
        }
        texts = {
            name: _as_text(value)
            for name, value in plain.items()
            if not isinstance(value, SecretStr)
        }
        secret = {
            name: value.get_secret_value()
            for name, value in plain.items()
            if isinstance(value, SecretStr)
        }
        return {f"STEPFLEET_{name.upper()}": text for name, text in {**texts, **secret}.items()}

    @property
    def lifetime(self) -> int:
        """Seconds after which Redis itself removes ended runs; 0 where an archive gets them."""
        return 0 if self.archive_url else self.retention

    @property
    def store(self) -> str:
        """The store's URL. Raises `ConfigurationError` when none is set."""
        if self.redis_url is None:
            msg = "no Redis is named: set STEPFLEET_REDIS_URL, or pass redis_url=..."
            raise ConfigurationError(msg)
        return self.redis_url.get_secret_value()

    @property
    def broker(self) -> str:
        """The broker's URL: the store's own unless another one is set.

        Raises `ConfigurationError` where that is a cluster.
        """
        if self.broker_url is None and is_cluster(self.store):
            raise ConfigurationError(_NO_BROKER)
        return self.broker_url.get_secret_value() if self.broker_url else self.store

    @property
    def queue_prefix(self) -> str:
        """What the broker's keys begin with: Celery's `global_keyprefix`."""
        return self.prefix if self.broker_prefix is None else self.broker_prefix

    @property
    def has_own_channels(self) -> bool:
        """Whether events are published on the store's own server, whatever the database."""
        url = self.events_url.get_secret_value() if self.events_url else ""
        return _DATABASE.sub("", _address(url)) == _DATABASE.sub("", _address(self.store))

    @property
    def enqueues_in_script(self) -> bool:
        """Whether a commit itself pushes the next task. Raises `ConfigurationError`."""
        same = _same_redis(self.store, self.broker)
        if self.enqueue == "script" and not same:
            msg = "enqueue='script' needs store and broker in the same Redis database"
            raise ConfigurationError(msg)
        return same and self.enqueue != "publish"


def load_settings(**given: Any) -> Settings:
    """Return the settings. Raises `ConfigurationError` that names the field and the fix."""
    _check_file(Path(CONFIG_FILE))
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ConfigurationError(f"settings: {explain_invalid(error)}") from None
    except SettingsError as error:  # a variable with invalid JSON; others are read as they are
        name = re.search(r'field "(\w+)"', str(error))
        variable = f"STEPFLEET_{name[1].upper()}" if name else "a variable STEPFLEET_..."
        raise ConfigurationError(f"{variable} is not valid JSON: correct it, or unset it") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{Path(CONFIG_FILE).name}: {error}") from None


def _as_text(value: Any) -> str:
    """Return a setting as its variable holds it."""
    if isinstance(value, tuple):
        return json.dumps([str(one) for one in value])
    if isinstance(value, dict):
        return json.dumps({name: one.model_dump(exclude_unset=True) for name, one in value.items()})
    return str(value)


def _check_file(path: Path) -> None:
    """Raise `ConfigurationError` for a key that is neither a setting nor the agents' table."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except (OSError, ValueError):
        return  # pydantic reads it again and reports the problem
    known = {*Settings.model_fields, AGENTS}
    if unknown := sorted(set(table) - known):
        msg = f"{path.name}: {unknown[0]!r} is not a setting{meant(unknown[0], known)}"
        raise ConfigurationError(msg)


def _same_redis(store: str, broker: str) -> bool:
    return _address(store) == _address(broker)


def _address(url: str) -> str:
    """Return the address of `url` without the name of its transport."""
    for scheme, plain in (
        ("rediss-batch://", "rediss://"),
        ("redis-batch://", "redis://"),
        ("redis-batch+socket://", "unix://"),
        ("redis+socket://", "unix://"),
    ):
        if url.startswith(scheme):
            url = plain + url.removeprefix(scheme)
    if is_sentinel(url):
        parsed = parse_sentinel(url)
        return f"sentinel {sorted(parsed.sentinels)} {parsed.service} {parsed.db}"
    base, _, query = url.partition("?")
    return f"{base.rstrip('/').removesuffix('/0')}?{query}"
