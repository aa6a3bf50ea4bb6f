"""Documents made wrong, from a seed: what an attacker, a cut connection or an editor may do to JSON, text and bytes."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**18, 10**30, 10**300, 0.5, -0.0,
    1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), True, False,
)  # fmt: skip
STRINGS: tuple[str, ...] = (
    "", " ", "\x00", "a\x00b", "\ud800", "\u202e", "ß" * 70, "😀" * 300, "x" * 70_000, "9" * 5_000, "-", ".", "..",
    "../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "data://text/../..", "out://../1/2", "http://127.0.0.1:1/",
    "nan", "1e999", "true", "null", "{}", "[]", "<script>alert(1)</script>", "' OR 1=1 --", "%s%n{0}", "${HOME}",
    "=cmd()", "1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "10000Gi", "1e9Gi", "-5Mi", "0F0.0", "a" * 64, "0" * 64,
    "\n\r\t", "\ufeff", "٣", "𝟗", "a=b,c=d", "default", "tiny",
)  # fmt: skip
MOST_CHANGES = 4
MOST_BYTES = 2**17
MOST_VALUES = 2_000_000
"""Twice what penstock takes. Lists that are repeated share what is in them, and may stand for any number of values."""
MOST_PLACES = 100_000
DEPTHS = (40, 600, 3000)


def value(chance: random.Random) -> Any:
    """Anything that does not belong where it is put."""
    kind = chance.randrange(10)
    if kind < 3:
        return chance.choice(NUMBERS)
    if kind < 6:
        return chance.choice(STRINGS)
    if kind == 6:
        return chance.choice(([], {}, None, [[]], [None], {"": None}, {"a": {}}))
    if kind == 7:
        return [chance.choice(NUMBERS)] * chance.choice((1, 2, 70, 3000))
    if kind == 8:
        return {f"k{number}": chance.choice(STRINGS[:8]) for number in range(chance.choice((1, 40, 1100)))}
    return nested(chance)


def nested(chance: random.Random) -> Any:
    """Lists or objects in one another, as deep as Python's encoder takes."""
    found: Any = chance.choice((None, 1, "x"))
    for _ in range(chance.choice((3, 40, 300))):
        found = [found] if chance.random() < 0.5 else {"a": found}
    return found


def document(chance: random.Random, good: Any) -> Any:
    """``good`` with one to four changes at places anywhere in it."""
    made = copy.deepcopy(good)
    for _ in range(chance.randint(1, MOST_CHANGES)):
        places = list(itertools.islice(_places(made), MOST_PLACES))
        if not places:
            return value(chance)
        parent, name = chance.choice(places)
        _change(chance, parent, name)
    return made


def _places(found: Any) -> Iterator[tuple[Any, Any]]:
    """Every value's container and its name or number there."""
    waiting = [found]
    while waiting:
        container = waiting.pop()
        items = (
            container.items()
            if isinstance(container, dict)
            else enumerate(container)
            if isinstance(container, list)
            else ()
        )
        for name, inner in items:
            yield container, name
            if isinstance(inner, dict | list):
                waiting.append(inner)


def _change(chance: random.Random, parent: Any, name: Any) -> None:
    found = parent[name]
    kind = chance.randrange(8)
    if kind == 0:
        del parent[name]
    elif kind == 1 and isinstance(parent, dict):
        parent[chance.choice((*STRINGS[:12], f"{name}X", str(name).upper()))] = parent.pop(name)
    elif kind == 2 and isinstance(found, list):
        parent[name] = found * chance.choice((2, 50, 2000)) if len(found) < 50 else found[:1]
    elif kind == 3 and isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < 1e100:
        parent[name] = chance.choice((found + 1, -found, found * 1_000_003, found * 10**15, str(found), float(found)))
    elif kind == 4 and isinstance(found, str):
        parent[name] = text(chance, found)
    else:
        parent[name] = value(chance)


def text(chance: random.Random, good: str) -> str:
    """``good`` with characters lost, doubled or replaced."""
    return content(chance, good.encode(errors="surrogatepass")).decode(errors="surrogateescape")


def content(chance: random.Random, good: bytes) -> bytes:
    """``good`` with bits flipped, parts lost, doubled or swapped, or something else in it."""
    made = bytearray(good)
    for _ in range(chance.randint(1, MOST_CHANGES)):
        at, end = sorted(chance.randrange(len(made) + 1) for _ in range(2))
        change = chance.randrange(6)
        if change == 0 and made:
            made[min(at, len(made) - 1)] ^= 1 << chance.randrange(8)
        elif change == 1:
            del made[at : min(end, at + 64)]
        elif change == 2:
            made[at:at] = made[at:end] * chance.choice((1, 2, 30))
        elif change == 3:
            made[at:at] = chance.choice(STRINGS).encode(errors="surrogatepass")
        elif change == 4:
            made[at:at] = str(chance.choice(NUMBERS)).encode()
        else:
            made = made[:end]
        if len(made) > MOST_BYTES:
            del made[MOST_BYTES:]
    return bytes(made)


def encoded(chance: random.Random, found: Any) -> bytes:
    """JSON of ``found``, with the NaN and half surrogates that Python writes, and now and then damaged."""
    try:
        is_large = sum(1 for _ in itertools.islice(_places(found), MOST_VALUES)) == MOST_VALUES
        plain = b"[" + b"0," * MOST_VALUES + b"0]" if is_large else json.dumps(found).encode()
    except (ValueError, RecursionError):
        plain = b"[" * 5000
    return content(chance, plain) if chance.random() < 0.3 else plain


def packed(chance: random.Random, plain: bytes) -> bytes:
    """Gzip of ``plain``, or a bomb, or something that begins as gzip."""
    kind = chance.randrange(8)
    if kind == 0:
        return bomb(chance)
    if kind == 1:
        return content(chance, gzip.compress(plain))
    if kind == 2:
        return gzip.compress(gzip.compress(plain))
    if kind == 3:
        return gzip.compress(plain)[: -chance.randint(1, 12)]
    return gzip.compress(plain)


def bomb(chance: random.Random) -> bytes:
    """Little that becomes much: zeros, numbers, lists side by side or in one another."""
    part, times = chance.choice(
        (
            (b"\x00", 50_000_000),
            (b"0,", 20_000_000),
            (b"[],", 4_000_000),
            (b"[", 100_000),
            (b'{"a":', 50_000),
            (b"9", 10**6),
        )
    )
    return gzip.compress(b"[" + part * times, compresslevel=1)


def yaml(chance: random.Random, good: str) -> str:
    """YAML that is wrong in ways JSON cannot be: aliases that grow, tags, several documents, tabs, duplicate keys."""
    laughs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    loop = "a: &a\n  b: *a\n"
    found: Sequence[Callable[[], str]] = (
        lambda: laughs + good,
        lambda: loop + good,
        lambda: good.replace("spec:", "spec: !!python/object/apply:os.system [id]\nspec2:"),
        lambda: good + "\n---\n" + good,
        lambda: good.replace("  ", "\t"),
        lambda: good + good,
        lambda: "[" * chance.choice(DEPTHS),
        lambda: "- " * chance.choice(DEPTHS),
        lambda: "{a: " * chance.choice(DEPTHS),
        lambda: "%YAML 9.9\n---\n" + good,
        lambda: "? " * chance.choice(DEPTHS),
        lambda: good.replace(": ", ": !!binary ", 3),
        lambda: good.replace("2", "1_000_000_000_000", 1),
        lambda: good.replace("2", "0x" + "f" * 200, 1),
        lambda: good.replace("2", "190:20:30:59", 1),
        lambda: good.replace("name:", "<<: *z\n  name:"),
        lambda: text(chance, good),
        lambda: text(chance, good),
    )
    return chance.choice(found)()
