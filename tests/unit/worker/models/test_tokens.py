"""Bearer tokens of Azure: of a variable, and of a function, renewed before they expire."""

import asyncio
import base64
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from support.deadlines import until
from support.servers.raw_model_server import RawModelServer, completion

from stepfleet.orchestrator import Message, ModelRequest, ModelSettings
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.models.endpoint import Endpoint, ModelSetupError, endpoint_of
from stepfleet.orchestrator.models.services import SERVICES
from stepfleet.worker.models import Models
from stepfleet.worker.models.tokens import Tokens

AZURE = {"AZURE_OPENAI_ENDPOINT": "https://house.openai.azure.com"}
HERE = __name__
PROVIDER = "AZURE_OPENAI_AD_TOKEN_PROVIDER"


@dataclass
class AccessToken:
    token: str
    expires_on: float


class Issuer:
    """Returns t1, t2, ...; what is set in its place is raised or returned."""

    def __init__(self) -> None:
        self.calls = 0
        self.expires: float | None = None
        self.instead: Any = None

    def __call__(self) -> Any:
        self.calls += 1
        if isinstance(self.instead, Exception):
            raise self.instead
        if self.instead is not None:
            return self.instead
        token = f"t{self.calls}"
        return token if self.expires is None else AccessToken(token, self.expires)


@pytest.fixture
def issuer(monkeypatch: pytest.MonkeyPatch) -> Issuer:
    made = Issuer()
    monkeypatch.setitem(globals(), "issue", made)
    return made


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def endpoint(name: str = f"{HERE}:issue") -> Endpoint:
    return endpoint_of(ModelSettings(), {**AZURE, PROVIDER: name}, SERVICES["azure"])


def test_a_key_wins_over_a_token_and_a_token_over_a_function() -> None:
    token, function = {"AZURE_OPENAI_AD_TOKEN": "swordfish"}, {PROVIDER: "a:b"}
    key = {"AZURE_OPENAI_API_KEY": "k"}

    def found(*given: dict[str, str], **settings: Any) -> Endpoint:
        environment = {name: value for one in (AZURE, *given) for name, value in one.items()}
        chosen = ModelSettings.model_validate(settings)
        return endpoint_of(chosen, environment, SERVICES["azure"])

    assert found(key, token, function).headers["api-key"] == "k"
    assert "authorization" not in found(key, token).headers
    assert found(token, function).headers["authorization"] == "Bearer swordfish"
    assert (found(token, function).tokens, found(function).tokens) == ("", "a:b")
    assert "swordfish" not in repr(found(token))
    elsewhere = found(token, function, base_url="https://elsewhere.example/v1")
    assert (elsewhere.tokens, "authorization" in elsewhere.headers) == ("", False)
    with pytest.raises(ModelSetupError, match="AZURE_OPENAI_API_KEY"):
        found()


async def test_a_token_is_renewed_before_it_expires_and_meanwhile_used(issuer: Issuer) -> None:
    clock = Clock()
    tokens = Tokens(clock)
    issuer.expires = clock.now + 3600
    several = await asyncio.gather(*(tokens.opened(endpoint()) for _ in range(20)))
    assert {one.headers["authorization"] for one in several} == {"Bearer t1"}
    assert issuer.calls == 1
    clock.now += 3590 - 200
    issuer.expires = clock.now + 3600
    assert (await tokens.opened(endpoint())).key == "t1"  # the renewal runs beside the call

    async def is_renewed() -> bool:
        return (await tokens.opened(endpoint())).key == "t2"

    await until(is_renewed, within=30)
    clock.now += 3599
    issuer.expires = clock.now + 3600
    assert (await tokens.opened(endpoint())).key == "t3"


async def test_a_jwt_says_itself_when_it_expires(issuer: Issuer) -> None:
    clock = Clock()
    claims = base64.urlsafe_b64encode(orjson.dumps({"exp": clock.now + 900})).decode().rstrip("=")
    issuer.instead = f"h.{claims}.s"
    tokens = Tokens(clock)
    for _ in range(3):
        await tokens.opened(endpoint())
    assert issuer.calls == 1
    clock.now += 890
    await tokens.opened(endpoint())
    assert issuer.calls == 2


@pytest.mark.parametrize(
    ("instead", "name", "problem", "retryable"),
    [
        (RuntimeError("down"), "", "no token from .*RuntimeError: down", True),
        (7, "", "returned a int: return the token", False),
        ("a\nb", "", "return the token", False),
        ("", "", "returned an empty token", False),
        (None, "no_such_module_here:x", "no module 'no_such_module_here'", False),
        (None, f"{HERE}:PROVIDER", "must be a function", False),
        (None, "nobody", "not an entry point in 'stepfleet.tokens'", False),
    ],
)
async def test_what_gives_no_token_is_named(
    instead: Any, name: str, problem: str, retryable: bool, issuer: Issuer
) -> None:
    issuer.instead = instead
    with pytest.raises(ModelError, match=problem) as raised:
        await Tokens().opened(endpoint(name) if name else endpoint())
    assert raised.value.retryable is retryable


async def test_a_call_carries_the_functions_token_and_no_error_shows_it(issuer: Issuer) -> None:
    async with RawModelServer().running() as server:
        server.answers(completion("Hello."))
        environment = {
            "AZURE_OPENAI_ENDPOINT": server.base_url.removesuffix("/v1"),
            PROVIDER: f"{HERE}:issue",
        }
        models = Models(environment=environment)
        request = ModelRequest(model="azure:house", messages=(Message.user("hi"),))
        try:
            assert (await models.generate(request)).content == "Hello."
        finally:
            await models.aclose()
    assert server.received[0].headers["authorization"] == "Bearer t1"
    assert "api-key" not in server.received[0].headers
