"""The drawing: timelines, charts and reports as SVG and HTML."""
