"""/v1/profiles: measurements of machines, with their age and quality."""

from __future__ import annotations

from fastapi import APIRouter

from penstock.api.http.dependencies import ServiceIn, Viewer
from penstock.api.http.problems import READS
from penstock.api.schemas.plans import ProfilePage, ProfileView, profile_row, profile_view
from penstock.api.store import profiles

router = APIRouter(tags=["plans"])


@router.get("/v1/profiles", responses=READS, operation_id="listProfiles")
def list_profiles(service: ServiceIn, identity: Viewer) -> ProfilePage:
    """List every profile, newest first. Profiles belong to machines, and so to no namespace."""
    now = service.clock()
    return ProfilePage(items=[profile_row(profile, now) for profile in service.read(profiles.every)])


@router.get("/v1/profiles/{digest}", responses=READS, operation_id="getProfile")
def get(service: ServiceIn, identity: Viewer, digest: str) -> ProfileView:
    """Return a profile: costs of layers, links between ranks as matrices, memory, and the whole manifest."""
    stored, profile = service.read(lambda connection: profiles.get(connection, digest))
    return profile_view(stored, profile, service.clock())
