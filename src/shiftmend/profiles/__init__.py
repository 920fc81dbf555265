"""Profiles: collect one at home, store it in a file, read it back."""
