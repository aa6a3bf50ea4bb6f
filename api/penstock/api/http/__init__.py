"""HTTP layer: routes, their dependencies and replies, and the middleware around them."""
