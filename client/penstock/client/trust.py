"""Choice of trusted certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

from penstock.core.errors import UserError


def trusted(ca: Path | None) -> ssl.SSLContext | bool:
    """Trust only the certificates in the file, regardless of their issuers; without a file, those of httpx.

    Raises:
        UserError: the file does not exist, or contains no certificate.
    """
    if ca is None:
        return True
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        remedy = "set it to a PEM file with the certificate of the service or of its authority"
        raise UserError(what=f"cannot be read: {error}", where=f"PENSTOCK_CA {ca}", remedy=remedy) from None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
