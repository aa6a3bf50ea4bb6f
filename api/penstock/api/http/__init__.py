"""HTTP: routes, what they are given and answer, and what stands before and around them."""
