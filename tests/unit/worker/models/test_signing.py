"""Calls of Bedrock on the wire: their addresses, keys and signatures, checked by botocore."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from stepfleet.orchestrator import AgentConfig, Message, ModelRequest, ModelSettings
from stepfleet.orchestrator.cli.model_check import check_calls
from stepfleet.orchestrator.errors import ConfigurationError, ModelError
from stepfleet.orchestrator.models.endpoint import ModelSetupError, endpoint_of
from stepfleet.orchestrator.models.services import SERVICES
from stepfleet.orchestrator.records.text.redaction import redact_error
from stepfleet.worker.models import Models
from stepfleet.worker.testing.server import listen

ARN = "arn:aws:bedrock:eu-west-1:123456789012:inference-profile/eu.anthropic.claude-x:0"
ANSWER = b'{"output":{"message":{"content":[{"text":"Hi."}]}},"stopReason":"end_turn"}'
Sent = tuple[str, dict[str, str], bytes]


@pytest.fixture(autouse=True)
def nobodys_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture
async def wire() -> AsyncIterator[tuple[str, list[Sent]]]:
    """The address of a server, and the requests that it got: raw path, headers, body."""
    sent: list[Sent] = []

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        sent.append((request.raw_path, headers, await request.read()))
        return web.Response(body=ANSWER, content_type="application/json")

    listener = await listen(serve, "127.0.0.1", None)
    yield f"http://127.0.0.1:{listener.port}", sent
    await listener.close()


@pytest.fixture
async def call(wire: tuple[str, list[Sent]]) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    made: list[Models] = []

    async def answered(text: str = "hi", **environment: str) -> str:
        if not made:
            known = {"AWS_ENDPOINT_URL_BEDROCK_RUNTIME": wire[0], "AWS_REGION": "eu-west-1"}
            made.append(Models(environment={**known, **environment}))
        request = ModelRequest(model=f"bedrock:{ARN}", messages=(Message.user(text),))
        return (await made[0].generate(request)).content

    yield answered
    for models in made:
        await models.aclose()


@pytest.mark.parametrize("token", [None, "a-session"])
@pytest.mark.parametrize("text", ["hi é", "x" * 300_000])
async def test_the_signature_is_of_what_is_on_the_wire(
    token: str | None,
    text: str,
    wire: tuple[str, list[Sent]],
    call: Callable[..., Awaitable[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-this-test")
    if token:
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    assert await call(text) == "Hi."
    check_signature(wire[0], wire[1][0], token)


async def test_the_test_call_before_a_submission_is_signed_too(
    wire: tuple[str, list[Sent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-this-test")
    environment = {"AWS_ENDPOINT_URL": wire[0], "AWS_REGION": "eu-west-1"}
    config = AgentConfig(name="a", model=f"bedrock:{ARN}")
    await check_calls([config], environment, pytest.fail)
    check_signature(wire[0], wire[1][0], None)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigurationError, match="no AWS credentials"):
        await check_calls([config], environment, pytest.fail)


def check_signature(root: str, sent: Sent, token: str | None) -> None:
    """Assert that botocore signs what was received as it was signed."""
    path, lowered, body = sent
    assert path == f"/model/{ARN.replace(':', '%3A').replace('/', '%2F')}/converse"
    assert lowered.get("x-amz-security-token") == token
    scheme, fields = lowered["authorization"].split(" ", 1)
    parts = dict(field.split("=", 1) for field in fields.split(", "))
    assert scheme == "AWS4-HMAC-SHA256"
    assert parts["Credential"].split("/")[2:] == ["eu-west-1", "bedrock", "aws4_request"]
    kept = {name: lowered[name] for name in parts["SignedHeaders"].split(";") if name != "host"}
    request = AWSRequest("POST", root + path, headers=kept, data=body)
    request.context["timestamp"] = lowered["x-amz-date"]
    signer = SigV4Auth(
        Credentials("AKIDEXAMPLE", "a-secret-of-this-test", token), "bedrock", "eu-west-1"
    )
    canonical = signer.canonical_request(request)
    assert (
        signer.signature(signer.string_to_sign(request, canonical), request) == parts["Signature"]
    )


async def test_a_key_of_bedrock_needs_no_signature_and_no_botocore(
    wire: tuple[str, list[Sent]],
    call: Callable[..., Awaitable[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert await call(AWS_BEARER_TOKEN_BEDROCK="a-key") == "Hi."
    assert wire[1][0][1]["authorization"] == "Bearer a-key"


async def test_without_botocore_the_extra_is_named(
    call: Callable[..., Awaitable[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModelSetupError, match=r"pip install 'stepfleet\[bedrock\]'"):
        await call()


async def test_without_credentials_the_variables_are_named(
    wire: tuple[str, list[Sent]], call: Callable[..., Awaitable[str]]
) -> None:
    with pytest.raises(ModelSetupError, match="AWS_BEARER_TOKEN_BEDROCK, or AWS_ACCESS_KEY_ID"):
        await call()
    assert wire[1] == []


@pytest.mark.parametrize("seconds", [3600, 700, 60])
async def test_credentials_are_refreshed_once_for_all_calls_that_wait(
    seconds: int,
    call: Callable[..., Awaitable[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A program of AWS's chain gives credentials; it runs once at a time and off the loop."""
    program = tmp_path / "give.py"
    program.write_text(
        "import datetime, json, pathlib\n"
        f"with pathlib.Path({str(tmp_path / 'runs')!r}).open('a') as runs: runs.write('x')\n"
        f"end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds={seconds})\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': 'AKID', 'SecretAccessKey': 's' * 20,"
        " 'SessionToken': 't', 'Expiration': end.isoformat()}))\n"
    )
    (tmp_path / "config").write_text(
        f"[profile mine]\ncredential_process = {sys.executable} {program}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert set(await asyncio.gather(*(call() for _ in range(20)))) == {"Hi."}
    runs = len((tmp_path / "runs").read_text())
    assert runs <= (1 if seconds == 3600 else 3)
    assert await call() == "Hi."
    if seconds == 3600:
        assert len((tmp_path / "runs").read_text()) == runs


@pytest.mark.parametrize(
    ("profile", "failure", "retryable"),
    [
        ("credential_process = false", "could not load AWS credentials", True),
        (
            "role_arn = arn:aws:iam::1:role/x\nsource_profile = none",
            "invalid AWS configuration",
            False,
        ),
    ],
)
async def test_a_source_of_credentials_that_fails_is_tried_again_if_it_may_pass(
    profile: str,
    failure: str,
    retryable: bool,
    call: Callable[..., Awaitable[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "config").write_text(f"[profile mine]\n{profile}\n")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    with pytest.raises(ModelError, match=failure) as raised:
        await call()
    assert raised.value.retryable is retryable


def test_keys_go_only_where_they_belong() -> None:
    environment = {"AWS_REGION": "eu-west-1", "AWS_BEARER_TOKEN_BEDROCK": "k"}
    service = SERVICES["bedrock"]

    def found(base: str, key: str = "k") -> tuple[str | None, str]:
        settings = ModelSettings(base_url=base or None)
        endpoint = endpoint_of(settings, {**environment, "AWS_BEARER_TOKEN_BEDROCK": key}, service)
        return endpoint.key, endpoint.region

    vpc = "https://vpce-1.bedrock-runtime.eu-west-1.vpce.amazonaws.com"
    for own in ("", vpc, "https://bedrock-runtime.us-gov-west-1.amazonaws.com"):
        assert found(own) == ("k", "")
        assert found(own, "") == (None, "eu-west-1")
    for other in ("https://x.example", "https://bedrock-runtime.eu-west-1.amazonaws.com.x.example"):
        assert found(other) == (None, "")
        assert found(other, "") == (None, "")


@pytest.mark.parametrize(
    ("region", "host"),
    [
        ("us-gov-west-1", "bedrock-runtime.us-gov-west-1.amazonaws.com"),
        ("cn-north-1", "bedrock-runtime.cn-north-1.amazonaws.com.cn"),
        ("eusc-de-east-1", "bedrock-runtime.eusc-de-east-1.amazonaws.eu"),
        ("ap-southeast-2", "bedrock-runtime.ap-southeast-2.amazonaws.com"),
    ],
)
def test_the_address_follows_the_region(region: str, host: str) -> None:
    environment = {"AWS_DEFAULT_REGION": region, "AWS_BEARER_TOKEN_BEDROCK": "k"}
    endpoint = endpoint_of(ModelSettings(), environment, SERVICES["bedrock"])
    assert (endpoint.host, endpoint.official) == (host, True)


@pytest.mark.parametrize("region", ["", "Frankfurt", "us-east-1.evil.example/", "us-east-1#"])
def test_a_region_that_is_none_is_refused_with_its_variable(region: str) -> None:
    environment = {"AWS_REGION": region, "AWS_BEARER_TOKEN_BEDROCK": "k"}
    with pytest.raises(ModelSetupError, match="AWS_REGION"):
        endpoint_of(ModelSettings(), environment, SERVICES["bedrock"])


async def test_credentials_of_a_profile_stay_out_of_errors_and_debug_lines(
    call: Callable[..., Awaitable[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    secrets = ("a-profile/secret+0123", "a-session-token-0123")
    lines = ("[it]", "aws_access_key_id=AKIDEXAMPLE", f"aws_secret_access_key={secrets[0]}")
    text = "\n".join((*lines, f"aws_session_token={secrets[1]}"))
    (tmp_path / "credentials").write_text(text, encoding="utf-8")
    monkeypatch.setenv("AWS_PROFILE", "it")
    with caplog.at_level(logging.DEBUG):
        assert await call() == "Hi."
    for secret in secrets:
        assert secret not in caplog.text
        assert secret not in redact_error(f"400: your headers were {secret}")
