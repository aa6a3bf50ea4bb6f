"""Units of a model, with hand-written forward (F), input-gradient (I) and weight-gradient (W) passes."""
