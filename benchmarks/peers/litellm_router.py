"""LiteLLM's router, which knows the limit and holds back calls above it; all runs at once.

A call that the router or the service refuses is tried again as the router sees fit, and by the
loop of the run where the router gives up.
"""

import asyncio
import json
import sys
from typing import Any

import job as jobs
from litellm import Router
from litellm.exceptions import RateLimitError

RETRIES = 10
PAUSE = 1.0


def router_of(job: dict[str, Any]) -> Router:
    """Return a router with one deployment under the limit."""
    deployment = {
        "model_name": "benchmark",
        "litellm_params": {
            "model": "openai/benchmark",
            "api_base": job["model"],
            "api_key": "none",
            "rpm": int(job["rpm"]),
        },
    }
    return Router(
        model_list=[deployment],
        num_retries=RETRIES,
        optional_pre_call_checks=["enforce_model_rate_limits"],
        disable_cooldowns=True,
    )


async def run(router: Router, number: int, turns: int) -> None:
    """Do one run: calls until there is no tool call in the answer."""
    messages: list[Any] = [{"role": "user", "content": jobs.question(str(number), turns)}]
    while True:
        try:
            answer = await router.acompletion("benchmark", messages, tools=jobs.TOOLS)
        except RateLimitError:
            await asyncio.sleep(PAUSE)
            continue
        message = jobs.answered(answer.choices[0].message.model_dump(mode="json"))
        results = jobs.use_tools(message)
        if not results:
            return
        messages += [message, *results]


async def main() -> None:
    """Do the job of the command line."""
    job = json.loads(sys.argv[1])
    router = router_of(job)
    await asyncio.gather(*(run(router, number, job["turns"]) for number in range(job["runs"])))


if __name__ == "__main__":
    asyncio.run(main())
