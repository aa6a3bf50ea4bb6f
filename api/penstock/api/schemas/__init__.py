"""The REST shape of what core and the store know, as pydantic models, and the bodies of requests."""
