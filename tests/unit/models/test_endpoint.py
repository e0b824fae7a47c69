from typing import Any

import pytest

from stepfleet.orchestrator import ModelSettings
from stepfleet.orchestrator.models.endpoint import ROUTES, ModelSetupError, endpoint_of, is_loopback
from stepfleet.orchestrator.models.services import SERVICES, Api

KEYS = {"OPENAI_API_KEY": "k-openai", "OTHER_API_KEY": "k-other"}
ELSEWHERE = "https://models.example.com/v1"


def authorization(environment: dict[str, str] | None = None, **settings: str) -> str | None:
    endpoint = endpoint_of(ModelSettings.model_validate(settings), environment or KEYS)
    return endpoint.headers.get("authorization")


def test_the_address_is_the_settings_then_the_environments_then_openais() -> None:
    """LLM-19: the base URL is settable per agent."""
    own = KEYS | {"OPENAI_BASE_URL": "https://own.example.com/v1/"}
    by_agent = endpoint_of(ModelSettings(base_url=ELSEWHERE), own)
    by_worker = endpoint_of(ModelSettings(), own)
    assert by_agent.url == "https://models.example.com/v1/chat/completions"
    assert by_worker.url == "https://own.example.com/v1/chat/completions"
    assert endpoint_of(ModelSettings(), KEYS).url == "https://api.openai.com/v1/chat/completions"


def test_openai_without_a_key_says_which_variable_to_set() -> None:
    with pytest.raises(ModelSetupError, match="OPENAI_API_KEY") as raised:
        endpoint_of(ModelSettings(), {})
    assert not raised.value.retryable


def test_a_named_variable_that_is_missing_is_an_error_everywhere() -> None:
    settings = ModelSettings(base_url="http://localhost:8000/v1", api_key_env="MISSING")
    with pytest.raises(ModelSetupError, match="MISSING"):
        endpoint_of(settings, KEYS)


def test_a_local_server_needs_no_key() -> None:
    assert authorization({"X": "y"}, base_url="http://127.0.0.1:8000/v1") is None


def test_the_default_key_goes_only_where_it_belongs() -> None:
    own = KEYS | {"OPENAI_BASE_URL": "https://own.example.com/v1"}
    assert authorization() == "Bearer k-openai"
    assert authorization(own) == "Bearer k-openai"
    assert authorization(base_url="http://localhost:1/v1") == "Bearer k-openai"
    assert authorization(base_url="https://eu.api.openai.com/v1") == "Bearer k-openai"
    assert authorization(base_url=ELSEWHERE) is None
    assert authorization(base_url="https://api.openai.com.evil.example/v1") is None
    assert authorization(base_url="http://api.openai.com/v1") is None


def test_a_named_key_goes_to_the_named_address() -> None:
    assert authorization(base_url=ELSEWHERE, api_key_env="OTHER_API_KEY") == "Bearer k-other"


def test_a_key_with_a_line_end_is_trimmed() -> None:
    assert authorization({"OPENAI_API_KEY": "k\n"}) == "Bearer k"


def test_a_key_that_no_header_carries_is_refused_without_showing_it() -> None:
    with pytest.raises(ModelSetupError, match="OPENAI_API_KEY") as raised:
        endpoint_of(ModelSettings(), {"OPENAI_API_KEY": "schlüssel\nx: y"})
    assert "schl" not in str(raised.value)


def test_the_organization_is_sent() -> None:
    organized = KEYS | {"OPENAI_ORG_ID": "org-env"}
    header = "openai-organization"
    assert endpoint_of(ModelSettings(), organized).headers[header] == "org-env"
    named = endpoint_of(ModelSettings(organization="org-1"), organized)
    assert named.headers[header] == "org-1"
    assert header not in endpoint_of(ModelSettings(base_url=ELSEWHERE), organized).headers


@pytest.mark.parametrize(
    "url",
    ["api.openai.com/v1", "ftp://x/v1", "https://", "http://[::1", "http://host:port/v1"],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ModelSetupError, match=r"settings\.base_url"):
        endpoint_of(ModelSettings(base_url=url), KEYS)


def test_credentials_in_the_address_are_refused_and_not_shown() -> None:
    with pytest.raises(ModelSetupError, match="api_key_env") as raised:
        endpoint_of(ModelSettings(base_url="https://user:hunter2@host/v1"), KEYS)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("value", ["0", "false", "No", " off "])
def test_the_switch_admits_only_this_machine(value: Any) -> None:
    """LLM-07: no test can reach a real model."""
    closed = KEYS | {"STEPFLEET_ALLOW_MODEL_REQUESTS": value}
    with pytest.raises(ModelSetupError, match="STEPFLEET_ALLOW_MODEL_REQUESTS"):
        endpoint_of(ModelSettings(), closed)
    assert endpoint_of(ModelSettings(base_url="http://127.0.0.1:9/v1"), closed)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("models.localhost", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
    ],
)
def test_loopback_is_recognized_by_the_name_alone(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_key_is_not_in_the_endpoints_representation() -> None:
    assert "k-openai" not in repr(endpoint_of(ModelSettings(), KEYS))


def test_azure_is_called_by_deployment_and_with_a_key_of_its_own() -> None:
    """LLM-04: with OPENAI_API_VERSION by the older interface."""
    own = {"AZURE_OPENAI_ENDPOINT": "https://me.openai.azure.com/", "AZURE_OPENAI_API_KEY": "k-az"}
    route = ROUTES[Api.AZURE]

    def url(environment: dict[str, str]) -> tuple[str, bool]:
        service = SERVICES["azure"]
        endpoint = endpoint_of(ModelSettings(), environment, service, path=route.path)
        assert endpoint.headers["api-key"] == "k-az"
        assert "authorization" not in endpoint.headers
        whole = route.url(endpoint, "my deployment", False)  # noqa: FBT003 - as it is called
        return whole, endpoint.official

    root = "https://me.openai.azure.com/openai"
    assert url(own) == (f"{root}/v1/chat/completions", True)
    dated = url(own | {"OPENAI_API_VERSION": "2024-10-21"})
    place = "deployments/my%20deployment/chat/completions?api-version=2024-10-21"
    assert dated == (f"{root}/{place}", True)


def test_a_service_without_an_address_names_its_variable() -> None:
    with pytest.raises(ModelSetupError, match="AZURE_OPENAI_ENDPOINT"):
        endpoint_of(ModelSettings(), {}, SERVICES["azure"])


def test_azure_without_a_key_says_which_variable_to_set() -> None:
    own = {"AZURE_OPENAI_ENDPOINT": "https://me.openai.azure.com"}
    with pytest.raises(ModelSetupError, match="AZURE_OPENAI_API_KEY"):
        endpoint_of(ModelSettings(), own, SERVICES["azure"])


@pytest.mark.parametrize(
    ("given", "version"), [({}, "v1"), ({"GOOGLE_GENAI_API_VERSION": "beta"}, "v1beta")]
)
def test_gemini_is_called_at_the_version_of_its_sdks_variable(
    given: dict[str, str], version: str
) -> None:
    route, environment = ROUTES[Api.GENERATE_CONTENT], {"GEMINI_API_KEY": "k", **given}
    endpoint = endpoint_of(ModelSettings(), environment, SERVICES["google"], path=route.path)
    root = f"https://generativelanguage.googleapis.com/{version}/models"
    assert route.url(endpoint, "a b", False) == f"{root}/a%20b:generateContent"  # noqa: FBT003 - as it is called
