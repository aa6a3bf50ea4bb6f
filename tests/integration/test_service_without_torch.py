"""`penstock serve` needs nothing that trains, and loads none of it: it answers where there is no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx

from tests.support.load_service import free_ports
from tests.support.serving import wait_until

REFUSING = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors", "tokenizers", "numba"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
from penstock.cli.main import main
sys.exit(main())
"""


def test_a_service_answers_where_there_is_no_torch(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    configuration = tmp_path / "penstock" / "service.json"
    command = [sys.executable, "-c", REFUSING, "serve", "--folder", str(tmp_path / "data"), "--port", str(port)]
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: process.poll() is not None or (configuration.exists() and answers(port)))
            assert process.poll() is None, process.communicate()
            bearer = {"Authorization": f"Bearer {json.loads(configuration.read_text())['token']}"}
            listed = httpx.get(f"http://127.0.0.1:{port}/v1/jobs", headers=bearer, trust_env=False)
            assert (listed.status_code, listed.json()["items"]) == (200, [])
        finally:
            process.terminate()
            process.communicate()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
