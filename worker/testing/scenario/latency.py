"""How long the model seems to think. Pure: the same request always waits equally long."""

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Self

_BYTES = 8


def draw(*parts: object) -> float:
    """Return a number from 0 up to 1, always the same for equal `parts`."""
    text = "\0".join(map(str, parts)).encode(errors="surrogatepass")
    digest = hashlib.blake2b(text, digest_size=_BYTES).digest()
    return int.from_bytes(digest) / (1 << 8 * _BYTES)


def name_of(*parts: object) -> str:
    """Return 24 hexadecimal digits, always the same for equal `parts`."""
    text = "\0".join(map(str, parts)).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=12).hexdigest()


_FORMS = "write 0.05 for always, 0.2-1.5 for evenly between, or 1.0~0.5 for log-normal"


@dataclass(frozen=True)
class Latency:
    """Seconds before an answer: between `low` and `high`, or log-normal about `low`.

    Without `high` and `sigma` every answer takes `low` seconds. With `sigma`, half of the
    answers take longer than `low`, with the long tail of real services, up to `high` where it
    is given.
    """

    low: float = 0.0
    high: float | None = None
    sigma: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no duration; raises `ValueError`."""
        bounds = (self.low, self.low if self.high is None else self.high, self.sigma)
        if not all(math.isfinite(one) and one >= 0 for one in bounds) or bounds[1] < bounds[0]:
            raise ValueError(f"{self} is no latency: use seconds >= 0 and low <= high")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `0.05`, `0.2-1.5` or `1.0~0.5` (median~sigma). Raises `ValueError`."""
        try:
            if "~" in text:
                median, sigma = text.split("~")
                return cls(float(median), sigma=float(sigma))
            if "-" in text:
                low, high = text.split("-")
                return cls(float(low), float(high))
            return cls(float(text))
        except ValueError as error:
            raise ValueError(f"{text!r} is no latency ({error}); {_FORMS}") from None

    def seconds(self, *request: object) -> float:
        """Return the seconds that the request with these identifying parts waits."""
        if self.sigma:
            normal = NormalDist().inv_cdf(max(1e-9, draw("latency", *request)))
            seconds = self.low * math.exp(self.sigma * normal)
            return seconds if self.high is None else min(seconds, self.high)
        if self.high is None:
            return self.low
        return self.low + (self.high - self.low) * draw("latency", *request)
