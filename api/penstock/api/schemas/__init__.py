"""REST schemas of types of core and the store, as pydantic models, and the bodies of requests."""
