"""/v1/tokens: administrators create, list and revoke tokens."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sqlalchemy import Connection

from penstock.api.auth.identity import PREFIX, Identity, Role
from penstock.api.http.dependencies import Admin, CredentialIn, ServiceIn
from penstock.api.http.problems import answers
from penstock.api.http.replies import NewSecret, Once, reply, write_secret_once
from penstock.api.schemas.access import NewToken, TokenPage, TokenRequest, TokenView, token_view
from penstock.api.store import tokens
from penstock.api.store.idempotency import Answer
from penstock.core.errors import UserError

router = APIRouter(tags=["tokens"])

READS = answers("unauthenticated", "forbidden")
WRITES = answers("unauthenticated", "forbidden", "not-found", "conflict", "too-large", "invalid", "storage-full")


@router.post("/v1/tokens", status_code=201, response_model=NewToken, responses=WRITES, operation_id="createToken")
def create(
    service: ServiceIn, identity: Admin, credential: CredentialIn, wanted: TokenRequest, keyed: Once
) -> Response:
    """Create a token. Only this answer contains its secret. On a cluster the token of an editor needs a namespace."""
    if service.cluster is not None and wanted.role is Role.EDITOR and wanted.namespace is None:
        raise UserError(
            what="is missing: an editor changes jobs of one namespace",
            where="namespace",
            remedy="name the namespace whose jobs it may change, and create one token for each namespace",
        )
    bearer = Identity(name=wanted.name, role=wanted.role, namespace=wanted.namespace)
    now = service.clock()

    def change(connection: Connection, new: NewSecret) -> Answer:
        made, _ = tokens.add(connection, bearer, now, wanted.lifetime_seconds, new.secret)
        return reply(NewToken(**token_view(made).model_dump(by_alias=False), token=new.salted), 201)

    return write_secret_once(service, "tokens", keyed, credential, PREFIX, change)


@router.get("/v1/tokens", responses=READS, operation_id="listTokens")
def list_tokens(service: ServiceIn, identity: Admin) -> TokenPage:
    """List every token, newest first, without its secret."""
    return TokenPage(items=[token_view(token) for token in service.read(tokens.every)])


@router.delete("/v1/tokens/{token}", responses=WRITES, operation_id="revokeToken")
def revoke(service: ServiceIn, identity: Admin, token: str) -> TokenView:
    """Revoke a token permanently."""
    now = service.clock()
    revoked = service.write("tokens", lambda connection: tokens.revoke(connection, token, now))
    service.known_tokens.forget()
    return token_view(revoked)
