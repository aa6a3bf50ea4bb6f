"""Drawings of timelines, plans and runs: SVG, HTML, plotly figures, text for terminals, and Chrome traces."""
