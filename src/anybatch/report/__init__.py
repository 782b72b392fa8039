"""One self-contained HTML file from plain facts."""
