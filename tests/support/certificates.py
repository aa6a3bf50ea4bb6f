"""Certificates for this machine's own address, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from penstock.api.settings import Tls


def certificate(folder: Path, name: str = "service", password: str | None = None) -> Tls:
    """One that signed itself, for 127.0.0.1, and its key."""
    made = Tls(certificate=folder / f"{name}.pem", key=folder / f"{name}.key")
    secrecy = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *secrecy]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-keyout", made.key, "-out", made.certificate], check=True, capture_output=True)
    return made
