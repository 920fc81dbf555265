"""Batches from tensors, arrays, data sets, loaders, tables and folders of images."""
