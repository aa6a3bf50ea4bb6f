"""The passes of lowering, in their order: each adds information to a schedule until it is a Program."""
