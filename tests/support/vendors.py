"""The vendors' SDKs, of which each is imported with its first use.

Every process of the tests collects all files, and these are as much to import as all the rest.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import anthropic as anthropic
    import openai as openai
    from google import genai as genai
else:
    _NAMES = {
        "anthropic": "anthropic",
        "openai": "openai",
        "pandas": "pandas",
        "genai": "google.genai",
    }

    def __getattr__(name: str) -> Any:
        """Import an SDK. Raises `AttributeError` for other names."""
        if name not in _NAMES:
            raise AttributeError(name)
        return importlib.import_module(_NAMES[name])
