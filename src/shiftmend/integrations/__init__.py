"""Adapters to other libraries, one file each, imported on demand."""
