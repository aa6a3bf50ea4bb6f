"""The passes of lowering, in their order: each adds one kind of knowledge to a schedule until it is a Program."""
