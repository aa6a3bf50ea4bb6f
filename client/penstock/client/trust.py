"""Whose certificates are believed."""

from __future__ import annotations

import ssl
from pathlib import Path

from penstock.core.errors import UserError


def trusted(ca: Path | None) -> ssl.SSLContext | bool:
    """Only the certificates in the file, each by itself whatever its issuer; without a file, those that httpx trusts.

    Raises:
        UserError: the file is not there, or holds no certificate.
    """
    if ca is None:
        return True
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        remedy = "name a PEM file of the service's certificate, or of the authority that signed it"
        raise UserError(what=f"cannot be read: {error}", where=f"PENSTOCK_CA {ca}", remedy=remedy) from None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
