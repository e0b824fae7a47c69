"""Signs calls with AWS's credentials, found and refreshed as AWS's own SDK does: by botocore.

botocore comes with the extra `bedrock` and is imported at the first call that needs it. Its chain
reads the environment and the files of this process, and may ask services of AWS: it blocks.
"""

import logging
from collections.abc import Mapping
from typing import Any

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.models.endpoint import ModelSetupError
from stepfleet.orchestrator.models.failures import redact
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.text.redaction import keep_secret, name_secret

_SERVICE = "bedrock"
_LATE_SECONDS = 600
"""Credentials that expire sooner are not used before they were refreshed, as by the SDK."""


class Credentials:
    """The credentials of this process. `load` and `refresh` block; `sign` only computes."""

    def __init__(self) -> None:
        self._found: Any = None
        self._frozen: Any = None

    @property
    def are_late(self) -> bool:
        """Whether no call can be signed before `refresh`."""
        return self._frozen is None or self._expire_within(_LATE_SECONDS)

    @property
    def are_ageing(self) -> bool:
        """Whether `refresh` should be called soon."""
        return self._frozen is None or self._expire_within(None)

    def refresh(self) -> None:
        """Find credentials, or get new ones before the old ones expire.

        Raises `ModelSetupError` where the extra is missing or no source has credentials, and a
        transient `ModelError` where a source fails.
        """
        try:
            if self._found is None:
                self._found = _found()
            self._frozen = self._found.get_frozen_credentials()
            # Those of a role, a profile or a machine are in no variable.
            for name, value in (("secret", self._frozen.secret_key), ("token", self._frozen.token)):
                if value:
                    keep_secret(f"AWS's {name}", value)
        except ModelError:
            raise
        except Exception as error:  # noqa: BLE001 - sources have errors of their own
            reason = redact(f"{type(error).__name__}: {error}", None)
            msg = f"could not load AWS credentials: {reason}"
            code = ModelErrorCode.CONNECTION_ERROR
            raise ModelError(msg, retryable=True, code=code) from None

    def sign(
        self, region: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> dict[str, str]:
        """Return the headers of a signed POST (SigV4). Call `refresh` before."""
        from botocore.auth import SigV4Auth  # noqa: PLC0415 - an extra
        from botocore.awsrequest import AWSRequest  # noqa: PLC0415 - an extra

        request = AWSRequest(method="POST", url=url, data=body, headers=dict(headers))
        SigV4Auth(self._frozen, _SERVICE, region).add_auth(request)
        return dict(request.headers.items())

    def _expire_within(self, seconds: int | None) -> bool:
        needed = getattr(self._found, "refresh_needed", None)  # fixed ones have none
        return bool(needed and needed(seconds))


def _found() -> Any:
    try:
        from botocore import exceptions  # noqa: PLC0415 - an extra
        from botocore.session import Session  # noqa: PLC0415 - an extra
    except ImportError:
        msg = (
            "models of bedrock are called with AWS's credentials, and botocore is not installed: "
            "pip install 'stepfleet[bedrock]' on the workers, or set AWS_BEARER_TOKEN_BEDROCK"
        )
        raise ModelSetupError(msg) from None
    # Its debug lines have whole answers with credentials, and the headers that it signs.
    logging.getLogger("botocore").setLevel(logging.INFO)
    try:
        found = Session().get_credentials()
    except (
        exceptions.ConfigParseError,
        exceptions.InvalidConfigError,
        exceptions.PartialCredentialsError,
        exceptions.ProfileNotFound,
    ) as error:
        raise ModelSetupError(f"invalid AWS configuration: {error}") from None
    if found is None:
        msg = (
            "no AWS credentials: set AWS_BEARER_TOKEN_BEDROCK, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, in the workers' environment, or give the "
            "machine a role"
        )
        raise ModelSetupError(msg)
    for variable in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        name_secret(variable)
    return found
