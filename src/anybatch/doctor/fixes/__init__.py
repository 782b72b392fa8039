"""Fixes as edits of the user's own lines: made by position, so that all else of a file stays as it was."""
