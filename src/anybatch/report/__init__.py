"""One self-contained HTML file from plain facts. The extra ``report`` brings what it needs."""
