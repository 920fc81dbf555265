"""Profiles: collect one at home, save it to a file, and load it at a site."""
