"""Turns a source of text or tokens into prepared data in a cache, once.

The cache key is a digest of the tokenizer's settings and of the input, so equal inputs share one result. The input is
the text, or for token files their paths and headers, or for a ``.npy`` file its path, size and time of change.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple
from functools import partial
from pathlib import Path

from penstock.core.job import DataSpec
from penstock.core.preparing import SILENT, Reporter
from penstock.trainer.data.cache import cached
from penstock.trainer.data.corpus import HOLD_OUT, find_corpus, scan
from penstock.trainer.data.prepared import (
    FORMAT,
    Part,
    Prepared,
    check_prepared,
    open_prepared,
    write_prepared,
)
from penstock.trainer.data.safe_path import require_inside
from penstock.trainer.data.tokenise import tokenise
from penstock.trainer.data.tokenizer import identity, make_tokenizer
from penstock.trainer.data.tokens import chunked, read_header, read_npy, verify_tokens, write_tokens


def prepare(data: DataSpec, cache: Path, *, reporter: Reporter = SILENT) -> Prepared:
    """Tokenise ``data`` into ``cache``, or reuse an earlier result. Several processes may call it for the same data.

    The source is ``python-stdlib``, a folder of text and ``.jsonl`` files, one such file, a ``.bin`` token file, a
    ``.npy`` file of ids, or a folder with ``train.bin`` and optionally ``validation.bin``. Without ``validation.bin``
    the last 20th of the tokens is held out. ``limit_bytes`` limits the text, or each token file. For token files the
    job may name the tokenizer that made them; no tokenizer is trained.

    Raises:
        UserError: source or tokenizer is missing, empty or malformed, a link leads out of a folder, or the cache cannot
            be written.
    """
    if files := _token_files(Path(data.source)):
        key = _key(*map(_describe, files), str(data.limit_bytes), identity(data.tokenizer))
        build = partial(_refer, files, data)
    else:
        corpus = find_corpus(data.source, text_field=data.text_field, limit_bytes=data.limit_bytes)
        scanned = scan(corpus, reporter)
        key = _key(scanned.sha256, identity(data.tokenizer))
        build = partial(tokenise, corpus, scanned, data.tokenizer, reporter=reporter)
    return open_prepared(cached(cache, key, build=build, check=check_prepared, reporter=reporter))


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join((FORMAT, *parts)).encode()).hexdigest()[:32]


def _token_files(source: Path) -> list[Path]:
    """The token files that ``source`` names: training, then validation if it has its own. Empty for text."""
    if source.suffix in (".bin", ".npy") and source.is_file():
        return [source.resolve()]
    folder = source.resolve()
    train, validation = (folder / f"{split}.bin" for split in ("train", "validation"))
    if not train.is_file():
        return []
    files = [train, validation] if validation.is_file() else [train]
    for file in files:
        require_inside(file.resolve(), folder, file)
    return files


def _describe(file: Path) -> str:
    if file.suffix == ".npy":
        status = file.stat()
        return f"{file} {status.st_size} {status.st_mtime_ns}"
    return f"{file} {astuple(read_header(file))}"


def _refer(files: list[Path], data: DataSpec, folder: Path) -> None:
    """Write prepared data that refers to token files."""
    paths = [_import_npy(files[0], folder)] if files[0].suffix == ".npy" else files
    headers = [verify_tokens(folder / path) for path in paths]
    stops = [header.limit_count(data.limit_bytes) for header in headers]
    own_validation = len(paths) > 1
    cut = stops[0] if own_validation else stops[0] - stops[0] // HOLD_OUT
    first = 0 if own_validation else cut
    write_prepared(
        folder,
        train=Part(path=str(paths[0]), header=headers[0], start=0, stop=cut),
        validation=Part(path=str(paths[-1]), header=headers[-1], start=first, stop=stops[-1]),
        tokenizer=None if data.tokenizer.train == "bpe" else make_tokenizer(data.tokenizer, iter(())),
        origin={"files": [str(file) for file in files], "sha256": [header.sha256 for header in headers]},
    )


def _import_npy(file: Path, folder: Path) -> Path:
    tokens = read_npy(file)
    write_tokens(folder / "tokens.bin", chunked(tokens), vocab=tokens.vocab)
    return Path("tokens.bin")
