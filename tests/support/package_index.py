"""A package index on this machine: it has every package of constraints.txt as an empty wheel, and refuses our names."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.repository import ROOT

OURS = "penstock"


class PackageIndex:
    """What it has, by name, and the names that it was asked for."""

    def __init__(self, versions: dict[str, str]) -> None:
        self.versions = versions
        self.asked: set[str] = set()
        self.url = ""

    def page(self, name: str) -> bytes | None:
        """The list of files of a package; none for ours and for those that it does not have."""
        self.asked.add(canonicalize_name(name))
        if name.startswith(OURS) or name not in self.versions:
            return None
        file = f"{name.replace('-', '_')}-{self.versions[name]}-py3-none-any.whl"
        return f'<!DOCTYPE html><html><body><a href="/files/{file}">{file}</a></body></html>'.encode()


def wheel(file: str) -> bytes:
    """A package of that name and version, with nothing in it, that needs nothing."""
    name, version, *_ = file.split("-")
    folder, content = f"{name}-{version}.dist-info", io.BytesIO()
    files = {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{folder}/RECORD"])
    with zipfile.ZipFile(content, "w") as archive:
        for path, text in {**files, f"{folder}/RECORD": record}.items():
            archive.writestr(path, text)
    return content.getvalue()


@contextmanager
def serving() -> Iterator[PackageIndex]:
    """The index, for as long as the block."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = [each for each in constraints if each.marker is None or each.marker.evaluate()]
    index = PackageIndex({canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in here})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, kind, name, *_ = self.path.split("/")
            body = index.page(name) if kind == "simple" else wheel(name)
            self.send_response(403 if body is None else 200)
            self.send_header("Content-Type", "text/html" if kind == "simple" else "application/octet-stream")
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body or b"")

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        index.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield index
        finally:
            server.shutdown()
            thread.join()
