"""The one mutation engine: from a whole file and a number, always the same damaged file.

Half of the mutations work on the data (a value becomes another, a key goes, comes twice or is renamed, a part is nested
deeply or copied elsewhere), half on the bytes. Where a file holds data inside data (JSON in the header of a safetensors
file), both are reached.
"""

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import yaml

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, -1e308, 1e-320, float("nan"), float("inf"), 10**6, 2**31, 2**63,
    10**30, 10**400, "", "a", "1", "nan", "..", "../..", "/etc/passwd", "a" * 70, "x" * 5000, "\x00", "\x1b[31m",
    "\n\n", "\u202e", "\ud800", "é", "<b>", "{{ 7 * 7 }}", "__class__", "trusted", [], [[]], {}, {"a": 1}, [1, 2, 3],
    [None], ["a"], {"": {}}, [[1e9] * 9] * 9, list(range(300)), {str(i): i for i in range(300)},
]  # fmt: skip
BYTES = [b"", b"\x00", b"\xff", b"\n", b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"9" * 40, b"null", b"NaN"]
BYTES += [b"\xed\xa0\x80", b"&a ", b"*a", b"!!python/name:os.system ", b"<<: ", b"? ", b"\t", b"\xef\xbb\xbf", b"\\u0"]


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + int(2 ** rng.uniform(0, 8)))
        action = rng.randrange(7)
        if action == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        elif action == 1:
            data = data[:at] + data[end:]
        elif action == 2:
            data = data[:at] + data[at:end] * rng.choice((2, 3, 50)) + data[end:]
        elif action == 3:
            data = data[:at]
        elif action == 4:
            data = data[:at] + rng.choice(BYTES) * rng.choice((1, 1, 3, 1000)) + data[at:]
        elif action == 5:
            data = data[:at] + rng.choice(BYTES) + data[end:]
        else:
            other = rng.randrange(len(data) + 1)
            data = data[:at] + data[other : other + 40] + data[at:]
    return data


def damaged_data(rng: random.Random, data: Any) -> Any:
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = [(None, None), *_places(data)]
        holder, key = rng.choice(places[-1:] if len(places) == 1 else places[1:] if rng.random() < 0.98 else places)
        if holder is None:
            data = rng.choice(VALUES)
            continue
        action = rng.randrange(8)
        if action <= 3:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif action == 4:
            del holder[key]
        elif action == 5 and isinstance(holder, dict):
            holder[str(rng.choice(VALUES))[:300]] = holder.pop(key)
        elif action == 6:
            for _ in range(rng.choice((1, 5, 200))):
                holder[key] = {"a": holder[key]} if rng.random() < 0.5 else [holder[key]]
        elif isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            value = holder[key]
            holder[key] = rng.choice((-value, value + 1, value - 1, value * 1000, _third(value)))
        else:
            source = rng.choice(places[1:])
            holder[key] = copy.deepcopy(source[0][source[1]])
    return data


def _places(data: Any, found: list | None = None) -> list[tuple[Any, Any]]:
    found = [] if found is None else found
    if isinstance(data, dict | list):
        for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
            found.append((data, key))
            _places(value, found)
    return found


def damaged_json(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.5:
        return damaged_bytes(rng, data)
    return _dumped(lambda: json.dumps(damaged_data(rng, json.loads(data))), data)


def damaged_yaml(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.5:
        return damaged_bytes(rng, data)
    return _dumped(lambda: yaml.safe_dump(damaged_data(rng, yaml.safe_load(data)), sort_keys=False), data)


def damaged_safetensors(rng: random.Random, data: bytes) -> bytes:
    choice = rng.random()
    if choice < 0.3:
        return damaged_bytes(rng, data)
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    inner = [key for key, value in (header.get("__metadata__") or {}).items() if value.startswith("{")]
    if choice < 0.55 and inner:
        key = rng.choice(inner)
        header["__metadata__"][key] = damaged_json(rng, header["__metadata__"][key].encode()).decode("utf-8", "replace")
    elif choice < 0.7:  # as many bytes as before: only the numbers of the tensors change
        at = rng.randrange(max(1, len(body) - 8))
        number = struct.pack("<d", rng.choice((0.0, -1.0, 1e308, float("nan"), float("inf"), 5e-324)))
        body = (body[:at] + number + body[at + 8 :])[: len(body)]
    else:
        header = damaged_data(rng, header)
    text = _dumped(lambda: json.dumps(header), b"{}")
    return struct.pack("<Q", len(text) if rng.random() < 0.95 else rng.choice((0, 2**40, len(text) + 7))) + text + body


def _dumped(dump: Callable[[], str], otherwise: bytes) -> bytes:
    """What can't be written as a file (a date as a key) leaves the file whole."""
    try:
        return dump().encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError, yaml.YAMLError):
        return otherwise


def _third(value):
    """A whole number too large for a float stays whole."""
    return value // 3 if isinstance(value, int) and abs(value) > 2**1000 else value / 3
