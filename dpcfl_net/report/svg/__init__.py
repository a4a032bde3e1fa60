"""Figures as SVG, drawn without a browser: for pages in the colours of the theme, for files in fixed ones."""
