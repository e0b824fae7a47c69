"""What the calls of each service carry: settings, blocks of messages, tools. Pure data.

A service carries what its protocol does; whether one of its models reads images is the model's own.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.media import KINDS, Media, media_of
from stepfleet.orchestrator.models.services import SERVICES, Api, Service
from stepfleet.orchestrator.records.conversation.messages import REASONING, Block, Content, Message
from stepfleet.orchestrator.records.responses import ModelSettings

_Kinds = Mapping[str, frozenset[str]]
_OWN_KINDS = ("text", "json", "toolUse", "toolResult", REASONING)
_SWITCHING_CLAUDE = re.compile(r"claude-[a-z]+-(?:4-(?:[5-9]|\d\d)|[5-9]|\d\d)(?!\d)")
_OLD_GEMINI = re.compile(r"(?:models/)?gemini-[12]\b")

_ANY_ID = re.compile(r"[^\x00-\x20\x7f]{1,512}")
_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _kinds(**kinds: str) -> _Kinds:
    return {kind: frozenset(words.split()) for kind, words in kinds.items()}


@dataclass(frozen=True, slots=True)
class Support:
    """What a model's service takes.

    `settings` are fields of `ModelSettings`. `blocks` has the formats of each kind of media, and
    `sources` how it may come (`bytes`, `url`, `text`, `file_id`). `result_media` has the sources
    of media that stand in a tool's result itself; others follow it in a user message. `address` is
    the beginning of the addresses that it reads. `parts` are
    the service's own blocks, which pass as they are: types or keys. `strict_tools`: the service
    itself holds the arguments of calls to a schema. `data_beside_tools`: an answer can be data of
    a schema while there are tools; `parallel_switch`: parallel calls can be switched off.
    `call_ids` fits the ids of calls that it takes: others are sent under one that it takes.
    """

    settings: frozenset[str]
    blocks: _Kinds
    sources: _Kinds
    result_media: _Kinds = field(default_factory=dict)
    address: str = ""
    parts: frozenset[str] = frozenset()
    strict_tools: bool = False
    data_beside_tools: bool = True
    parallel_switch: bool = True
    call_ids: re.Pattern[str] = _ANY_ID

    def lack(self, media: Media) -> str | None:
        """Return what the service takes instead of a media block; None where it takes that."""
        formats = self.blocks.get(media.kind)
        if formats is None:
            return f"it takes {_listed(self.blocks) or 'text alone'}"
        if media.source not in self.sources[media.kind]:
            return f"it takes {media.kind} as {_listed(self.sources[media.kind])}"
        if not media.url.startswith(self.address) and media.url:
            return f"it takes {media.kind} as bytes, or at an address in {self.address}"
        known = media.form in formats or media.source == "file_id"
        return None if known else f"it takes {media.kind} of {_listed(formats)}"


_TEXTS = "txt md csv html json"
_IMAGES = "png jpeg jpg gif webp"
_CHAT = Support(
    settings=frozenset(ModelSettings.model_fields),
    blocks=_kinds(image=_IMAGES, document=f"pdf docx pptx xlsx {_TEXTS}", audio="wav mp3"),
    sources=_kinds(image="bytes url", document="bytes text file_id", audio="bytes"),
    parts=frozenset(
        {"text", "refusal", "image_url", "input_audio", "file", "video_url", "audio_url"}
    ),
    strict_tools=True,
)
_BY_API: Mapping[Api, Support] = {
    Api.CHAT: _CHAT,
    Api.AZURE: _CHAT,
    Api.RESPONSES: replace(
        _CHAT,
        blocks={kind: _CHAT.blocks[kind] for kind in ("image", "document")},
        sources=_kinds(image="bytes url file_id", document="bytes url text file_id"),
        result_media=_kinds(image="bytes url file_id", document="bytes url file_id"),
        parts=frozenset({"input_text", "output_text", "input_image", "input_file", "refusal"}),
        call_ids=re.compile(r"[!-~]{1,64}"),
    ),
    Api.MESSAGES: replace(
        _CHAT,
        blocks=_kinds(image=_IMAGES, document=f"pdf {_TEXTS}"),
        sources=_kinds(image="bytes url file_id", document="bytes url text file_id"),
        result_media=_kinds(image="bytes url file_id", document="bytes url text file_id"),
        parts=frozenset({"text", "image", "document", "search_result", "container_upload"}),
        call_ids=_PLAIN_ID,
    ),
    Api.GENERATE_CONTENT: Support(
        settings=_CHAT.settings,
        blocks=_kinds(
            image="png jpeg jpg webp heic heif",
            document=f"pdf {_TEXTS}",
            audio="wav mp3 aiff aac ogg flac",
        ),
        sources=_kinds(image="bytes url", document="bytes url text", audio="bytes url"),
        result_media=_kinds(image="bytes", document="bytes"),
        parts=frozenset({"inlineData", "fileData", "executableCode", "codeExecutionResult"}),
        parallel_switch=False,
    ),
    Api.CONVERSE: Support(
        settings=_CHAT.settings,
        blocks=_kinds(
            image=_IMAGES,
            document="pdf doc docx xls xlsx txt md csv html json",
            audio="wav mp3 aac flac ogg m4a webm",
        ),
        sources=_kinds(image="bytes url", document="bytes url text", audio="bytes url"),
        result_media=_kinds(image="bytes url", document="bytes url text"),
        address="s3://",
        parts=frozenset(
            {"video", "guardContent", "cachePoint", "reasoningContent", "searchResult"}
        ),
        strict_tools=True,
        call_ids=_PLAIN_ID,
    ),
}


def support_of(model: str) -> Support | None:
    """Return what calls of `provider:name` carry; None for a provider that is not built in."""
    prefix, _, name = model.partition(":")
    service = SERVICES.get(prefix)
    return support_at(service, name) if service else None


@lru_cache(maxsize=256)
def support_at(service: Service, name: str) -> Support:
    """Return what calls of a service's model `name` carry."""
    found = _BY_API[service.api]
    if service.call_ids:
        found = replace(found, call_ids=re.compile(service.call_ids))
    settings = found.settings - frozenset(service.lacks)
    if service.api is Api.GENERATE_CONTENT and _OLD_GEMINI.match(name):
        return replace(found, settings=settings, result_media={}, data_beside_tools=False)
    if service.api is Api.CONVERSE:
        budget = frozenset() if "claude" in name else frozenset({"reasoning_budget"})
        switch = _SWITCHING_CLAUDE.search(name) is not None
        return replace(found, settings=settings - budget, parallel_switch=switch)
    return replace(found, settings=settings)


def supports(model: str) -> Support:
    """Return what calls of the model `provider:name` carry.

    Raises `ConfigurationError` for a provider that is not built in: its package knows.
    """
    found = support_of(model)
    if found is None:
        msg = f"{model!r}: unknown provider; built in are {_listed(SERVICES)}"
        raise ConfigurationError(msg)
    return found


def check_messages(models: Iterable[str], messages: Iterable[Message], name: str) -> None:
    """Raise `ConfigurationError`, with place and fix, where a call of a model cannot carry a block.

    `name` is the field of the messages.
    """
    blocks = [
        (f"{name}.{index}", one.content)
        for index, one in enumerate(messages)
        if not isinstance(one.content, str)
    ]
    for model in models if blocks else ():
        if support := support_of(model):
            for place, content in blocks:
                _check_content(model, support, content, place)


def _check_content(model: str, support: Support, content: Content, place: str) -> None:
    for index, block in enumerate(content if isinstance(content, list) else ()):
        where = f"{place}.content.{index}"
        if problem := _problem_with(block, support):
            raise ConfigurationError(f"field {where!r}: model {model!r} {problem}")
        if isinstance(result := block.get("toolResult"), dict):
            _check_content(model, support, result.get("content", ""), where)


def _problem_with(block: Block, support: Support) -> str | None:
    part = block.get("type")
    if part is not None:
        if isinstance(part, str) and part in support.parts:
            return None
        return (
            f"takes no part of type {str(part)[:60]!r} with these fields; write a block, as "
            '{"text": "..."} or {"image": {"format": "png", "source": {"url": "https://..."}}}'
        )
    try:
        media = media_of(block)
    except ValueError as error:
        return f"cannot take it: {error}"
    if media is None:
        if support.parts.union(_OWN_KINDS).intersection(block):
            return None
        kinds = _listed([*_OWN_KINDS[:-1], *KINDS])
        return f"takes no block of {_listed(str(one)[:60] for one in block)!r}; write {kinds}"
    lack = support.lack(media)
    return f"takes no {media}: {lack}; convert it, or use another provider's" if lack else None


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))
