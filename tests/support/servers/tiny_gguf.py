"""Writes a language model of random weights as a GGUF file of 100 KB, for a real llama.cpp server.

Its text is random, but its calls are calls: after a prompt with tools it opens one, and it ends
behind one; the server's grammar does the rest. All tokens are bytes, but for four of its own.
"""

import array
import random
import struct
from pathlib import Path
from typing import Any

WINDOW = 2048
_WIDTH, _HEADS = 32, 2
_BEGIN, _END, _CALL, _CALLED = range(256, 260)
_MARKS = ("<s>", "</s>", "<tool_call>", "</tool_call>")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_ALIGNMENT = 32
_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" and message.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{ '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{{- '<|im_start|>user\\n<result>\\n' + message.content + '\\n</result><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}
{{- '\\n' if tools else ' ' }}{% endif %}"""
Rows = list[list[float]]


def write_model(path: Path) -> None:
    """Write the model; the same bytes every time."""
    drawn = random.Random(7)

    def rows(count: int, scale: float) -> Rows:
        return [[drawn.gauss(0, scale) for _ in range(_WIDTH)] for _ in range(count)]

    tensors: dict[str, Rows] = {
        "token_embd.weight": rows(260, 1.0),
        "output.weight": rows(260, 0.5),
        "output_norm.weight": [[1.0] * _WIDTH],
        "blk.0.attn_norm.weight": [[1.0] * _WIDTH],
        "blk.0.ffn_norm.weight": [[1.0] * _WIDTH],
    }
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors |= {f"blk.0.{part}.weight": rows(_WIDTH, 0.05) for part in parts}
    _teach(tensors["token_embd.weight"], tensors["output.weight"])
    path.write_bytes(_file(_facts(), tensors))


def _teach(embedding: Rows, output: Rows) -> None:
    """Make a call follow a line's end, the end follow a call, and ASCII all other text."""
    for token, row in enumerate(embedding):
        row[:3] = [0.0, 0.0, 1.0]
        output[token][:3] = [0.0, 0.0, 0.0 if 32 <= token < 127 or token > _END else -20.0]
    for before, after, dimension in ((_CALLED, _END, 0), (ord("\n"), _CALL, 1)):
        embedding[before] = [0.0] * _WIDTH
        embedding[before][dimension] = embedding[before][2] = 1.0
        output[after] = [0.0] * _WIDTH
        output[after][dimension] = 20.0


def _facts() -> dict[str, Any]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: byte for byte in shown} | {byte: 256 + n for n, byte in enumerate(others)}
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.context_length": WINDOW,
        "llama.embedding_length": _WIDTH,
        "llama.block_count": 1,
        "llama.feed_forward_length": _WIDTH,
        "llama.attention.head_count": _HEADS,
        "llama.attention.head_count_kv": _HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": _WIDTH // _HEADS,
        "llama.vocab_size": 256 + len(_MARKS),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*(chr(letters[byte]) for byte in range(256)), *_MARKS],
        "tokenizer.ggml.token_type": [_NORMAL] * 256 + [_CONTROL] * 2 + [_USER_DEFINED] * 2,
        "tokenizer.ggml.merges": ["a a"],
        "tokenizer.ggml.bos_token_id": _BEGIN,
        "tokenizer.ggml.eos_token_id": _END,
        "tokenizer.chat_template": _TEMPLATE,
    }


def _file(facts: dict[str, Any], tensors: dict[str, Rows]) -> bytes:
    """Return a GGUF file of version 3."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    head += b"".join(_text(name) + _value(value) for name, value in facts.items())
    data = b""
    for name, rows in tensors.items():
        sizes = [_WIDTH] if len(rows) == 1 else [_WIDTH, len(rows)]
        head += _text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        head += struct.pack("<IQ", 0, len(data))  # 32-bit floats, from here on
        data += _padded(array.array("f", [one for row in rows for one in row]).tobytes())
    return _padded(head) + data


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kind, packed = (8, _text) if isinstance(value[0], str) else (5, struct.Struct("<i").pack)
        items = b"".join(packed(one) for one in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)
