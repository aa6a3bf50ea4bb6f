"""Corpora: the documents of a source, their order, and which of them are held out for validation.

A text file is one document, and so is a line of a ``.jsonl`` file. Empty documents do not count. Documents are ordered
by the relative paths of their files. Links that lead out of a folder are refused. Text is read as *events*: pieces of
at most `PIECE_CHARACTERS` characters, and ``None`` at the end of a document, so that a corpus does not need to fit in
memory. Only a line of a ``.jsonl`` file is read as a whole.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from penstock.core import jsontext
from penstock.core.errors import UserError
from penstock.core.job import STDLIB_CORPUS
from penstock.core.preparing import SILENT, Reporter
from penstock.core.units import format_count
from penstock.trainer.data.safe_path import opened_inside

Event: TypeAlias = str | None

PIECE_CHARACTERS = 1 << 20
HOLD_OUT = 20
"""Every 20th document is held out. If there are fewer than 20 documents, the last 20th of their text is held out."""

_WHERE = "spec.data.source"

# The standard library without tests (17 of 31 MB, with invalid files, and a separate package on Debian), without
# installed packages and without tables. About 10 MB of code that resembles prose remain on any Python.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)
_STDLIB_SKIPPED_PREFIX = "_sysconfigdata"  # paths of the machine that built this Python


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Files below ``root``, in the order in which they are read. At most ``limit_bytes`` of their text are used.

    The targets of links have to lie within ``folder``, if given.
    """

    source: str
    root: Path
    files: tuple[str, ...]
    folder: Path | None = None
    text_field: str = "text"
    limit_bytes: int | None = None

    def events(self, accepts: Callable[[str], bool]) -> Iterator[Event]:
        """The text of every file whose name ``accepts`` accepts.

        Raises:
            UserError: a JSONL line is not an object with text in ``text_field``, or a file lies outside of the folder.
        """
        events = (event for name in self.files if accepts(name) for event in self._file_events(name))
        return events if self.limit_bytes is None else _limited(events, self.limit_bytes)

    def _file_events(self, name: str) -> Iterator[Event]:
        path = self.root / name
        if path.suffix == ".jsonl":
            return _jsonl_events(path, self.folder, self.text_field)
        return _text_events(path, self.folder)

    def is_text(self, name: str) -> bool:
        """Whether the file is UTF-8 text without NUL. Files with the suffix ``.jsonl`` always count as text."""
        path = self.root / name
        if path.suffix == ".jsonl":
            return True
        try:
            return not any(event is not None and "\0" in event for event in _text_events(path, self.folder))
        except (OSError, UnicodeDecodeError):
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Result of reading a whole corpus once. ``sha256`` covers the text and the ends of documents."""

    documents: int
    num_bytes: int
    sha256: str
    skipped: frozenset[str]
    python: str | None


def find_corpus(source: str, *, text_field: str = "text", limit_bytes: int | None = None) -> Corpus:
    """The corpus named by ``source``: ``python-stdlib``, a folder, a text file or a ``.jsonl`` file.

    Raises:
        UserError: there is no file or folder of that name.
    """
    root, folder = Path(sysconfig.get_path("stdlib")) if source == STDLIB_CORPUS else Path(source), None
    if source == STDLIB_CORPUS:
        files = tuple(sorted(_stdlib_files(root)))
    elif root.is_dir():
        files, folder = tuple(sorted(_folder_files(root))), root.resolve()
    elif root.is_file():
        root, files = root.parent, (root.name,)
    else:
        raise UserError(
            what=f"there is no file or folder '{source}'",
            where=_WHERE,
            remedy=f"give a folder of text, a .jsonl file, a token file, or {STDLIB_CORPUS}",
        )
    return Corpus(source=source, root=root, files=files, folder=folder, text_field=text_field, limit_bytes=limit_bytes)


def scan(corpus: Corpus, reporter: Reporter = SILENT) -> Scan:
    """Read ``corpus`` once, leaving out files that are not UTF-8 text.

    Raises:
        UserError: no file has text, a JSONL line is malformed, or a link leads out of the folder.
    """
    skipped: list[str] = []
    whole, document = hashlib.sha256(), hashlib.sha256()
    documents = num_bytes = 0
    total_bytes = _size_bytes(corpus)

    def accepts(name: str) -> bool:
        if corpus.is_text(name):
            return True
        skipped.append(name)
        return False

    for event in corpus.events(accepts):
        if event is None:
            whole.update(document.digest())
            document = hashlib.sha256()
            documents += 1
            continue
        data = event.encode()
        document.update(data)
        num_bytes += len(data)
        reporter.progress("reading", num_bytes, total_bytes)
    if skipped:
        files, verb = format_count(len(skipped), "file"), "is" if len(skipped) == 1 else "are"
        reporter.warning(f"{files} of {corpus.source} {verb} left out: not UTF-8 text, e.g. {skipped[0]}")
    if not num_bytes:
        raise UserError(
            what=f"'{corpus.source}' holds no text", where=_WHERE, remedy="give a folder with UTF-8 text in it"
        )
    return Scan(
        documents=documents,
        num_bytes=num_bytes,
        sha256=whole.hexdigest(),
        skipped=frozenset(skipped),
        python=platform.python_version() if corpus.source == STDLIB_CORPUS else None,
    )


def split_events(corpus: Corpus, scan: Scan) -> Iterator[tuple[bool, Event]]:
    """Pairs (is held out for validation, event) of a scanned corpus.

    Raises:
        UserError: the corpus has changed since it was scanned.
    """
    events = _unchanged_events(corpus, scan)
    if scan.documents >= HOLD_OUT:
        return _hold_out_documents(events)
    return _hold_out_tail(events, cut_bytes=scan.num_bytes - scan.num_bytes // HOLD_OUT)


def _unchanged_events(corpus: Corpus, scan: Scan) -> Iterator[Event]:
    num_bytes = 0
    try:
        for event in corpus.events(lambda name: name not in scan.skipped):
            num_bytes += len((event or "").encode())
            yield event
    except (OSError, UnicodeDecodeError) as error:
        raise _changed(corpus) from error
    if num_bytes != scan.num_bytes:
        raise _changed(corpus)


def _changed(corpus: Corpus) -> UserError:
    return UserError(
        what=f"'{corpus.source}' changed while it was read",
        where=_WHERE,
        remedy="run again when no program writes to it",
    )


def _hold_out_documents(events: Iterable[Event]) -> Iterator[tuple[bool, Event]]:
    document = 0
    for event in events:
        yield document % HOLD_OUT == HOLD_OUT - 1, event
        document += event is None


def _hold_out_tail(events: Iterable[Event], *, cut_bytes: int) -> Iterator[tuple[bool, Event]]:
    """A document that is cut gets an end in both parts. A cut between two documents creates no empty document."""
    has_text = False
    for held_out, event in _cut(events, cut_bytes):
        if event or (event is None and has_text):
            yield held_out, event
            has_text = event is not None


def _cut(events: Iterable[Event], cut_bytes: int) -> Iterator[tuple[bool, Event]]:
    left_bytes = cut_bytes
    for event in events:
        size = len(event.encode()) if event is not None else 0
        if event is None or left_bytes <= 0 or size < left_bytes:
            yield left_bytes <= 0, event
        else:
            head = _clip(event, left_bytes)
            yield from ((False, head), (False, None), (True, event[len(head) :]))
        left_bytes -= size


def _limited(events: Iterable[Event], limit_bytes: int) -> Iterator[Event]:
    """Events up to ``limit_bytes`` of text. The document that reaches the limit is cut."""
    left_bytes = limit_bytes
    for event in events:
        size = len(event.encode()) if event is not None else 0
        if event is not None and size >= left_bytes:
            yield _clip(event, left_bytes)
            yield None
            return
        yield event
        left_bytes -= size


def _clip(text: str, num_bytes: int) -> str:
    """The longest prefix of ``text`` with at most ``num_bytes`` bytes and only whole characters."""
    return text.encode()[:num_bytes].decode(errors="ignore")


def _text_events(path: Path, folder: Path | None) -> Iterator[Event]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    empty = True
    with opened_inside(path, folder) as file:
        while data := file.read(PIECE_CHARACTERS):  # as many bytes, which are at most as many characters
            yield decoder.decode(data)
            empty = False
    decoder.decode(b"", final=True)
    if not empty:
        yield None


def _jsonl_events(path: Path, folder: Path | None, text_field: str) -> Iterator[Event]:
    with opened_inside(path, folder) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            text = _jsonl_text(line, text_field, where=f"{path}:{number}")
            if text:
                yield from (text[i : i + PIECE_CHARACTERS] for i in range(0, len(text), PIECE_CHARACTERS))
                yield None


def _jsonl_text(line: bytes, text_field: str, *, where: str) -> str:
    try:
        record = jsontext.load(line)
    except ValueError as error:
        raise UserError(what=f"is not JSON: {error}", where=where, remedy="put one JSON object on each line") from error
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(
            what=f"has no text in field '{text_field}'",
            where=where,
            remedy="name the field that holds the text in spec.data.textField",
        )
    # JSON can escape lone surrogates, which UTF-8 cannot encode
    return text.encode(errors="replace").decode()


def _stdlib_files(root: Path) -> Iterator[str]:
    for name in _walk(root, enters=lambda folder: folder not in _STDLIB_SKIPPED_FOLDERS):
        base = name.rpartition("/")[2]
        if base.endswith(".py") and not base.startswith(_STDLIB_SKIPPED_PREFIX):
            yield name


def _folder_files(root: Path) -> Iterator[str]:
    names = _walk(root, enters=lambda folder: not folder.startswith("."))
    return (name for name in names if not name.rpartition("/")[2].startswith("."))


def _walk(root: Path, *, enters: Callable[[str], bool]) -> Iterator[str]:
    """Relative paths, with ``/``, of the regular files below ``root``, in arbitrary order."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = filter(enters, subfolders)
        paths = (Path(folder, name) for name in names)
        yield from (path.relative_to(root).as_posix() for path in paths if path.is_file())


def _size_bytes(corpus: Corpus) -> int:
    total = sum((corpus.root / name).stat().st_size for name in corpus.files)
    return total if corpus.limit_bytes is None else min(total, corpus.limit_bytes)
